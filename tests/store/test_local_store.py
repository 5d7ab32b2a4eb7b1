"""Tests of loading: a version is loaded exactly as published, or the error names the wrong file and
the reason."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagCollection

from embedserve_store.errors import StoreError
from embedserve_store.format.row_layout import dequantize_rows
from embedserve_store.local_store import LocalStore
from embedserve_store.model_version import ModelVersion
from embedserve_store.publishing.publish import publish
from embedserve_store.verification import verify

FILES = ("manifest.json", "plan.json", "goldens.safetensors", "tables.safetensors")
EditJson = Callable[[Path, Callable[[Any], None]], None]


def reload(version: ModelVersion) -> ModelVersion:
    return LocalStore(version.path.parent.parent).load("m")


def test_models_and_versions_are_listed(ebc: EmbeddingBagCollection, tmp_path: Path) -> None:
    for model in ("b", "a", "b"):
        publish(ebc, tmp_path, model=model)
    for name in ("a/.staging-1", "a/latest", "a/02", "empty/.staging-2", ".hidden/1", "x y/1"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "README").write_text("")
    (tmp_path / "a" / "5").write_text("not a folder")
    store = LocalStore(str(tmp_path))
    assert store.models() == ["a", "b"]
    assert store.versions("a") == [1]
    assert store.versions("b") == [1, 2]
    assert store.versions("empty") == []


def test_versions_are_ordered_as_numbers(version: ModelVersion) -> None:
    for number in (10, 9):
        shutil.copytree(version.path, version.path.parent / str(number))
    assert LocalStore(version.path.parent.parent).versions("m") == [1, 9, 10]


def test_highest_version_is_loaded_by_default(ebc: EmbeddingBagCollection, tmp_path: Path) -> None:
    publish(ebc, tmp_path, model="m")
    publish(ebc, tmp_path, model="m")
    assert LocalStore(tmp_path).load("m").manifest.version == 2
    assert LocalStore(tmp_path).load("m", 1).manifest.version == 1


def test_version_is_found_by_its_number_without_a_listing(
    version: ModelVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalStore, "versions", None)
    assert LocalStore(version.path.parent.parent).manifest("m", 1).version == 1


def test_mapped_rows_are_the_published_rows(
    version: ModelVersion, ebc: EmbeddingBagCollection
) -> None:
    for table in version.manifest.tables:
        rows = dequantize_rows(version.tables.rows(table.name), table.dtype, table.embedding_dim)
        weight = ebc.embedding_bags[table.name].weight.detach().numpy()
        np.testing.assert_allclose(rows, weight, atol=np.ptp(weight) / 20)
    assert torch.equal(
        torch.tensor(version.tables.rows("user")).view(torch.float32),
        ebc.embedding_bags["user"].weight.detach(),
    )


@pytest.mark.parametrize(
    ("model", "number", "message"),
    [
        ("other", None, "there is no model 'other'; models are "),
        ("m", 2, r"store/m: version 2 does not exist; versions are 1"),
        ("m", 0, "version 0 does not exist"),
        ("../store/m", None, r"'\.\./store/m' is not the name of a model"),
        (".staging-1", None, "is not the name of a model"),
    ],
)
def test_missing_model_or_version_is_named(
    version: ModelVersion, model: str, number: int | None, message: str
) -> None:
    with pytest.raises(StoreError, match=message):
        LocalStore(version.path.parent.parent).load(model, number)


def test_folder_of_a_model_is_no_store(version: ModelVersion) -> None:
    store = LocalStore(version.path.parent)
    for call in (store.models, lambda: store.versions("m"), lambda: store.load("m")):
        with pytest.raises(StoreError, match="m: this is the folder of a model; name the store"):
            call()


def test_missing_store_is_named(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "none")
    for call in (store.models, lambda: store.versions("m"), lambda: store.load("m")):
        with pytest.raises(StoreError, match="none: the store cannot be read: No such file"):
            call()


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "without its last byte": lambda data: data.rstrip(b"\n")[:-1],
    "longer": lambda data: data + b"x",
    "garbage": lambda data: b"\xff\xfe\x00garbage" * 1000,
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["removed", "a folder", *DAMAGES])
def test_every_damaged_file_is_rejected(version: ModelVersion, name: str, damage: str) -> None:
    path = version.path / name
    data = path.read_bytes()
    path.unlink()
    if damage == "a folder":
        path.mkdir()
    elif damage in DAMAGES:
        path.write_bytes(DAMAGES[damage](data))
    with pytest.raises(StoreError) as caught:
        reload(version)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["plan.json", "goldens.safetensors"])
def test_changed_byte_of_a_small_file_is_rejected(version: ModelVersion, name: str) -> None:
    data = bytearray((version.path / name).read_bytes())
    data[-2] ^= 1
    (version.path / name).write_bytes(data)
    with pytest.raises(StoreError, match=f"{name}: sha256 is .* changed since it was published"):
        reload(version)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format_version", 3, "format_version is 3, this embedserve reads format_version 1 and 2"),
        ("model", "n", "is of model 'n' version 1, but lies in the folder of 'm' version 1"),
        ("version", 3, "is of model 'm' version 3, but lies in the folder of 'm' version 1"),
        ("version", True, "version is True, expected int"),
        ("tables", [], "no tables"),
        ("is_weighted", None, "is_weighted is None, expected bool"),
        ("files", {"plan.json": "0"}, r"files: goldens\.safetensors is None, expected str"),
    ],
)
def test_edited_manifest_is_rejected(
    version: ModelVersion, edit_json: EditJson, key: str, value: Any, message: str
) -> None:
    edit_json(version.path / "manifest.json", lambda data: data.update({key: value}))
    with pytest.raises(StoreError, match=rf"manifest\.json: {message}"):
        reload(version)


@pytest.mark.parametrize(
    ("table", "changed", "message"),
    [
        (0, {"num_embeddings": 299}, r"plan\.json: user: shards cover 300 of 299 rows"),
        (
            0,
            {"dtype": "float16", "row_bytes": 32},
            r"tables\.safetensors: tensor .* the manifest means",
        ),
        (1, {"feature_names": ["new"]}, r"goldens\.safetensors: lengths is int32 \[4, 16\]"),
    ],
)
def test_manifest_that_contradicts_another_file_is_rejected(
    version: ModelVersion, edit_json: EditJson, table: int, changed: dict[str, Any], message: str
) -> None:
    edit_json(version.path / "manifest.json", lambda data: data["tables"][table].update(changed))
    with pytest.raises(StoreError, match=message):
        reload(version)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(format_version=9), "format_version is 9"),
        (lambda data: data["tables"].pop("tag"), "table 'tag' is not in the plan"),
        (lambda data: data.pop("world_size"), "not a sharding plan: KeyError"),
    ],
)
def test_plan_of_another_model_is_rejected(
    version: ModelVersion, edit_json: EditJson, change: Callable[[Any], None], message: str
) -> None:
    edit_json(version.path / "plan.json", change)
    with pytest.raises(StoreError, match=rf"plan\.json: {message}"):
        reload(version)


def test_deeply_nested_json_is_rejected(version: ModelVersion) -> None:
    (version.path / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(StoreError, match=r"manifest\.json: not JSON"):
        reload(version)


def test_oversized_manifest_is_rejected(version: ModelVersion) -> None:
    with (version.path / "manifest.json").open("r+b") as file:
        file.truncate(1 << 30)
    with pytest.raises(StoreError, match=r"manifest\.json: 1073741824 bytes, the limit is"):
        reload(version)


@pytest.mark.parametrize("name", ["manifest.json", "plan.json", "tables.safetensors"])
def test_named_pipe_does_not_block(version: ModelVersion, name: str) -> None:
    (version.path / name).unlink()
    os.mkfifo(version.path / name)
    with pytest.raises(StoreError, match=rf"{name}: is no regular file"):
        reload(version)


def test_tables_file_changed_in_place_is_detected(version: ModelVersion) -> None:
    tables = LocalStore(version.path.parent.parent).load("m").tables
    tables.check_unchanged()
    path = version.path / "tables.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 4096)
    message = rf"tables\.safetensors: changed in place .* {size - 4096} bytes, {size} were opened"
    with pytest.raises(StoreError, match=message):
        tables.check_unchanged()


def test_replaced_tables_file_does_not_affect_a_loaded_version(version: ModelVersion) -> None:
    tables = LocalStore(version.path.parent.parent).load("m").tables
    path = version.path / "tables.safetensors"
    shutil.copy(path, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)
    tables.check_unchanged()
    path.unlink()
    tables.check_unchanged()


def test_moved_store_is_loaded(version: ModelVersion, tmp_path: Path) -> None:
    shutil.copytree(version.path.parent.parent, tmp_path / "moved")
    verify(LocalStore(tmp_path / "moved").load("m"))
    manifest = json.loads((tmp_path / "moved" / "m" / "1" / "manifest.json").read_bytes())
    assert str(tmp_path) not in json.dumps(manifest)
