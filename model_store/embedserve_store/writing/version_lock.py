"""Locks versions in use, so that they are not removed.

A process that uses a version holds a shared lock on its manifest.json. A process that removes
versions sees the lock. The kernel releases the lock when the process ends, for any reason. Forked
processes share the lock. On a file system without locks, versions in use are not detected; this is
logged once. On NFS, Linux makes these locks locks of byte ranges, and an exclusive one needs a file
that is open for writing.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from embedserve_store.errors import StoreError, unreadable
from embedserve_store.format.regular_file import stat_regular
from embedserve_store.writing.small_files import sync
from embedserve_store.writing.staging import staging_folder

logger = logging.getLogger(__name__)

LOCKED_FILE = "manifest.json"


class VersionLock:
    """Shared lock on a version, released with the last reference to this object.

    A process forked while the lock is held has its own copy.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __del__(self) -> None:
        # The descriptor is closed, not unlocked, because forked processes share the lock.
        os.close(self._descriptor)


class VersionInUseError(StoreError):
    """A version is in use."""


def lock_shared(folder: Path) -> VersionLock:
    """Takes the lock that keeps the version in ``folder`` from being removed.

    Raises:
        UnreachableError: the version cannot be read now.
        StoreError: the version does not exist, or is being removed.
    """
    path = folder / LOCKED_FILE
    try:
        stat_regular(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        lock = VersionLock(descriptor)
        if not _lock(descriptor, fcntl.LOCK_SH):
            raise StoreError(f"{folder}: is being removed")
        if not os.path.samestat(os.fstat(descriptor), path.stat()):
            raise StoreError(f"{folder}: was removed meanwhile")
    except OSError as error:
        raise unreadable(path, "cannot be read", error, StoreError) from error
    return lock


@contextmanager
def exclusive_lock(folder: Path) -> Iterator[None]:
    """Holds an exclusive lock on the version in ``folder``, so that no process uses or opens it.

    Raises:
        VersionInUseError: another process uses the version.
        StoreError: the file system wants the manifest to be writable, and it cannot be opened so.
        OSError: the manifest cannot be opened.
    """
    path = folder / LOCKED_FILE
    with ExitStack() as opened:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:  # no process can open the version
            yield
            return
        opened.callback(os.close, descriptor)
        try:
            is_locked = _lock(descriptor, fcntl.LOCK_EX)
        except OSError:
            descriptor = _open_writable(path)
            opened.callback(os.close, descriptor)
            is_locked = _lock(descriptor, fcntl.LOCK_EX)
        if not is_locked:
            raise VersionInUseError(f"{folder}: is in use: a server or another process has it open")
        yield


def _open_writable(path: Path) -> int:
    """Opens a file for writing, also one that its owner, this user, has made read-only.

    Raises:
        StoreError: another user owns the file, or the file system is read-only.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        with suppress(PermissionError):
            return os.open(path, flags)
        mode = stat.S_IMODE(path.stat().st_mode)
        path.chmod(mode | stat.S_IWUSR)
        try:
            return os.open(path, flags)
        finally:
            path.chmod(mode & ~stat.S_IWUSR)
    except OSError as error:
        raise StoreError(
            f"{path.parent}: is kept, because nobody can tell whether it is in use: on this file "
            f"system only who may write {path.name} can lock it: {error.strerror}"
        ) from error


def remove_unused(
    folder: Path,
    check: Callable[[], None] = lambda: None,
    on_gone: Callable[[], None] = lambda: None,
) -> None:
    """Removes the version in ``folder`` in one step: moves it aside, then deletes its files.

    If the deletion is interrupted, the next publisher or removal deletes the rest.

    Args:
        check: called once the version has been moved aside. If it raises, the version is moved
            back.
        on_gone: called before the files are deleted, which may take long.

    Raises:
        VersionInUseError: another process uses the version.
        OSError: the version cannot be removed.
    """
    with exclusive_lock(folder), staging_folder(folder.parent) as aside:
        os.rename(folder, aside / folder.name)
        try:
            sync(folder.parent)
            check()
        except BaseException:
            os.rename(aside / folder.name, folder)
            raise
        on_gone()


def _lock(descriptor: int, kind: int) -> bool:
    """Tries to take the lock. Returns False if another process holds a conflicting lock.

    Raises:
        OSError: EBADF, the file system gives this lock only to a descriptor that can write.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno == errno.EBADF:
            raise
        _say_no_locks(os.fstat(descriptor).st_dev, str(error.strerror))
    return True


@cache
def _say_no_locks(device: int, reason: str) -> None:
    logger.warning(
        "the file system (device %d:%d) has no locks: versions in use are not seen when others are "
        "removed: %s",
        os.major(device),
        os.minor(device),
        reason,
    )
