"""Tests of a publish: the version equals its source."""

import hashlib
import os
import stat
from dataclasses import replace
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pooled import collection
from safetensors.torch import load_file
from store.conftest import MakeEbc
from torchrec import EmbeddingBagCollection, PoolingType

from embedserve_store.errors import InvalidModelError
from embedserve_store.format.row_layout import dequantize_rows
from embedserve_store.format.table_spec import DTYPES, TableSpec
from embedserve_store.local_store import LocalStore
from embedserve_store.model_version import ModelVersion
from embedserve_store.publishing.pooled_error import PooledError
from embedserve_store.publishing.publish import publish
from embedserve_store.publishing.write_expected import write_expected
from embedserve_store.sources import live
from embedserve_store.sources.description import Description
from embedserve_store.verification import verify

RELATIVE_ERROR_MAX = {"float16": 1e-3, "int8": 1e-2, "int4": 0.2}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_published_and_loaded(
    ebc: EmbeddingBagCollection, tmp_path: Path, dtype: str
) -> None:
    published = publish(ebc, tmp_path, model="m", dtype=dtype)
    assert published.path == tmp_path / "m" / "1"
    version = LocalStore(tmp_path).load("m")
    verify(version)
    assert version.manifest == published.manifest
    assert version.plan == published.plan
    assert sorted(os.listdir(version.path)) == [
        "goldens.safetensors",
        "manifest.json",
        "plan.json",
        "tables.safetensors",
    ]
    for table in published.manifest.tables:
        assert table.dtype == dtype
        error = published.errors[table.name]
        if dtype == "float32":
            assert error == PooledError(0.0, error.cosine, error.cosine_min, 0.0, 0)
            assert error.cosine == pytest.approx(1.0)
            assert error.cosine_min == pytest.approx(1.0)
        else:
            assert 0 < error.relative_l2 <= RELATIVE_ERROR_MAX[dtype]
            assert 1 - RELATIVE_ERROR_MAX[dtype] < error.cosine_min <= error.cosine < 1
            assert (
                error.bytes_saved == 4 * table.num_embeddings * table.embedding_dim - table.nbytes
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_tables_of_any_width_are_published(tmp_path: Path, dtype: str) -> None:
    torch.manual_seed(9)
    widths = {"a": 10, "b": 3, "c": 8}
    source = collection([(f"t{w}", 20, w, [f], PoolingType.SUM) for f, w in widths.items()])
    write_expected(source, tmp_path / "expected.safetensors")
    path = tmp_path / "a.pt"
    torch.save(source.state_dict(), path)
    described = [replace(table, dtype=dtype) for table in live.describe(source)]
    published = publish(
        path,
        tmp_path / "store",
        tables=described,
        model="m",
        expected=tmp_path / "expected.safetensors",
    )
    version = LocalStore(tmp_path / "store").load("m")
    verify(version)
    assert version.manifest.length_per_key == (10, 3, 8)
    assert [table.stored_dim for table in version.manifest.tables] == [12, 4, 8]
    stored = {table["name"]: table for table in version.manifest.to_json()["tables"]}
    assert (stored["t10"]["embedding_dim"], stored["t3"]["embedding_dim"]) == (10, 3)
    for table in version.manifest.tables:
        rows = dequantize_rows(version.tables.rows(table.name), dtype, table.embedding_dim)
        trained = source.embedding_bags[table.name].weight.detach().numpy()
        assert rows.shape == trained.shape
        assert np.abs(rows - trained).max() <= {"float32": 0}.get(dtype, 0.1) * np.ptp(trained)
        assert published.errors[table.name].relative_l2 <= RELATIVE_ERROR_MAX.get(dtype, 0)


def test_constraints_decide_the_sharding_of_their_table(
    ebc: EmbeddingBagCollection, tmp_path: Path
) -> None:
    constraints = {"user": {"sharding_types": ["row_wise"]}, "item": {"pooling_factors": [2.0]}}
    options: dict[str, Any] = {"model": "m", "world_size": 2, "constraints": constraints}
    plan = publish(ebc, tmp_path, **options).plan
    kinds = {name: table.sharding_type for name, table in plan.tables.items()}
    assert kinds == {"user": "row_wise", "item": "table_wise", "tag": "table_wise"}
    with pytest.raises(InvalidModelError, match=r"'user': sharding is table_wise, but its constr"):
        publish(ebc, tmp_path, sharding="table_wise", **options)


def test_sharding_of_one_table_keeps_described_sharding_of_the_rest(
    ebc: EmbeddingBagCollection, tmp_path: Path
) -> None:
    described = Description(
        live.describe(ebc),
        sharding={"user": "table_wise", "item": "column_wise", "tag": "row_wise"},
    )
    options: dict[str, Any] = {"model": "m", "world_size": 2, "tables": described}
    for sharding, expected in (
        ({"user": "row_wise"}, {"user": "row_wise", "item": "column_wise", "tag": "row_wise"}),
        ("row_wise", dict.fromkeys(("user", "item", "tag"), "row_wise")),
    ):
        plan = publish(ebc.state_dict(), tmp_path, sharding=sharding, **options).plan
        assert {name: table.sharding_type for name, table in plan.tables.items()} == expected


def test_manifest_records_checkpoint_and_meta(ebc: EmbeddingBagCollection, tmp_path: Path) -> None:
    torch.save({"embedding_bags.user.weight": torch.ones(10, 4)}, tmp_path / "c.pt")
    tables = [TableSpec("user", 10, 4, ("user",), "sum", "float32")]
    options: dict[str, Any] = {"model": "m", "tables": tables}
    published = publish(tmp_path / "c.pt", tmp_path / "s", meta={"run": "8141"}, **options)
    source = published.manifest.source
    assert (source["checkpoint"], source["meta"]) == (f"{tmp_path}/c.pt", {"run": "8141"})
    assert {"checkpoint", "meta"} & publish(
        ebc, tmp_path, model="n"
    ).manifest.source.keys() == set()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"": "x"}, "meta '': expected a name and a value"),
        ({"run": 8141}, "meta 'run' is 8141, expected strings"),
        ({"k": "x" * 1000}, "meta 'k': expected a name and a value of together 1000 characters"),
        ({str(i): "" for i in range(65)}, "meta has 65 entries, the limit is 64"),
    ]
    for meta, message in wrong:
        with pytest.raises(InvalidModelError, match=message):
            publish(tmp_path / "c.pt", tmp_path / "s", meta=meta, **options)
    assert LocalStore(tmp_path / "s").versions("m") == [1]


def test_published_files_are_read_only(ebc: EmbeddingBagCollection, tmp_path: Path) -> None:
    (tmp_path / "locked").touch(0o444)
    vocabulary = list(range(1000, 1300))
    path = publish(ebc, tmp_path, model="m", vocabularies={"user": vocabulary}).path
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()}
    assert len(modes) == 5
    assert [name for name, mode in modes.items() if mode & 0o222] == []
    if not os.access(tmp_path / "locked", os.W_OK):  # root writes to read-only files
        for name in modes:
            with pytest.raises(PermissionError):
                (path / name).open("r+b")


def test_float32_rows_equal_the_module_weights(ebc: EmbeddingBagCollection, tmp_path: Path) -> None:
    published = publish(ebc, tmp_path, model="m")
    for name, tensor in load_file(published.path / "tables.safetensors").items():
        assert torch.equal(tensor, ebc.embedding_bags[name].weight.detach())


def test_goldens_equal_the_module_results(ebc: EmbeddingBagCollection, tmp_path: Path) -> None:
    published = publish(ebc, tmp_path, model="m", dtype="int8")
    goldens = LocalStore(tmp_path).load("m").goldens()
    expected = live.answers(ebc, published.manifest, goldens.bags)
    np.testing.assert_array_equal(goldens.source_answers, expected)
    difference = np.abs(goldens.stored_answers - expected).max()
    assert 0 < difference < 0.01 * np.abs(expected).max()


def test_table_larger_than_a_block_is_stored_completely(
    ebc: EmbeddingBagCollection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = publish(ebc, tmp_path, model="m", dtype="int4")
    monkeypatch.setattr("embedserve_store.publishing.version_writer.BLOCK_BYTES", 500)
    calls: list[tuple[str, int, int, int]] = []
    blocks = publish(
        ebc, tmp_path, model="m", dtype="int4", progress=lambda *call: calls.append(call)
    )
    assert blocks.manifest.tables == whole.manifest.tables
    assert len(calls) > 10
    assert calls[-1][3] == whole.manifest.nbytes


def test_dtype_and_sharding_are_set_per_table(version: ModelVersion) -> None:
    assert [table.dtype for table in version.manifest.tables] == ["float32", "int8", "int4"]
    assert {plan.sharding_type for plan in version.plan.tables.values()} == {"row_wise"}
    assert version.plan.world_size == 2


def test_manifest_records_source_kind_versions_and_time(version: ModelVersion) -> None:
    source = version.manifest.source
    assert source["kind"] == "embedding_bag_collection"
    assert source["versions"]["torch"] == metadata.version("torch")
    assert source["versions"]["torchrec"] == metadata.version("torchrec")
    written_s = (version.path / "manifest.json").stat().st_mtime  # a copy keeps it
    age_s = written_s - datetime.fromisoformat(source["published_at"]).timestamp()
    assert -1 <= age_s < 600


@pytest.mark.parametrize(
    "options",
    [{"half": True}, {"is_weighted": True, "pooling": "sum"}, {"is_weighted": True}],
    ids=["half", "weighted", "weighted mean"],
)
def test_half_and_weighted_modules_are_published_without_loss(
    make_ebc: MakeEbc, tmp_path: Path, options: dict[str, Any]
) -> None:
    published = publish(make_ebc(**options), tmp_path, model="m")
    verify(LocalStore(tmp_path).load("m"))
    assert published.manifest.is_weighted == options.get("is_weighted", False)
    assert all(error.relative_l2 < 1e-6 for error in published.errors.values())


def test_publish_does_not_modify_the_module(ebc: EmbeddingBagCollection, tmp_path: Path) -> None:
    before = {name: tensor.clone() for name, tensor in ebc.state_dict().items()}
    publish(ebc, tmp_path, model="m", dtype="float16")
    assert all(torch.equal(before[name], tensor) for name, tensor in ebc.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in ebc.parameters())


def test_state_dict_is_published_like_its_module(
    ebc: EmbeddingBagCollection, tmp_path: Path
) -> None:
    state_dict = {f"model.{name}": tensor for name, tensor in ebc.state_dict().items()}
    state_dict["model.over.weight"] = torch.ones(3)
    tables = live.describe(ebc)
    a = publish(ebc, tmp_path, model="a", dtype="int8")
    b = publish(state_dict, tmp_path, tables=tables, model="b", dtype="int8")
    assert b.manifest.tables == a.manifest.tables
    assert b.manifest.source["kind"] == "state_dict"
    assert b.skipped == ("model.over.weight",)
    one, other = (LocalStore(tmp_path).load(model).goldens() for model in "ab")
    np.testing.assert_allclose(one.source_answers, other.source_answers, rtol=1e-5, atol=1e-7)


def test_state_dict_is_stored_in_the_described_dtypes(
    ebc: EmbeddingBagCollection, tmp_path: Path
) -> None:
    tables = publish(ebc, tmp_path, model="a", dtype="int4").manifest.tables
    b = publish(ebc.state_dict(), tmp_path, tables=tables, model="b")
    assert b.manifest.tables == tables


def test_manifest_checksums_match_the_files(version: ModelVersion) -> None:
    for name, checksum in version.manifest.files.items():
        data = (version.path / name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == checksum
