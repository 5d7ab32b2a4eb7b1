"""Tests of a publish: the version equals its source, and a failed publish leaves no files."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from store.listing import everything_under
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from embedserve_store.errors import InvalidModelError, StoreError
from embedserve_store.format.id_rule import IdRule
from embedserve_store.format.row_layout import dequantize_rows
from embedserve_store.format.table_spec import DTYPES, TableSpec
from embedserve_store.local_store import LocalStore
from embedserve_store.model_version import ModelVersion
from embedserve_store.publishing.pooled_error import PooledError
from embedserve_store.publishing.publish import check_options, publish
from embedserve_store.publishing.publish_sharded import publish_sharded
from embedserve_store.publishing.write_expected import write_expected
from embedserve_store.sources import live
from embedserve_store.sources.description import Description, read_description
from embedserve_store.verification import verify

DRAFT = """
tables:  # check: answers are in this order
  - {name: user, num_embeddings: 10, embedding_dim: 4, feature_names: [user], pooling: sum}
"""
MakeEbc = Callable[..., EmbeddingBagCollection]
RELATIVE_ERROR_MAX = {"float16": 1e-3, "int8": 1e-2, "int4": 0.2}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_published_and_loads(
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
    tables = [
        EmbeddingBagConfig(name=f"t{dim}", num_embeddings=20, embedding_dim=dim, feature_names=[f])
        for dim, f in ((10, "a"), (3, "b"), (8, "c"))
    ]
    source = EmbeddingBagCollection(tables=tables)
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


def test_a_url_that_lost_a_slash_is_no_folder(
    ebc: EmbeddingBagCollection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidModelError, match="store is 's3:/b/x': give a URL as a str"):
        publish(ebc, Path("s3://b/x"), model="m")
    assert list(tmp_path.iterdir()) == []


def test_a_draft_is_published_only_where_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "d.yaml").write_text(DRAFT)
    draft = read_description(str(tmp_path / "d.yaml"))
    state = {"embedding_bags.user.weight": torch.ones(10, 4)}
    with pytest.raises(InvalidModelError, match=r"d\.yaml: line 2, 'tables:  # check: .*guessed"):
        publish(state, tmp_path / "store", model="m", tables=draft)
    assert not (tmp_path / "store").exists()
    publish(state, tmp_path / "store", model="m", tables=draft, accept_draft=True)


def test_another_layout_than_before_is_published_only_where_that_is_said(
    make_ebc: MakeEbc, tmp_path: Path
) -> None:
    publish(make_ebc(), tmp_path, model="m")
    before = everything_under(tmp_path)
    with pytest.raises(InvalidModelError) as caught:
        publish(make_ebc(pooling="mean"), tmp_path, model="m")
    assert "has another layout than version 1: key 'user': pooling sum to mean; " in str(
        caught.value
    )
    assert everything_under(tmp_path) == before
    assert publish(make_ebc(), tmp_path, model="m", dtype="int8").version == 2
    changed = make_ebc(pooling="mean")
    assert publish(changed, tmp_path, model="m", layout_changed=True).version == 3
    assert publish(make_ebc(pooling="mean"), tmp_path, model="m").version == 4


def test_where_the_version_before_is_damaged_its_layout_is_not_guessed(
    ebc: EmbeddingBagCollection, version: ModelVersion
) -> None:
    store = version.path.parent.parent
    (version.path / "manifest.json").write_text("{")
    with pytest.raises(InvalidModelError, match=r"cannot be compared \(.*manifest.json: not JSON"):
        publish(ebc, store, model="m")
    assert publish(ebc, store, model="m", layout_changed=True).version == 2


def test_constraints_that_name_a_sharding_need_no_other(
    ebc: EmbeddingBagCollection, tmp_path: Path
) -> None:
    constraints = {"user": {"sharding_types": ["row_wise"]}, "item": {"pooling_factors": [2.0]}}
    options: dict[str, Any] = {"model": "m", "world_size": 2, "constraints": constraints}
    plan = publish(ebc, tmp_path, **options).plan
    kinds = {name: table.sharding_type for name, table in plan.tables.items()}
    assert kinds == {"user": "row_wise", "item": "table_wise", "tag": "table_wise"}
    with pytest.raises(InvalidModelError, match=r"'user': sharding is table_wise, but its constr"):
        publish(ebc, tmp_path, sharding="table_wise", **options)


def test_a_choice_for_one_table_leaves_the_sharding_that_others_are_described_with(
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


def test_rows_on_meta_are_refused(make_ebc: MakeEbc, tmp_path: Path) -> None:
    with pytest.raises(InvalidModelError, match=r"table 'user': its weight is on meta, "):
        publish(make_ebc().to("meta"), tmp_path, model="m")
    assert list(tmp_path.iterdir()) == []


def test_the_manifest_says_where_a_version_came_from(
    ebc: EmbeddingBagCollection, tmp_path: Path
) -> None:
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


def test_float_rows_are_the_modules(ebc: EmbeddingBagCollection, tmp_path: Path) -> None:
    published = publish(ebc, tmp_path, model="m")
    for name, tensor in load_file(published.path / "tables.safetensors").items():
        assert torch.equal(tensor, ebc.embedding_bags[name].weight.detach())


def test_goldens_hold_the_modules_answers(ebc: EmbeddingBagCollection, tmp_path: Path) -> None:
    published = publish(ebc, tmp_path, model="m", dtype="int8")
    goldens = LocalStore(tmp_path).load("m").goldens()
    expected = live.answers(ebc, published.manifest, goldens.bags)
    np.testing.assert_array_equal(goldens.source_answers, expected)
    difference = np.abs(goldens.stored_answers - expected).max()
    assert 0 < difference < 0.01 * np.abs(expected).max()


def test_a_table_larger_than_a_block_is_stored_whole(
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


def test_dtype_and_sharding_by_table(version: ModelVersion) -> None:
    assert [table.dtype for table in version.manifest.tables] == ["float32", "int8", "int4"]
    assert {plan.sharding_type for plan in version.plan.tables.values()} == {"row_wise"}
    assert version.plan.world_size == 2


def test_the_manifest_says_where_the_model_came_from(version: ModelVersion) -> None:
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
def test_other_modules_publish_without_loss(
    make_ebc: MakeEbc, tmp_path: Path, options: dict[str, Any]
) -> None:
    published = publish(make_ebc(**options), tmp_path, model="m")
    verify(LocalStore(tmp_path).load("m"))
    assert published.manifest.is_weighted == options.get("is_weighted", False)
    assert all(error.relative_l2 < 1e-6 for error in published.errors.values())


def test_publishing_changes_nothing_in_the_module(
    ebc: EmbeddingBagCollection, tmp_path: Path
) -> None:
    before = {name: tensor.clone() for name, tensor in ebc.state_dict().items()}
    publish(ebc, tmp_path, model="m", dtype="float16")
    assert all(torch.equal(before[name], tensor) for name, tensor in ebc.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in ebc.parameters())


def test_a_state_dict_publishes_as_the_module_does(
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


def test_a_state_dict_keeps_the_described_dtypes(
    ebc: EmbeddingBagCollection, tmp_path: Path
) -> None:
    tables = publish(ebc, tmp_path, model="a", dtype="int4").manifest.tables
    b = publish(ebc.state_dict(), tmp_path, tables=tables, model="b")
    assert b.manifest.tables == tables


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int2"}, "table 'user': dtype is 'int2', expected one of float32"),
        ({"dtype": {"usr": "int8"}}, "dtype names table 'usr', the model has"),
        ({"sharding": "grid"}, "table 'user': sharding is 'grid'"),
        ({"sharding": {"usr": "row_wise"}}, "sharding names table 'usr'"),
        ({"ids": {"usr": IdRule()}}, "ids names table 'usr'"),
        ({"vocabularies": {"usr": [1]}}, "vocabularies names table 'usr'"),
        ({"ids": {"tag": IdRule(rule="map")}}, "table 'tag': ids.rule is 'map': it needs a voc"),
        ({"prefix": "model"}, "EmbeddingCollection under 'model', found EmbeddingBagCollection"),
        ({"tables": []}, "a module describes itself"),
        ({"world_size": 0}, "world_size is 0"),
        ({"model": "../m"}, r"model name '\.\./m': use letters"),
        ({"model": ".m"}, r"model name '\.m'"),
        ({"model": ""}, "model name ''"),
    ],
)
def test_wrong_options_do_not_touch_the_store(
    ebc: EmbeddingBagCollection, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidModelError, match=message):
        publish(ebc, tmp_path / "store", **({"model": "m"} | options))
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, None),
        ({"dtype": "int2"}, "dtype is 'int2'"),
        ({"dtype": {"usr": "int8"}}, "dtype names table 'usr'"),
        ({"sharding": "grid"}, "table 'user': sharding is 'grid'"),
        ({"world_size": 0}, "world_size is 0"),
        ({"model": "../m"}, "model name"),
        ({"store": "file"}, "file/m: cannot be written: .*file is not a folder"),
    ],
)
def test_options_can_be_checked_before_there_are_weights(
    ebc: EmbeddingBagCollection, tmp_path: Path, options: dict[str, Any], message: str | None
) -> None:
    (tmp_path / "file").write_text("")
    given: dict[str, Any] = {"model": "m", "dtype": "int8", "sharding": "row_wise", "world_size": 2}
    given |= options
    store = tmp_path / given.pop("store", "store")
    if message is None:
        check_options(live.describe(ebc), store, **given)
    else:
        with pytest.raises(StoreError, match=message):
            check_options(live.describe(ebc), store, **given)
    assert everything_under(tmp_path) == ["file"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_rows_that_are_not_numbers_are_refused(
    ebc: EmbeddingBagCollection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    value: float,
    dtype: str,
) -> None:
    monkeypatch.setattr("embedserve_store.publishing.version_writer.BLOCK_BYTES", 500)
    ebc.embedding_bags["item"].weight.data[70, 3] = value
    with pytest.raises(InvalidModelError, match=f"table 'item': row 70 holds {value}"):
        publish(ebc, tmp_path, model="m", dtype=dtype)
    assert everything_under(tmp_path) == []


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_rows_beyond_the_dtypes_range_are_refused(
    ebc: EmbeddingBagCollection, tmp_path: Path, dtype: str
) -> None:
    ebc.embedding_bags["user"].weight.data[299] = -1e5
    with pytest.raises(InvalidModelError, match=f"row 299 holds values too large for {dtype}"):
        publish(ebc, tmp_path, model="m", dtype=dtype)
    publish(ebc, tmp_path, model="m", dtype="float32")


def test_checksums_are_of_the_files(version: ModelVersion) -> None:
    for name, checksum in version.manifest.files.items():
        data = (version.path / name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == checksum


def test_a_tensor_that_is_stored_negated_is_refused(tmp_path: Path) -> None:
    """The bytes are the negatives of the values."""
    negated = torch.complex(torch.rand(8, 4), torch.rand(8, 4)).conj().imag
    torch.save({"embedding_bags.t.weight": negated}, tmp_path / "m.pt")
    tables = [TableSpec("t", 8, 4, ("t",), "sum", "float32")]
    with pytest.raises(InvalidModelError, match="table 't'"):
        publish(tmp_path / "m.pt", tmp_path / "store", model="m", tables=tables)


def test_a_checkpoint_in_place_of_a_description_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "m.pt").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(StoreError, match=r"m\.pt: cannot be parsed: .*is it a checkpoint"):
        read_description(tmp_path / "m.pt")


def test_a_table_beyond_all_memory_is_refused_by_name(tmp_path: Path) -> None:
    tables = [TableSpec("t", 9 * 10**18, 4, ("t",), "sum", "float32")]
    with pytest.raises(StoreError, match="table 't': num_embeddings is 9000000000000000000"):
        check_options(tables, tmp_path, model="m", dtype="int8", sharding="row_wise", world_size=1)


@pytest.mark.parametrize("publish", [publish, publish_sharded])
def test_an_unknown_option_is_a_type_error(
    publish: Any, ebc: EmbeddingBagCollection, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'sharing'"):
        publish(ebc, tmp_path / "store", model="m", sharing="row_wise")

    assert not (tmp_path / "store").exists()
