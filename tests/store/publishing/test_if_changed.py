"""Tests of if_changed: a publish with the content of the newest version is skipped."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from store.listing import everything_under
from writable import writable

from embedserve_store.format.table_spec import TableSpec
from embedserve_store.model_store import ModelStore
from embedserve_store.publishing.publish import publish
from embedserve_store.publishing.version_writer import PublishedVersion

STATE = {f"embedding_bags.{name}.weight": torch.ones(10, 4) for name in "tu"}
TABLES = [TableSpec(name, 10, 4, (name,), "sum", "float32") for name in "tu"]


def publish_changed(store: Path | str, **options: Any) -> PublishedVersion:
    given: dict[str, Any] = {"tables": TABLES, "if_changed": True} | options
    return publish(given.pop("state", STATE), store, model="m", **given)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_unchanged_content_is_not_published_again(tmp_path: Path, scheme: str) -> None:
    store = f"{scheme}{tmp_path}/store"
    assert publish_changed(store).is_new
    before = everything_under(tmp_path)
    again = publish_changed(store, meta={"run": "2"})
    assert (again.is_new, again.version, again.where) == (False, 1, f"{store}/m/1")
    assert again.manifest == ModelStore(store).manifest("m")
    assert everything_under(tmp_path) == before


@pytest.mark.parametrize(
    "change",
    [
        {"state": {name: 2 * rows for name, rows in STATE.items()}},
        {"dtype": "int8"},
        {"sharding": "row_wise", "world_size": 2},
        {"vocabularies": {"t": range(10)}, "layout_changed": True},
        {"tables": [replace(one, pooling="mean") for one in TABLES], "layout_changed": True},
    ],
)
def test_changed_content_is_published(tmp_path: Path, change: dict[str, Any]) -> None:
    publish_changed(tmp_path)
    published = publish_changed(tmp_path, **change)
    assert (published.is_new, published.version) == (True, 2)


def test_content_is_compared_with_the_newest_version_only(tmp_path: Path) -> None:
    publish_changed(tmp_path)
    publish_changed(tmp_path, dtype="int8")
    assert publish_changed(tmp_path).version == 3


@pytest.mark.parametrize("scheme", ["", "file://"])
@pytest.mark.parametrize(
    "name", ["tables.safetensors", "ids.safetensors", "plan.json", "goldens.safetensors"]
)
@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_damaged_version_is_published_again(
    tmp_path: Path, scheme: str, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = f"{scheme}{tmp_path}/store"
    options = {"vocabularies": {"t": range(10)}, "layout_changed": True}
    publish_changed(store, **options)
    file = writable(tmp_path / "store" / "m" / "1") / name
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    published = publish_changed(store, **options)
    assert (published.is_new, published.version) == (True, 2)
    assert f"/m/1/{name}: " in caplog.text
    assert not publish_changed(store, **options).is_new


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_version_with_a_damaged_manifest_is_published_again(tmp_path: Path, scheme: str) -> None:
    store = f"{scheme}{tmp_path}/store"
    publish_changed(store)
    manifest = writable(tmp_path / "store" / "m" / "1") / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    assert publish_changed(store, layout_changed=True).version == 2
    assert not publish_changed(store).is_new
