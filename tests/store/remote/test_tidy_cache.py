"""Tests of tidying the cache: unused versions are removed when a newer version is pulled."""

import errno
import logging
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from code_forker import CodeForker

from embedserve_store.errors import NoRoomError
from embedserve_store.local_store import LocalStore
from embedserve_store.model_store import ModelStore
from embedserve_store.model_version import ModelVersion
from embedserve_store.publishing.remove_versions import remove_version
from embedserve_store.publishing.set_alias import set_alias
from embedserve_store.remote.remote_files import RemoteFolder
from embedserve_store.transfer.receive import receive
from embedserve_store.transfer.stored_version import StoredVersion

KILLED_AS_IT_REMOVES = """
import os, shutil, sys
from pathlib import Path
from embedserve_store.model_store import ModelStore

def die(path, **_):
    first = next(path.rglob("tables.safetensors"))
    first.unlink()
    os.kill(os.getpid(), 9)

shutil.rmtree = die
store = ModelStore(sys.argv[1], Path(sys.argv[2]))
store._store.drop("m", 1)
"""


@pytest.fixture
def five(five_versions: list[Path], put: Callable[[Path], None], url: str) -> str:
    """Returns the URL of a bucket with versions 1 to 5 of "m"."""
    for version in five_versions:
        put(version)
    return url


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def cached(version: ModelVersion) -> list[int]:
    """Returns the versions of the model in the cache of ``version``."""
    return LocalStore(version.path.parent.parent).versions("m")


def test_cache_keeps_two_versions_of_a_following_server(five: str, cache: Path) -> None:
    store = ModelStore(five, cache)
    served = store.load("m", 1)
    for number, expected in ((2, [1, 2]), (3, [2, 3]), (4, [3, 4]), (5, [4, 5])):
        served = store.load("m", number)
        assert cached(served) == expected
    assert store.load("m", 5).manifest.version == 5
    assert [path.name for path in served.path.parent.iterdir() if path.name[0] == "."] == []


def test_disk_with_space_for_two_versions_suffices_for_updates(
    five: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The previous version is removed to make room, unless it is open."""
    store = ModelStore(five, cache)
    served = store.load("m", 1)
    nbytes = sum(path.stat().st_size for path in served.path.iterdir())
    real = shutil.disk_usage(cache)

    def usage(path: object) -> object:
        there = len(LocalStore(cache / served.path.parent.parent.name).versions("m"))
        return real._replace(free=int(2.5 * nbytes) - there * nbytes)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    for number in (2, 3, 4, 5):
        later = store.load("m", number)
        assert later.manifest.version == number
        assert len(cached(later)) == 2
        served = later
    theirs = ModelStore(five, cache).load("m", 4)
    with pytest.raises(NoRoomError, match="the disk has"):
        store.load("m", 1)
    assert (cached(served), theirs.manifest.version) == ([4, 5], 4)


def test_disk_that_fills_up_during_a_pull_is_made_room_on(
    five: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another pull may take the room after both have looked."""
    store = ModelStore(five, cache)
    for number in (1, 2):
        served = store.load("m", number)

    def receive_on_small_disk(version: StoredVersion, staged: Path, progress: object) -> None:
        if len(cached(served)) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        receive(version, staged)

    monkeypatch.setattr("embedserve_store.remote.pull.receive", receive_on_small_disk)
    later = store.load("m", 3)
    assert (later.manifest.version, cached(later)) == (3, [2, 3])
    with pytest.raises(NoRoomError, match="m/4: pulling failed: No space left on device"):
        store.load("m", 4)
    assert sorted(os.listdir(later.path.parent)) == ["2", "3"]


def test_open_and_aliased_versions_stay_cached(five: str, cache: Path) -> None:
    set_alias(five, "m", "stable", 2)
    store, neighbour = ModelStore(five, cache), ModelStore(five, cache)
    theirs = neighbour.load("m", 1)
    for number in (2, 3, 4, 5):
        served = store.load("m", number)
    assert cached(served) == [1, 2, 4, 5]
    del theirs
    store.load("m", 5)
    assert cached(served) == [2, 4, 5]
    set_alias(five, "m", "stable", 5)
    store.load("m", 5)
    assert cached(served) == [4, 5]


def test_cache_holds_a_version_per_alias_plus_the_two_newest_and_the_next(
    five: str, cache: Path
) -> None:
    """`embedserve plan --kubernetes` reserves room for that many versions."""
    counts: list[int] = []

    def count_versions(file: str, bytes_done: int, bytes_total: int) -> None:
        folders = [one.name for one in cache.glob("*/m/*") if one.is_dir()]
        counts.append(sum(name.isdecimal() or name.startswith(".copy-") for name in folders))

    store = ModelStore(five, cache, count_versions)
    set_alias(five, "m", "stable", 1)
    served = {"stable": store.load("m", "stable")}
    for number in (2, 3, 4):  # like servers that follow two aliases, one of them changing
        set_alias(five, "m", "canary", number)
        served["canary"] = store.load("m", "canary")
    assert cached(served["stable"]) == [1, 3, 4]
    assert max(counts) == 4  # 1, 2 and 3, and 4 while it was pulled
    set_alias(five, "m", "canary", 2)  # both aliases name a version older than the two newest
    served["canary"] = store.load("m", "canary")
    set_alias(five, "m", "canary", 5)
    served["canary"] = store.load("m", "canary")
    assert max(counts) == 5


def test_old_version_is_pulled_again_on_request(five: str, cache: Path) -> None:
    store = ModelStore(five, cache)
    for number in (1, 4, 5):
        served = store.load("m", number)
    assert cached(served) == [4, 5]
    again = store.load("m", 1)
    assert cached(served) == [1, 4, 5]
    assert again.manifest.version == 1


def test_nothing_is_evicted_while_aliases_are_unreadable(
    five: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_alias(five, "m", "stable", 1)
    store = ModelStore(five, cache)
    for number in (1, 2, 3, 4):
        store.load("m", number)
    RemoteFolder(five).remove("m/aliases/stable/1.json")
    RemoteFolder(five).write("m/aliases/stable/1.json", b"{}")
    with caplog.at_level(logging.WARNING):
        served = store.load("m", 5)
    assert cached(served) == [1, 3, 4, 5]
    assert "nothing is dropped from the cache" in caplog.text


def test_killed_eviction_leaves_no_readable_version(
    five: str, cache: Path, forking: CodeForker
) -> None:
    store = ModelStore(five, cache)
    path = store.load("m", 1).path
    store.load("m", 5)
    assert forking.run(KILLED_AS_IT_REMOVES, five, cache) == -signal.SIGKILL
    assert LocalStore(path.parent.parent).versions("m") == [5]
    assert [one.name for one in path.parent.iterdir() if one.name.startswith(".staging-")] != []
    served = store.load("m", 4)
    assert [one.name for one in path.parent.iterdir() if one.name.startswith(".staging-")] == []
    assert cached(served) == [4, 5]
    assert store.load("m", 1).manifest.version == 1


def test_versions_deleted_in_the_store_are_evicted(five: str, cache: Path) -> None:
    store = ModelStore(five, cache)
    store.load("m", 1)
    remove_version(five, "m", 1)
    for number in (4, 5):
        served = store.load("m", number)
    assert cached(served) == [4, 5]
