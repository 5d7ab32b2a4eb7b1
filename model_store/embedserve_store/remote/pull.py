"""Pulls a version of a remote store into a cache folder, where it appears whole or not at all.

The files are downloaded into a hidden folder, checked to the last byte, synced, loaded and made
read-only. Then the folder is renamed. Other processes that need the same version wait for a lock.
A pull continues with the files of an earlier pull that was stopped or killed, or that lost the
store. After a pull that found damage the next pull waits (damage_record.py). Never imports torch.
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
from embedserve_store.remote.damage_record import UNDAMAGED, known_damage
from embedserve_store.transfer.receive import TransferProgress, receive
from embedserve_store.transfer.stored_version import StoredVersion
from embedserve_store.writing.staging import check_room, check_writable, copy_folder, reveal

logger = logging.getLogger(__name__)

STAT_BLOCK_BYTES = 512
"""Unit of st_blocks, in bytes."""
_KEPT_AFTER = (*UNDAMAGED, KeyboardInterrupt)
"""Exceptions after which the next pull continues. After damage nothing is kept, which may take no
space. KeyboardInterrupt is Ctrl-C or SIGTERM."""


def pull(
    version: StoredVersion, folder: Path, listed: str, progress: TransferProgress | None = None
) -> None:
    """Makes ``folder``, CACHE/MODEL/NUMBER, a checked copy of ``version``, or of its part.

    Does nothing if another process has made the copy meanwhile.

    Args:
        listed: checksum of the store's listing of the version.

    Raises:
        StoreError: the cache cannot be written or has too little space, or a file is damaged or
            changed during the download, or was damaged when it was pulled last.
        UnreachableError: the store stopped responding.
    """
    cache = folder.parent.parent
    check_writable(cache)
    try:
        with _lock(cache, version):
            if folder.is_dir():
                return
            record = cache / f".{version.model}-{version.number}.damaged"
            name = folder.name
            with copy_folder(folder.parent, name, _KEPT_AFTER, others_kept_s=0) as staging:
                check_room(cache, version.nbytes - _used_bytes(staging))
                with known_damage(record, listed):
                    # Without locks, another process may have pulled the version first.
                    place(version, staging, folder, progress)
    except OSError as error:
        raise failed_write(f"{folder}: pulling failed", error) from error


def _used_bytes(staging: Path) -> int:
    """Returns the disk space of what an earlier pull has left."""
    files = [path.stat() for path in staging.rglob("*") if path.is_file()]
    return sum(min(one.st_size, one.st_blocks * STAT_BLOCK_BYTES) for one in files)


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
    LocalStore(staging, version.selection).load(version.model, version.number)
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
