"""Makes a version appear whole or not at all: staging folder, sync, rename.

A version is written into a hidden folder beside the published ones and, when complete, made
read-only and renamed.
Readers ignore hidden folders, so what a killed publisher leaves behind is never seen; the next
publisher removes it. A locked file beside the folder says that its publisher lives: the file
is there before the folder and until after it, so a folder that nobody locks has no owner.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from embedserve_store.errors import NoRoomError, StoreError
from embedserve_store.format.version_folder import version_numbers

logger = logging.getLogger(__name__)

STAGING = ".staging-"
LOCK = ".lock"
LOCK_ATTEMPTS = 100
"""Another publisher that cleans up may take our file away before we have locked it."""
RENAME_ATTEMPTS = 100
"""Other publishers of the same model may take a number between our look and our rename."""
WRITE_BITS = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
CHMOD_REFUSED = (errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.ENOSYS)
"""As file systems say that have no modes, or let nobody change them."""


def check_writable(folder: Path) -> None:
    """Raises StoreError unless ``folder``, or where it is missing what it would lie in, is a
    folder that can be written; touches nothing."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise StoreError(f"{folder}: cannot be written: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise StoreError(f"{folder}: cannot be written: no permission to write to {there}")


def check_room(folder: Path, needed_bytes: int, spare: str = "") -> None:
    """Raises NoRoomError where the file system of ``folder`` (or of what it would lie in) has
    less room than ``needed_bytes``; ``spare`` says what of these is a reserve."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    usage = shutil.disk_usage(there)
    if usage.free < needed_bytes:
        if not usage.total:  # such as /proc
            raise StoreError(f"{folder}: is on a file system that keeps no files")
        raise NoRoomError(
            f"{folder}: the version needs {needed_bytes:,} bytes{spare}, the disk has "
            f"{usage.free:,} free"
        )


@contextmanager
def staging_folder(model_folder: Path) -> Iterator[Path]:
    """A new hidden folder in ``model_folder`` (made if need be), removed unless it was renamed.

    First removes what killed publishers left, last ``model_folder`` if it is empty.

    Raises:
        OSError: the folder cannot be made.
    """
    staging, lock = _claim_folder(model_folder)
    try:
        _remove_abandoned(model_folder)
        staging.mkdir()
        yield staging
    finally:
        _remove(staging)
        os.close(lock)
        with suppress(OSError):
            model_folder.rmdir()


def _claim_folder(model_folder: Path) -> tuple[Path, int]:
    """An unused name for a staging folder, and the open file that is locked for it.

    Raises:
        OSError: ``model_folder`` or the file cannot be made.
        StoreError: other publishers took every file away.
    """
    for _ in range(LOCK_ATTEMPTS):
        _make_folders(model_folder)
        staging = model_folder / f"{STAGING}{secrets.token_hex(8)}"
        # Missing: a publisher that failed has just removed the model's empty folder.
        with suppress(FileNotFoundError):
            lock = _lock(staging, locked_if_unsupported=True)
            if lock is not None:
                return staging, lock
    raise StoreError(f"{model_folder}: other publishers took the lock {LOCK_ATTEMPTS} times")


def _lock(staging: Path, *, locked_if_unsupported: bool) -> int | None:
    """The locked file of ``staging``, made if need be; None if someone else has or removed it.

    Where the file system knows no locks, publishers go without and nobody cleans up.
    """
    path = _lock_path(staging)
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = os.path.samestat(os.fstat(lock), os.stat(path))
    except (BlockingIOError, FileNotFoundError):
        is_ours = False
    except OSError:
        is_ours = locked_if_unsupported
    if is_ours:
        return lock
    os.close(lock)
    return None


def _lock_path(staging: Path) -> Path:
    return staging.with_name(staging.name + LOCK)


def _remove_abandoned(model_folder: Path) -> None:
    """Removes the staging folders and files in ``model_folder`` that no publisher has locked."""
    names = {name.removesuffix(LOCK) for name in os.listdir(model_folder)}
    for name in sorted(name for name in names if name.startswith(STAGING)):
        # Another user's, or just removed by who owned it.
        with suppress(OSError):
            lock = _lock(model_folder / name, locked_if_unsupported=False)
            if lock is not None:
                _remove(model_folder / name)
                os.close(lock)


def _remove(staging: Path) -> None:
    """Removes a staging folder, if it is still there, and then its file, which is locked."""
    shutil.rmtree(staging, ignore_errors=True)
    with suppress(OSError):
        _lock_path(staging).unlink()


def _make_folders(folder: Path) -> None:
    """As mkdir -p, each new folder synced into its parent."""
    if folder.is_dir():
        return
    _make_folders(folder.parent)
    # Another publisher may have made it, and may by now have failed and removed it.
    with suppress(FileExistsError):
        folder.mkdir()
    sync(folder.parent)


def publish_staged(staging: Path, write_manifest: Callable[[int], None]) -> int:
    """Renames ``staging``, its files read-only, to the next version number, which it returns.

    ``write_manifest`` writes the manifest for a version number with write_synced, in place of one
    for the number before. Two publishers never clobber one another: renaming onto a version fails,
    and the later one takes the next number.

    Raises:
        OSError: as the file system says.
        StoreError: other publishers took every number tried.
    """
    model_folder = staging.parent
    for _ in range(RENAME_ATTEMPTS):
        version = max(version_numbers(model_folder), default=0) + 1
        write_manifest(version)
        make_read_only(staging)
        sync(staging)
        try:
            os.rename(staging, model_folder / str(version))
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            continue
        sync(model_folder)
        return version
    raise StoreError(
        f"{model_folder}: other publishers took the version number {RENAME_ATTEMPTS} times"
    )


def make_read_only(folder: Path) -> None:
    """Takes the write bits from every file in ``folder`` and flushes each to disk.

    The folder keeps its own, so that whoever owns a version can remove it. The checksums are what
    readers rely on: where the file system refuses, the files stay as they are.
    """
    for path in folder.iterdir():
        try:
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~WRITE_BITS)
        except OSError as error:
            if error.errno not in CHMOD_REFUSED:
                raise
            logger.debug("%s: stays writable: %s", path, error.strerror)
        sync(path)


def sync(path: Path) -> None:
    """Flushes a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, data: bytes) -> None:
    """Writes a small file, in place of one that is there, and flushes it to disk."""
    path.unlink(missing_ok=True)  # it may be read-only
    path.write_bytes(data)
    sync(path)
