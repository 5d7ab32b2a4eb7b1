"""Writes small files, synced to disk: manifests, and those of aliases, notes, events and deltas.

A new file is written under a temporary name and then linked to its own, so that it appears whole or
not at all.
"""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

from embedserve_store.errors import StoreError

ASIDE_PREFIX = ".new-"
"""Prefix of the temporary name under which a small file is written."""
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
"""Errors of ``link`` on file systems without hard links. There the file is renamed, and the later
of two concurrent writers wins."""


def sync(path: Path) -> None:
    """Flushes a file or folder to disk. Some file systems flush no folders, with EINVAL."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def write_synced(path: Path, data: bytes) -> None:
    """Writes a small file, replacing an existing one, and flushes it to disk."""
    path.unlink(missing_ok=True)  # the existing file may be read-only
    path.write_bytes(data)
    sync(path)


def write_new(path: Path, data: bytes) -> bool:
    """Writes a small new file, which appears whole and on disk or not at all.

    Creates its folder if needed. Returns False if the file exists.

    Raises:
        OSError: an error of the file system.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{ASIDE_PREFIX}{secrets.token_hex(8)}")
    try:
        write_synced(aside, data)
        _link(aside, path)
    except FileExistsError:
        return False
    finally:
        aside.unlink(missing_ok=True)
    sync(path.parent)
    return True


def write_output(path: Path, data: bytes) -> None:
    """Writes a file that a user has named. An existing one is replaced whole, or not at all.

    Raises:
        StoreError: an error of the file system.
    """
    target = path.resolve()
    aside = target.with_name(f"{ASIDE_PREFIX}{secrets.token_hex(8)}")
    try:
        if target.exists() and not target.is_file():  # a pipe or a terminal
            target.write_bytes(data)
            return
        try:
            write_synced(aside, data)
            os.replace(aside, target)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror}") from error


def _link(aside: Path, path: Path) -> None:
    """Links ``aside`` to ``path``, or renames it where the file system has no hard links.

    Raises:
        FileExistsError: ``path`` exists.
    """
    try:
        os.link(aside, path)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if path.exists():
            raise FileExistsError from error
        os.rename(aside, path)
