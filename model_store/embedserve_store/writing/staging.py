"""Publishes a version whole or not at all: staging folder, sync, rename.

A version is written into a hidden folder beside the published versions. When complete, it is made
read-only and renamed. Readers ignore hidden folders, so they never see the remains of a killed
publisher. The next publisher removes them.

A locked file beside the folder shows that its publisher is alive. The file exists before the folder
is created and until after it is removed. A folder without a locked file therefore has no owner.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from embedserve_store.errors import NoRoomError, StoreError
from embedserve_store.format.version_folder import version_numbers
from embedserve_store.writing.small_files import sync

logger = logging.getLogger(__name__)

STAGING = ".staging-"
COPY = ".copy-"
"""Prefix of the folders of copies and pulls. They outlive a killed process, so that the next
attempt can use what has arrived."""
COPY_KEPT_S = 7 * 24 * 3600.0
"""Seconds that the folder of a killed copy is kept; a week, in which somebody starts it again."""
WAIT_S = 0.5
"""Seconds between two attempts to lock a folder that another process has locked."""
LOCK = ".lock"
LOCK_ATTEMPTS = 100
"""Attempts to lock a new lock file, which another publisher's cleanup may remove first."""
RENAME_ATTEMPTS = 100
"""Attempts to rename the staging folder. Another publisher of the model may take the version number
between the listing and the rename."""
WRITE_BITS = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
CHMOD_REFUSED = (errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.ENOSYS)
"""Errors of ``chmod`` on file systems that have no modes, or do not allow changing them."""


def check_writable(folder: Path) -> None:
    """Raises StoreError unless ``folder`` can be written.

    If ``folder`` does not exist, its nearest existing parent is checked. Changes nothing.
    """
    if str(folder).startswith("~") and not Path(folder.parts[0]).exists():
        raise StoreError(f"{folder}: only a shell replaces ~ by a home folder; write it out")
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not there.is_dir():
        raise StoreError(f"{folder}: cannot be written: {there} is not a folder")
    if os.statvfs(there).f_flag & os.ST_RDONLY:
        raise StoreError(f"{folder}: cannot be written: {there} is on a read-only file system")
    if not os.access(there, os.W_OK | os.X_OK):
        raise StoreError(f"{folder}: cannot be written: no permission to write to {there}")


def check_room(folder: Path, needed_bytes: int, spare: str = "") -> None:
    """Raises NoRoomError if the disk of ``folder`` has less than ``needed_bytes`` free.

    Args:
        folder: a folder that may not exist yet; its nearest existing parent is checked.
        spare: part of the error message that names the reserve within ``needed_bytes``.

    Raises:
        NoRoomError: there is too little free space.
        StoreError: the file system stores no files, such as /proc.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
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
    """Creates a hidden folder in ``model_folder``, and removes it at the end unless it was renamed.

    Creates ``model_folder`` if needed. First removes the remains of killed publishers. At the end
    removes ``model_folder`` if it is empty.

    Raises:
        OSError: the folder cannot be created.
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


@contextmanager
def copy_folder(
    model_folder: Path,
    name: str,
    kept_after: tuple[type[BaseException], ...] = (BaseException,),
    others_kept_s: float | None = None,
) -> Iterator[Path]:
    """Opens the hidden folder of the copy ``name`` in ``model_folder``, and removes it at the end.

    Creates both folders if needed. If the copy fails or is killed, the folder stays with its files
    for the next attempt. Two processes that make the same copy take turns. First removes the
    remains of killed publishers. Where the file system has no locks, each copy has a folder of its
    own, which does not stay.

    Args:
        kept_after: exceptions after which the folder stays; default: all.
        others_kept_s: seconds that the folders of other copies stay that failed or were killed;
            default: COPY_KEPT_S.

    Raises:
        OSError: the folder cannot be created.
    """
    copy = model_folder / f"{COPY}{name}"
    lock = _wait_for_lock(model_folder, copy)
    if not _is_locked(lock):
        os.close(lock)
        _lock_path(copy).unlink(missing_ok=True)
        with staging_folder(model_folder) as own:
            yield own
        return
    is_kept = False
    try:
        _remove_abandoned(model_folder, others_kept_s)
        copy.mkdir(exist_ok=True)
        os.utime(copy)
        yield copy
    except kept_after:
        is_kept = any(path.is_file() for path in copy.rglob("*"))
        raise
    finally:
        if not is_kept:
            _remove(copy)
        os.close(lock)
        with suppress(OSError):
            model_folder.rmdir()


def _wait_for_lock(model_folder: Path, copy: Path) -> int:
    is_waiting = False
    while True:
        _make_folders(model_folder)
        # FileNotFoundError: a process that failed has just removed the model's empty folder.
        with suppress(FileNotFoundError):
            lock = _lock(copy, locked_if_unsupported=True)
            if lock is not None:
                return lock
        if not is_waiting:
            logger.info("%s: another process is copying it, waiting", copy)
        is_waiting = True
        time.sleep(WAIT_S)


def _claim_folder(model_folder: Path) -> tuple[Path, int]:
    """Returns an unused name for a staging folder, and the descriptor of its locked lock file.

    Raises:
        OSError: ``model_folder`` or the lock file cannot be created.
        StoreError: other publishers removed the lock file at every attempt.
    """
    for _ in range(LOCK_ATTEMPTS):
        _make_folders(model_folder)
        staging = model_folder / f"{STAGING}{secrets.token_hex(8)}"
        # FileNotFoundError: a publisher that failed has just removed the model's empty folder.
        with suppress(FileNotFoundError):
            lock = _lock(staging, locked_if_unsupported=True)
            if lock is not None:
                return staging, lock
    raise StoreError(f"{model_folder}: other publishers took the lock {LOCK_ATTEMPTS} times")


def _lock(staging: Path, *, locked_if_unsupported: bool) -> int | None:
    """Opens and locks the lock file of ``staging``, which is created if needed.

    Returns None if another process holds the lock or has removed the file. Where the file system
    has no locks, publishers continue without them and remove no abandoned folders.
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


def _is_locked(lock: int) -> bool:
    """Returns whether the file that ``_lock`` opened is locked: not where the file system has no
    locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _lock_path(staging: Path) -> Path:
    return staging.with_name(staging.name + LOCK)


def _remove_abandoned(model_folder: Path, copies_kept_s: float | None = None) -> None:
    """Removes the staging folders and files in ``model_folder`` that no publisher has locked.

    Folders of copies are removed ``copies_kept_s`` after their last file was added, by default
    COPY_KEPT_S.
    """
    oldest_s = time.time() - (COPY_KEPT_S if copies_kept_s is None else copies_kept_s)
    names = {name.removesuffix(LOCK) for name in os.listdir(model_folder)}
    for name in sorted(name for name in names if name.startswith((STAGING, COPY))):
        # OSError: the file belongs to another user, or its owner has just removed it.
        with suppress(OSError):
            if name.startswith(COPY) and _is_newer(model_folder / name, oldest_s):
                continue
            lock = _lock(model_folder / name, locked_if_unsupported=False)
            if lock is not None:
                _remove(model_folder / name)
                os.close(lock)


def _is_newer(copy: Path, oldest_s: float) -> bool:
    """Returns whether the folder of a copy is there, and a file was added after ``oldest_s``."""
    try:
        return copy.stat().st_mtime > oldest_s
    except FileNotFoundError:  # the process was killed before or after the folder existed
        return False


def _remove(staging: Path) -> None:
    """Removes a staging folder, if it still exists, and then its locked lock file."""
    shutil.rmtree(staging, ignore_errors=True)
    with suppress(OSError):
        _lock_path(staging).unlink()


def _make_folders(folder: Path) -> None:
    """Creates a folder and its parents, and syncs each new folder into its parent."""
    if folder.is_dir():
        return
    _make_folders(folder.parent)
    # Another publisher may have created the folder, or may since have failed and removed it.
    with suppress(FileExistsError):
        folder.mkdir()
    sync(folder.parent)


def publish_staged(staging: Path, write_manifest: Callable[[int], None]) -> int:
    """Makes ``staging`` read-only, renames it to the next version number, and returns the number.

    Two publishers never overwrite each other. A rename onto an existing version fails, and the
    later publisher takes the next number.

    Args:
        write_manifest: writes the manifest for a version number with write_synced. It replaces the
            manifest of the previous attempt.

    Raises:
        OSError: an error of the file system.
        StoreError: other publishers took the number at every attempt.
    """
    model_folder = staging.parent
    for _ in range(RENAME_ATTEMPTS):
        version = max(version_numbers(model_folder), default=0) + 1
        write_manifest(version)
        if reveal(staging, model_folder / str(version)):
            return version
    raise StoreError(
        f"{model_folder}: other publishers took the version number {RENAME_ATTEMPTS} times"
    )


def reveal(staged: Path, folder: Path) -> bool:
    """Makes the files in ``staged`` read-only and renames it to ``folder``.

    Returns False if ``folder`` exists.

    Raises:
        OSError: an error of the file system. ``folder`` does not exist then.
    """
    _make_read_only(staged)
    sync(staged)
    try:
        os.rename(staged, folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    try:
        sync(folder.parent)
    except BaseException:
        os.rename(folder, staged)
        raise
    return True


def _make_read_only(folder: Path) -> None:
    """Removes the write permission from every file in ``folder`` and flushes each file to disk.

    The folder stays writable, so that its owner can remove the version. Where the file system
    rejects the change, the files stay writable: readers rely on the checksums.
    """
    for path in folder.iterdir():
        try:
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~WRITE_BITS)
        except OSError as error:
            if error.errno not in CHMOD_REFUSED:
                raise
            logger.debug("%s: stays writable: %s", path, error.strerror)
        sync(path)
