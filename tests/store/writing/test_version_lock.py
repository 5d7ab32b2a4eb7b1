"""Tests of version locks: a version in use is not removed, and a released lock holds nothing."""

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from open_files import open_below
from store.one_table import publish_versions

from embedserve_store.errors import StoreError
from embedserve_store.local_store import LocalStore
from embedserve_store.memory.resident_tables import make_resident
from embedserve_store.writing import version_lock
from embedserve_store.writing.version_lock import (
    VersionInUseError,
    exclusive_lock,
    lock_shared,
    remove_unused,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return publish_versions(tmp_path).path


def is_locked(folder: Path) -> bool:
    try:
        with exclusive_lock(folder):
            return False
    except VersionInUseError:
        return True


def test_loaded_version_is_locked_until_released(folder: Path) -> None:
    store = LocalStore(folder.parent.parent)
    first, second = store.load("m"), store.load("m")
    assert is_locked(folder)
    del first
    assert is_locked(folder)
    resident = make_resident(second)
    del second
    assert is_locked(folder)
    del resident
    assert not is_locked(folder)
    store.manifest("m")
    assert not is_locked(folder)


def test_reloading_a_version_leaks_no_descriptors(folder: Path, tmp_path: Path) -> None:
    store = LocalStore(folder.parent.parent)
    version = store.load("m")
    before = open_below(tmp_path)
    assert before
    for _ in range(100):
        version = store.load("m")
    assert open_below(tmp_path) == before
    assert version.manifest.version == 1


def test_forked_process_keeps_the_version_locked(folder: Path) -> None:
    version = LocalStore(folder.parent.parent).load("m")
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.read(reading, 1)  # until the parent is done
        os._exit(0)
    os.close(reading)
    try:
        assert version.lock is not None
        del version
        assert is_locked(folder)
    finally:
        os.close(writing)
        os.waitpid(child, 0)
    assert not is_locked(folder)


def test_release_in_a_forked_child_keeps_the_parents_lock(folder: Path) -> None:
    version = LocalStore(folder.parent.parent).load("m")
    child = os.fork()
    if not child:
        del version
        os._exit(0)
    os.waitpid(child, 0)
    assert is_locked(folder)
    assert version.manifest.version == 1


def test_version_being_removed_cannot_be_opened(folder: Path) -> None:
    store = LocalStore(folder.parent.parent)
    with exclusive_lock(folder), pytest.raises(StoreError, match="m/1: is being removed"):
        store.load("m")
    assert store.load("m").manifest.version == 1
    remove_unused(folder)
    with pytest.raises(StoreError, match=r"m/1/manifest\.json: cannot be read: No such file"):
        lock_shared(folder)


def test_version_removed_while_opening_is_not_locked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    moved = folder.with_name("moved")

    def flock_after_removal(descriptor: int, kind: int) -> None:
        moved.mkdir()
        for path in folder.iterdir():
            path.rename(moved / path.name)
        (folder / "manifest.json").write_bytes(b"another")
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", flock_after_removal)
    with pytest.raises(StoreError, match="m/1: was removed meanwhile"):
        lock_shared(folder)


def test_file_system_without_locks_is_logged_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    error = OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=error))
    version_lock._say_no_locks.cache_clear()
    versions = [LocalStore(folder.parent.parent).load("m") for _ in range(3)]
    remove_unused(folder)
    assert len(versions) == 3
    assert not folder.exists()
    logged = [one.getMessage() for one in caplog.records if "has no locks" in one.getMessage()]
    assert len(logged) == 1
    assert logged[0].endswith("are not seen when others are removed: No locks available")


@pytest.fixture
def nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes locks behave as on NFS: an exclusive lock needs a writable descriptor."""
    flock = fcntl.flock

    def checked(descriptor: int, kind: int) -> None:
        can_write = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        if kind & fcntl.LOCK_EX and not can_write:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", checked)


def reject_writable_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes opening a read-only manifest for writing fail, even as root."""
    opened = os.open

    def checked(path: Path, flags: int, *mode: int, **folder: Any) -> int:
        is_manifest = Path(path).name == "manifest.json"
        if is_manifest and flags & os.O_RDWR and not Path(path).stat().st_mode & stat.S_IWUSR:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, flags, *mode, **folder)

    monkeypatch.setattr(os, "open", checked)


@pytest.mark.usefixtures("nfs")
def test_version_in_use_on_nfs_is_not_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = folder / "manifest.json"
    manifest.chmod(0o444)
    reject_writable_open(monkeypatch)
    version = LocalStore(folder.parent.parent).load("m")
    assert is_locked(folder)
    with pytest.raises(VersionInUseError, match="m/1: is in use: a server or another process"):
        remove_unused(folder)
    assert stat.S_IMODE(manifest.stat().st_mode) == 0o444
    del version
    before = open_below(folder)
    assert not is_locked(folder)
    assert open_below(folder) == before
    remove_unused(folder)
    assert not folder.exists()


@pytest.mark.usefixtures("nfs")
def test_version_owned_by_another_user_on_nfs_is_not_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "manifest.json").chmod(0o444)
    reject_writable_open(monkeypatch)
    error = PermissionError(errno.EPERM, os.strerror(errno.EPERM))
    monkeypatch.setattr(Path, "chmod", Mock(side_effect=error))
    message = (
        r"m/1: is kept, because nobody can tell .* write manifest\.json can lock it: Operation"
    )
    with pytest.raises(StoreError, match=message):
        remove_unused(folder)
    assert LocalStore(folder.parent.parent).load("m").manifest.version == 1


def test_manifest_that_is_a_pipe_is_rejected_without_blocking(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    with pytest.raises(StoreError, match="is no regular file"):
        lock_shared(folder)
    assert not is_locked(folder)
