"""A version in use is held: its manifest.json is locked, shared, which whoever removes it sees.

The kernel lets go of it with the process, however that ends. Processes that were forked hold it
together. Where a file system knows no locks nobody is seen: that is logged once, and goes on.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from embedserve_store.errors import StoreError
from embedserve_store.format.regular_file import stat_regular
from embedserve_store.writing.staging import staging_folder, sync

logger = logging.getLogger(__name__)

HELD_FILE = "manifest.json"


class VersionLock:
    """Of one version, let go with the last reference to it. A process that was forked meanwhile has
    one of its own."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __del__(self) -> None:
        # Not unlocked: the lock is that of forked processes, too.
        os.close(self._descriptor)


class HeldError(StoreError):
    """A version is in use."""


def hold(folder: Path) -> VersionLock:
    """Holds the version in ``folder``.

    Raises:
        StoreError: it is not there, cannot be read, or is being removed.
    """
    path = folder / HELD_FILE
    try:
        stat_regular(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        held = VersionLock(descriptor)
        if not _lock(descriptor, fcntl.LOCK_SH):
            raise StoreError(f"{folder}: is being removed")
        if not os.path.samestat(os.fstat(descriptor), path.stat()):
            raise StoreError(f"{folder}: was removed meanwhile")
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    return held


@contextmanager
def unheld(folder: Path) -> Iterator[None]:
    """Within, nobody holds the version in ``folder``, nor begins to.

    Raises:
        HeldError: somebody holds it.
        OSError: it cannot be opened.
    """
    try:
        descriptor = os.open(folder / HELD_FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:  # then nobody can open it
        yield
        return
    try:
        if not _lock(descriptor, fcntl.LOCK_EX):
            raise HeldError(f"{folder}: is in use: a server or another process has it open")
        yield
    finally:
        os.close(descriptor)


def remove_unheld(folder: Path, check: Callable[[], None] | None = None) -> None:
    """Removes the version in ``folder`` in one step: it is moved aside, and then emptied. What is
    left where that is cut short, whoever publishes or removes next takes away.

    Args:
        check: called once nobody can find the version; where it raises, it is put back.

    Raises:
        HeldError: somebody holds it.
        OSError: it cannot be removed.
    """
    with unheld(folder), staging_folder(folder.parent) as aside:
        os.rename(folder, aside / folder.name)
        sync(folder.parent)
        try:
            if check:
                check()
        except BaseException:
            os.rename(aside / folder.name, folder)
            raise


def _lock(descriptor: int, kind: int) -> bool:
    """Whether nobody else has what contradicts."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
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
