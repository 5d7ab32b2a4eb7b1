"""Pulls a version of a remote store into a cache folder, where it appears whole or not at all.

The files are downloaded into a hidden folder, checked to the last byte, synced, loaded and made
read-only. Then the folder is renamed. Other processes that need the same version wait for a lock.
Never imports torch.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from embedserve_store.errors import failed_write
from embedserve_store.local_store import LocalStore
from embedserve_store.transfer.receive import TransferProgress, receive, reveal
from embedserve_store.transfer.stored_version import StoredVersion
from embedserve_store.writing.staging import check_room, check_writable, staging_folder

logger = logging.getLogger(__name__)


def pull(version: StoredVersion, folder: Path, progress: TransferProgress | None = None) -> None:
    """Makes ``folder``, CACHE/MODEL/NUMBER, a checked copy of ``version``, or of its part.

    Does nothing if another process has made the copy meanwhile.

    Raises:
        StoreError: the cache cannot be written or has too little space, or a file is damaged or
            changed during the download.
        UnreachableError: the store stopped responding.
    """
    cache = folder.parent.parent
    check_writable(cache)
    try:
        with _lock(cache, version):
            if folder.is_dir():
                return
            check_room(cache, version.nbytes)
            with staging_folder(folder.parent) as staging:
                # Without locks, another process may have pulled the version first.
                place(version, staging, folder, progress)
    except OSError as error:
        raise failed_write(f"{folder}: pulling failed", error) from error


def place(
    version: StoredVersion, staging: Path, folder: Path, progress: TransferProgress | None = None
) -> bool:
    """Makes ``folder`` a checked copy of ``version``, by a rename from ``staging``.

    Files that an interrupted transfer has left in ``staging`` are used if their checksums are
    right. Returns False if ``folder`` exists.

    Raises:
        StoreError, UnreachableError: as ``pull``.
        OSError: ``staging`` cannot be written.
    """
    staged = staging / version.path
    staged.mkdir(parents=True, exist_ok=True)
    receive(version, staged, progress)
    LocalStore(staging, version.holding).load(version.model, version.number)
    return reveal(staged, folder)


@contextmanager
def _lock(cache: Path, version: StoredVersion) -> Iterator[None]:
    """Waits until no other process pulls ``version`` into ``cache``, and locks it.

    The lock file stays: after a removal, a third process could lock a new file of the same name. If
    the file system has no locks, several processes may pull concurrently, and the first copy is
    kept.
    """
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / f".{version.model}-{version.number}.lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("%s: another process is pulling it, waiting", version.where)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            logger.info("%s: the cache has no locks: %s", version.where, error.strerror)
        yield
    finally:
        os.close(lock)
