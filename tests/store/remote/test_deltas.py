"""Tests of deltas in an object store: appended by conditional writes, read and compacted as in a
folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import s3fs
from store.remote.conditional_s3 import serve_conditional
from store.remote.conftest import use_endpoint

from embedserve_store import (
    DeltaLine,
    DeltaWriter,
    ModelStore,
    RevertedError,
    StoreError,
    WriterFencedError,
    compact_deltas,
    prune,
    prune_deltas,
    undo_deltas,
    verify,
)
from embedserve_store.errors import UnreachableError
from embedserve_store.format.delta_manifest import DELTAS_FOLDER, MANIFEST_BYTES_MAX, manifest_name
from embedserve_store.remote.remote_files import RemoteFolder

CHANGE = {"t": ([3, 5], np.ones((2, 16), np.float32))}


@pytest.fixture
def conditional(uploaded: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sends requests through a proxy with conditional writes."""
    with serve_conditional(endpoint) as url:
        use_endpoint(monkeypatch, url)
        yield


def test_delta_line_works_in_an_object_store(conditional: None, url: str, tmp_path: Path) -> None:
    with DeltaWriter(url, model="m") as writer, DeltaWriter(url, model="m") as other:
        assert writer.push_rows(CHANGE, step=4) == 1
        with pytest.raises(WriterFencedError, match="stops"):
            other.push_rows(CHANGE)
        assert writer.push_rows({}) == 2
        undo_deltas(url, "m", to=0, why="test")
        with pytest.raises(RevertedError):
            writer.push_rows({})
        writer.resume()
        assert writer.push_rows(CHANGE) == 4
    models = ModelStore(url, tmp_path / "cache")
    line = DeltaLine(models, models.manifest("m"))
    assert [delta.rows for delta, _ in line.deltas()] == [{"t": 2}, {}, {}, {"t": 2}]
    first = line.after(line.start)
    assert first is not None
    second = line.after(first[1])
    assert second is not None
    assert (first[0].step, second[0].seq) == (4, 2)
    assert [delta.seq for delta in line.deltas_in_state(4)] == [4]
    made = compact_deltas(url, "m", cache=tmp_path / "cache")
    assert (made.version, made.where) == (2, f"{url}/m/2")
    opened = models.load("m")
    verify(opened)
    rows = opened.tables.rows("t").view(np.float32)
    np.testing.assert_array_equal(rows[[3, 5]], np.ones((2, 16)))
    np.testing.assert_array_equal(rows[4], np.full(16, 4))
    assert models.versions("m") == [1, 2]
    prune(url, "m", keep=1)
    assert [(one.first, one.last) for one in prune_deltas(url, "m", keep_s=0)] == [(1, 4)]
    assert models.files_beside("m", DELTAS_FOLDER) == []


def test_store_without_conditional_writes_is_rejected(uploaded: Path, url: str) -> None:
    with pytest.raises(StoreError, match=r"two writers could overwrite .* is_alone=True"):
        DeltaWriter(url, model="m")
    with DeltaWriter(url, model="m", is_alone=True) as writer:
        assert writer.push_rows(CHANGE) == 1
        assert writer.push_rows(CHANGE) == 2
    with pytest.raises(StoreError, match=r"two writers could overwrite .* is_alone=True"):
        undo_deltas(url, "m", to=1, why="")
    assert undo_deltas(url, "m", to=1, why="", is_alone=True).seq == 3


def test_oversized_file_is_read_only_up_to_its_limit(
    uploaded: Path, url: str, root: str, objects: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest has a fixed limit, and a file of rows the size in its manifest."""
    with DeltaWriter(url, model="m", is_alone=True) as writer:
        writer.push_rows(CHANGE)
    models = ModelStore(url)
    line = DeltaLine(models, models.manifest("m"))
    delta, _ = line.manifest(1)
    (file,) = delta.files
    received: dict[str, int] = {}
    real = s3fs.S3FileSystem._cat_file

    async def cat_file(self: Any, path: str, **options: Any) -> Any:
        data = await real(self, path, **options)
        received[path.rpartition("/")[2]] = len(data)
        return data

    monkeypatch.setattr(s3fs.S3FileSystem, "_cat_file", cat_file)
    folder = f"{root}/m/deltas/1"
    objects.pipe_file(f"{folder}/{file.name}", bytes(10 * file.nbytes))
    with pytest.raises(StoreError, match=f"{file.name}: more than {file.nbytes} bytes"):
        list(line.rows(delta))
    objects.pipe_file(f"{folder}/{manifest_name(1)}", bytes(MANIFEST_BYTES_MAX + 1000))
    with pytest.raises(StoreError, match=f"1.json: more than {MANIFEST_BYTES_MAX} bytes"):
        line.manifest(1)
    assert received == {file.name: file.nbytes + 1, manifest_name(1): MANIFEST_BYTES_MAX + 1}


def test_empty_manifest_is_damaged_not_unreachable(
    uploaded: Path, url: str, root: str, objects: Any
) -> None:
    """An object store rejects any range of an empty file."""
    objects.pipe_file(f"{root}/m/deltas/1/{manifest_name(1)}", b"")
    models = ModelStore(url)
    with pytest.raises(StoreError, match="not JSON") as caught:
        DeltaLine(models, models.manifest("m")).manifest(1)
    assert not isinstance(caught.value, UnreachableError)


def test_delta_line_is_listed_in_pages(
    uploaded: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DeltaWriter(url, model="m", is_alone=True) as writer:
        for _ in range(3):
            writer.push_rows(CHANGE)
    pages: list[int] = []
    real = RemoteFolder.s3_call

    def small_pages(self: RemoteFolder, operation: str, name: str, **options: Any) -> Any:
        page = real(self, operation, name, MaxKeys=4, **options)
        pages.append(len(page.get("Contents", ())))
        return page

    monkeypatch.setattr(RemoteFolder, "s3_call", small_pages)
    models = ModelStore(url)
    assert DeltaLine(models, models.manifest("m")).seqs() == [1, 2, 3]
    assert list(models.names_beside("m", "deltas/9")) == []
    assert pages == [4, 2, 0]


def test_files_of_killed_writers_are_pruned_by_age(
    uploaded: Path, url: str, root: str, objects: Any, tmp_path: Path
) -> None:
    with DeltaWriter(url, model="m", is_alone=True) as writer:
        writer.push_rows(CHANGE)
        writer.push_rows(CHANGE)
    compact_deltas(url, "m", cache=tmp_path / "cache")
    prune(url, "m", keep=1)
    objects.rm_file(f"{root}/m/deltas/1/{manifest_name(2)}")
    prune_deltas(url, "m", keep_s=3600)
    assert len(objects.find(f"{root}/m/deltas")) == 3
    prune_deltas(url, "m", keep_s=0)
    assert objects.find(f"{root}/m/deltas") == []


def test_version_listing_skips_deltas(
    uploaded: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server lists the versions at each poll, and a model may have thousands of deltas."""
    with DeltaWriter(url, model="m", is_alone=True) as writer:
        writer.push_rows(CHANGE)
    listed: list[str] = []
    real = s3fs.S3FileSystem._find

    async def find(self: Any, path: str, **options: Any) -> Any:
        found = await real(self, path, **options)
        listed.extend(found)
        return found

    monkeypatch.setattr(s3fs.S3FileSystem, "_find", find)
    assert ModelStore(url, tmp_path / "cache").versions("m") == [1]
    assert listed
    assert not [path for path in listed if "/deltas/" in path]
