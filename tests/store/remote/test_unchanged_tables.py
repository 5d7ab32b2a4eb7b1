"""Tests of uploads of changed tables: the client sends these, and the store copies the others, byte
for byte."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from store.remote.conftest import use_endpoint
from store.remote.copying_s3 import CopyingStore
from store.remote.s3_proxy import serve_proxy

from embedserve_store import ModelStore, TableSpec, copy_versions, publish, verify
from embedserve_store.remote import remote_files
from embedserve_store.remote.remote_files import RemoteFolder
from embedserve_store.remote.unchanged_tables import UnchangedBytes, unchanged_ranges

PART_BYTES = 64 << 10
ROWS = {"a": 1_125, "b": 1_250, "c": 1_000, "d": 25}
"""Rows of 256 bytes: three tables of several parts, and one of less than a part."""
DIM = 64


def publish_tables(store: Path | str, **values: float) -> None:
    """Publishes "m" with these tables, whose rows differ by their values and numbers."""
    tables = [TableSpec(name, ROWS[name], DIM, (name,), "sum", "float32") for name in values]
    state = {
        f"embedding_bags.{name}.weight": torch.arange(ROWS[name] * DIM, dtype=torch.float32)
        .add(value)
        .view(-1, DIM)
        for name, value in values.items()
    }
    publish(state, store, model="m", tables=tables, layout_changed=True)


Serve = Callable[..., CopyingStore]


@pytest.fixture
def serve(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Yields a function that puts a CopyingStore with these options before the S3 server."""
    with ExitStack() as stack:

        def start(**options: Any) -> CopyingStore:
            store = CopyingStore(endpoint, **options)
            use_endpoint(monkeypatch, stack.enter_context(serve_proxy(store.handler(), endpoint)))
            return store

        yield start


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_files, "PART_BYTES", PART_BYTES)


def nbytes(url: str, number: int, *names: str) -> int:
    tables = ModelStore(url).manifest("m", number).tables
    return sum(table.nbytes for table in tables if table.name in names)


def test_publishing_uploads_only_changed_tables(url: str, tmp_path: Path, serve: Serve) -> None:
    store = serve()
    publish_tables(url, a=1, b=2, c=3, d=4)
    assert store.tried == 0
    store.sent = 0
    publish_tables(url, a=1, b=5, c=3, d=4)
    verify(ModelStore(url, tmp_path).load("m", 2))
    changed, total = nbytes(url, 2, "b"), nbytes(url, 2, *ROWS)
    assert changed < store.sent < changed + 4 * PART_BYTES
    size = RemoteFolder(url).size("m/2/tables.safetensors")
    assert store.sent + store.copied == size + PART_BYTES  # one part is copied as a trial
    assert size > total


def test_unchanged_tables_at_other_offsets_are_copied_in_the_store(
    url: str, tmp_path: Path, serve: Serve
) -> None:
    """Version 2 has table d instead of b, and a and c at other offsets. The copy sends the newest
    version first."""
    local, store = tmp_path / "local", serve()
    publish_tables(local, a=1, b=2, c=3)
    publish_tables(local, d=4, c=3, a=1)
    copy_versions(local, url, "m")
    for number in (1, 2):
        verify(ModelStore(url, tmp_path / "cache").load("m", number))
    assert store.copied > nbytes(url, 2, "a", "c") - 4 * PART_BYTES


def interrupt_late(file: str, bytes_done: int, bytes_total: int) -> None:
    if file == "tables.safetensors" and bytes_done > 0.8 * bytes_total:
        raise KeyboardInterrupt


def test_interrupted_upload_continues_with_copied_parts(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: Serve
) -> None:
    local, store = tmp_path / "local", serve()
    publish_tables(local, a=1, b=2)
    publish_tables(local, a=1, b=5)
    monkeypatch.setattr(remote_files, "PARTS_AT_ONCE", 1)
    copy_versions(local, url, "m", 1)
    store.sent = 0
    with pytest.raises(KeyboardInterrupt):
        copy_versions(local, url, "m", 2, progress=interrupt_late)
    assert store.copied > 2 * PART_BYTES
    assert ModelStore(url).versions("m") == [1]
    copy_versions(local, url, "m", 2)
    verify(ModelStore(url, tmp_path / "cache").load("m", 2))
    size = RemoteFolder(url).size("m/2/tables.safetensors")
    trials = 2 * PART_BYTES
    assert store.sent + store.copied - trials == size  # no part was transferred twice


def test_interrupted_upload_continues_without_permission_to_abort(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: Serve
) -> None:
    """The upload that tries whether the store copies parts is not taken for the interrupted one."""
    local, store = tmp_path / "local", serve(can_abort=False)
    publish_tables(local, a=1, b=2)
    publish_tables(local, a=1, b=5)
    monkeypatch.setattr(remote_files, "PARTS_AT_ONCE", 1)
    copy_versions(local, url, "m", 1)
    store.sent = 0
    with pytest.raises(KeyboardInterrupt):
        copy_versions(local, url, "m", 2, progress=interrupt_late)
    copy_versions(local, url, "m", 2)
    verify(ModelStore(url, tmp_path / "cache").load("m", 2))
    assert store.sent == RemoteFolder(url).size("m/2/tables.safetensors")


@pytest.mark.parametrize(
    "error", [(501, "NotImplemented"), (403, "AccessDenied"), (404, "NoSuchKey")]
)
def test_all_tables_are_uploaded_if_the_store_rejects_copies(
    url: str, tmp_path: Path, serve: Serve, error: tuple[int, str]
) -> None:
    store = serve(error=error)
    publish_tables(url, a=1, b=2)
    store.sent = 0
    publish_tables(url, a=1, b=5)
    verify(ModelStore(url, tmp_path).load("m", 2))
    assert store.tried == 1
    assert store.sent == RemoteFolder(url).size("m/2/tables.safetensors")


def test_incorrectly_copied_parts_are_uploaded(url: str, tmp_path: Path, serve: Serve) -> None:
    """Example: the source object was overwritten meanwhile."""
    store = serve(is_wrong=True)
    publish_tables(url, a=1, b=2)
    store.sent = 0
    publish_tables(url, a=1, b=5)
    verify(ModelStore(url, tmp_path).load("m", 2))
    assert store.sent == RemoteFolder(url).size("m/2/tables.safetensors")


def test_all_tables_are_uploaded_without_permission_to_abort(
    url: str, tmp_path: Path, serve: Serve
) -> None:
    serve(can_abort=False)
    publish_tables(url, a=1, b=2)
    publish_tables(url, a=1, b=5)
    verify(ModelStore(url, tmp_path).load("m", 2))


def test_all_tables_are_uploaded_if_the_store_ignores_copy_sources(
    url: str, tmp_path: Path
) -> None:
    """rclone is such a store: it treats a copy as the upload of an empty part."""
    publish_tables(url, a=1, b=2)
    publish_tables(url, a=1, b=5)
    verify(ModelStore(url, tmp_path).load("m", 2))


def test_damaged_previous_manifest_is_ignored(url: str, tmp_path: Path, serve: Serve) -> None:
    local, store = tmp_path / "local", serve()
    for value in (2, 5):
        publish_tables(local, a=1, b=value)
    copy_versions(local, url, "m", 1)
    RemoteFolder(url).write("m/1/manifest.json", b"{}")
    copy_versions(local, url, "m", 2)
    assert store.tried == 0
    verify(ModelStore(url, tmp_path / "cache").load("m", 2))


def test_adjacent_unchanged_tables_form_one_range(tmp_path: Path) -> None:
    for values in ({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2, "c": 4}, {"c": 4, "b": 2}):
        publish_tables(tmp_path, **values)
    manifests = [ModelStore(tmp_path).manifest("m", number) for number in (1, 2, 3)]
    files = [(tmp_path / "m" / str(n) / "tables.safetensors").read_bytes() for n in (1, 2, 3)]
    (all_of_it,) = unchanged_ranges(manifests[0], manifests[0])
    assert all_of_it[1] == len(files[0])
    for new in range(3):
        for base in range(3):
            ranges = unchanged_ranges(manifests[new], manifests[base])
            assert len(ranges) <= 2
            for start, stop, at in ranges:
                assert files[new][start:stop] == files[base][at : at + stop - start]


def test_part_that_spans_a_changed_table_is_not_found() -> None:
    unchanged = UnchangedBytes("m/1/tables.safetensors", ((10, 20, 110), (30, 50, 230)))
    wanted = [(10, 20), (12, 15), (15, 25), (20, 30), (31, 50), (49, 51)]
    assert [unchanged.find(*one) for one in wanted] == [110, 112, None, None, 231, None]
