"""Tests of a publish that is interrupted or concurrent: the store is unchanged or has a whole
version."""

import errno
import io
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from forkserver import PYTHON, WarmPopen
from server.python import environment
from store.listing import everything_under
from torchrec import EmbeddingBagCollection

from embedserve_store.errors import InvalidModelError, StoreError
from embedserve_store.local_store import LocalStore
from embedserve_store.model_version import ModelVersion
from embedserve_store.publishing import version_writer
from embedserve_store.publishing.publish import publish
from embedserve_store.verification import verify
from embedserve_store.writing import direct_file


class FullDisk(io.FileIO):
    """A disk that is full after the header."""

    def write(self, data: Any) -> int:
        if self.tell():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


def test_full_disk_leaves_the_store_unchanged(
    version: ModelVersion, ebc: EmbeddingBagCollection, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = version.path.parent.parent
    before = everything_under(store)
    monkeypatch.setattr(
        direct_file, "open", lambda path, mode: FullDisk(path, mode.rstrip("b")), raising=False
    )
    with pytest.raises(StoreError, match="m: publishing failed: No space left on device") as caught:
        publish(ebc, store, model="m")
    assert isinstance(caught.value.__cause__, OSError)
    assert everything_under(store) == before


def test_insufficient_disk_space_is_rejected_before_reading_rows(
    ebc: EmbeddingBagCollection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(tmp_path)._replace(free=20_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    publish(ebc, tmp_path / "store", model="m")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free._replace(free=16_000_000))
    message = (
        r"other: the version needs 16,799,136 bytes \(21,920 of rows and ids, and 16,777,216 to "
        r"spare\), the disk has 16,000,000 free"
    )
    with pytest.raises(StoreError, match=message):
        publish(ebc, tmp_path / "store", model="other", progress=lambda *_: pytest.fail("a row"))
    assert not (tmp_path / "store" / "other").exists()


@pytest.mark.parametrize(
    ("name", "limit", "meta"),
    [
        ("goldens.safetensors", 2_000, {}),
        ("manifest.json", 50_000, {f"m{i}": "x" * 990 for i in range(60)}),
    ],
)
def test_file_over_the_readers_size_limit_is_not_published(
    version: ModelVersion,
    ebc: EmbeddingBagCollection,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    limit: int,
    meta: dict[str, str],
) -> None:
    store = version.path.parent.parent
    before = everything_under(store)
    monkeypatch.setattr(version_writer, "SMALL_FILE_BYTES_MAX", limit)
    with pytest.raises(InvalidModelError, match=rf"^{name}: \d+ bytes, the limit is {limit}$"):
        publish(ebc, store, model="m", meta=meta)
    assert everything_under(store) == before


def test_file_system_that_stores_no_files_is_rejected(
    ebc: EmbeddingBagCollection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = shutil.disk_usage("/proc")
    assert none.total == 0
    monkeypatch.setattr(shutil, "disk_usage", lambda _: none)
    message = "store/m: is on a file system that keeps no files$"
    with pytest.raises(StoreError, match=message):
        publish(ebc, tmp_path / "store", model="m")


def test_keyboard_interrupt_leaves_the_store_unchanged(
    ebc: EmbeddingBagCollection, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        publish(ebc, tmp_path, model="m", progress=Mock(side_effect=KeyboardInterrupt))
    assert everything_under(tmp_path) == []
    assert publish(ebc, tmp_path, model="m").version == 1


def test_failing_progress_callback_leaves_the_store_unchanged(
    ebc: EmbeddingBagCollection, tmp_path: Path
) -> None:
    with pytest.raises(StoreError, match=r"publishing failed: TypeError\("):
        publish(ebc, tmp_path, model="m", progress=lambda: None)  # type: ignore[arg-type]
    assert everything_under(tmp_path) == []


def test_store_path_that_is_a_file_is_rejected(ebc: EmbeddingBagCollection, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("")
    with pytest.raises(StoreError, match=r"m: cannot be written: .*store is not a folder"):
        publish(ebc, tmp_path / "store", model="m")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes to read-only folders")
def test_store_without_write_permission_is_rejected(
    ebc: EmbeddingBagCollection, tmp_path: Path
) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="m: cannot be written: no permission"):
        publish(ebc, tmp_path, model="m")


def test_read_only_file_system_is_rejected(
    ebc: EmbeddingBagCollection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject_mkdir(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "mkdir", reject_mkdir)
    with pytest.raises(StoreError, match=r"publishing failed: Read-only file system \(.*m\)"):
        publish(ebc, tmp_path, model="m")
    assert everything_under(tmp_path) == []


def test_concurrent_publish_that_finishes_first_gets_the_first_number(
    ebc: EmbeddingBagCollection, tmp_path: Path
) -> None:
    others: list[int] = []

    def publish_another(*_: Any, **__: Any) -> None:
        if not others:
            others.append(0)
            others[0] = publish(ebc, tmp_path, model="m", dtype="int8").version

    published = publish(ebc, tmp_path, model="m", dtype="int4", progress=publish_another)
    assert (others, published.version) == ([1], 2)
    for number, dtype in ((1, "int8"), (2, "int4")):
        version = LocalStore(tmp_path).load("m", number)
        verify(version)
        assert {table.dtype for table in version.manifest.tables} == {dtype}


KILLED = """
import sys, time
import torch
from embedserve_store import TableSpec, publish

def progress(*call):
    print("halfway", flush=True)
    time.sleep(600)

tables = [TableSpec("t", 100, 8, ("t",), "sum", "float32"),
          TableSpec("u", 100, 8, ("u",), "sum", "float32")]
state_dict = {f"embedding_bags.{name}.weight": torch.ones(100, 8) for name in "tu"}
publish(state_dict, sys.argv[1], tables=tables, model="m", progress=progress)
"""


def kill_halfway(store: str | Path) -> None:
    process = WarmPopen(
        [*PYTHON, "-c", KILLED, store], env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout as lines:
        assert "halfway\n" in iter(lines.readline, "")
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=60) == -signal.SIGKILL


def test_version_of_a_killed_publisher_is_invisible_and_removed(
    ebc: EmbeddingBagCollection, tmp_path: Path
) -> None:
    kill_halfway(tmp_path)
    left, lock = sorted((tmp_path / "m").iterdir())
    assert sorted(os.listdir(left)) == ["tables.safetensors"]
    assert lock.name == f"{left.name}.lock"
    store = LocalStore(tmp_path)
    assert store.models() == []
    assert store.versions("m") == []
    with pytest.raises(StoreError, match="no version is published"):
        store.load("m")
    assert publish(ebc, tmp_path, model="m").version == 1
    assert os.listdir(tmp_path / "m") == ["1"]


def test_leftovers_of_a_killed_publish_to_a_url_are_removed(
    ebc: EmbeddingBagCollection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("XDG_CACHE_HOME", "TMPDIR"):
        (tmp_path / variable).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / variable))
    monkeypatch.setattr(tempfile, "tempdir", None)
    kill_halfway(f"file://{tmp_path}/store")
    assert [path.name for path in tmp_path.rglob("*.safetensors")] == ["tables.safetensors"]
    published = publish(ebc, f"file://{tmp_path}/store", model="m")
    assert published.version == 1
    there = [path.parent for path in tmp_path.rglob("tables.safetensors")]
    assert there == [tmp_path / "store" / "m" / "1"]
    assert not (tmp_path / "XDG_CACHE_HOME" / "embedserve" / "publish").exists()
