"""Pulls a version of a remote store into a cache folder, where it appears whole or not at all.

The files are downloaded into a hidden folder, checked to the last byte, synced, loaded and made
read-only. Then the folder is renamed. Other processes that need the same version wait for a lock.
A pull continues with the files of an earlier pull that was stopped or killed, or that lost the
store. After a pull that found damage the next pull waits (damage_record.py). Never imports torch.
"""

from __future__ import annotations

from pathlib import Path

from embedserve_store.errors import failed_write
from embedserve_store.local_store import LocalStore
from embedserve_store.remote.damage_record import UNDAMAGED, known_damage
from embedserve_store.transfer.receive import TransferProgress, receive
from embedserve_store.transfer.stored_version import StoredVersion
from embedserve_store.writing.staging import check_room, check_writable, copy_folder, reveal

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
        with copy_folder(folder.parent, folder.name, _KEPT_AFTER, others_kept_s=0) as staging:
            if folder.is_dir():
                return
            check_room(cache, version.nbytes - _used_bytes(staging))
            with known_damage(cache / f".{version.model}-{version.number}.damaged", listed):
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
