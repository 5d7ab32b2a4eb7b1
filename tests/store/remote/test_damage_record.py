"""Tests of the record of damage: a version that was damaged when it was pulled is not pulled at
every poll."""

import errno
import mmap
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from store.remote.conftest import Place, Publish

from embedserve_store.errors import StoreError, UnreachableError
from embedserve_store.remote.remote_files import RemoteFolder
from embedserve_store.remote.remote_store import RemoteStore
from embedserve_store.remote.upload import upload_version

TABLES = "m/1/tables.safetensors"
DAMAGED = (
    r"m/1/tables\.safetensors: table 't': sha256 is .*; it is pulled again after a repair, at "
)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts how often each file of a version is read, by any store."""
    counted: Counter[str] = Counter()
    real = RemoteFolder.blocks

    def blocks(folder: RemoteFolder, name: str, start: int, stop: int) -> Iterator[bytes]:
        counted[name] += 1
        return real(folder, name, start, stop)

    monkeypatch.setattr(RemoteFolder, "blocks", blocks)
    return counted


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, place: Place, new_version: Publish) -> str:
    """Returns the URL of a store with a version 1 of "m" whose last bit is flipped."""
    url = place(request.param, "damaged")
    upload_version(new_version(), url)
    flip(url)
    return url


def flip(url: str) -> None:
    remote = RemoteFolder(url)
    data = bytearray(remote.read(TABLES, 1 << 20))
    data[-1] ^= 1
    remote.write(TABLES, bytes(data))


def message_of_damaged_load(url: str, cache: Path) -> str:
    with pytest.raises(StoreError, match=DAMAGED) as caught:
        RemoteStore(url, cache).load("m")
    return str(caught.value)


def test_local_read_failure_is_not_recorded_as_damage(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(url)
    error = OSError(errno.EMFILE, "Too many open files")
    with monkeypatch.context() as patched:
        patched.setattr(mmap, "mmap", Mock(side_effect=error))
        with pytest.raises(StoreError, match="Too many open files"):
            RemoteStore(url, tmp_path / "cache").load("m")
    assert list((tmp_path / "cache").rglob("*.damaged")) == []
    assert RemoteStore(url, tmp_path / "cache").load("m").path.name == "1"


def test_damaged_version_is_pulled_once_and_again_after_a_repair(
    url: str, tmp_path: Path, reads: Counter[str]
) -> None:
    polls = [message_of_damaged_load(url, tmp_path / "cache") for _ in range(3)]
    assert len({*polls}) == 1
    assert reads[TABLES] == 1
    flip(url)
    assert RemoteStore(url, tmp_path / "cache").load("m").path.name == "1"
    assert reads[TABLES] == 2
    assert list((tmp_path / "cache").rglob("*.damaged")) == []


def test_damage_record_delay_doubles_up_to_a_limit(
    url: str, tmp_path: Path, reads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s)
    for pulls, delay_s in enumerate([60, 120, 240, 480, 960, 1920, 3600, 3600], 1):
        message_of_damaged_load(url, tmp_path / "cache")
        now_s += delay_s - 1
        message_of_damaged_load(url, tmp_path / "cache")
        assert reads[TABLES] == pulls
        now_s += 2


def test_damage_record_can_be_removed(url: str, tmp_path: Path, reads: Counter[str]) -> None:
    message = message_of_damaged_load(url, tmp_path / "cache")
    (record,) = (tmp_path / "cache").rglob("*.damaged")
    assert f"or once {record} is removed" in message
    record.unlink()
    message_of_damaged_load(url, tmp_path / "cache")
    record.write_text("{")  # as a killed process leaves it
    message_of_damaged_load(url, tmp_path / "cache")
    assert reads[TABLES] == 3


def test_lost_connection_is_not_recorded_as_damage(
    url: str, tmp_path: Path, reads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lose = Mock(side_effect=UnreachableError("the store is gone"))
    for _ in range(2):
        with pytest.raises(UnreachableError):
            RemoteStore(url, tmp_path / "cache", lose).load("m")
    assert list((tmp_path / "cache").rglob("*.damaged")) == []
