"""Writes small files, synced to disk: manifests, and those of aliases, notes, events and deltas.

A new file is written under a temporary name and then linked to its own, so that it appears whole or
not at all.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
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
    try:
        with _written_aside(path, data) as aside:
            _link(aside, path)
    except FileExistsError:
        return False
    sync(path.parent)
    return True


def write_output(path: Path, data: bytes, *, may_replace: bool) -> None:
    """Writes a file that a user has named.

    Args:
        may_replace: whether an existing file is replaced, whole or not at all.

    Raises:
        FileExistsError: ``path`` exists, and may not be replaced.
        StoreError: another error of the file system.
    """
    try:
        if not may_replace:
            with _written_aside(path, data) as aside:
                _link(aside, path)
            return
        target = path.resolve()
        if target.exists() and not target.is_file():  # a pipe or a terminal
            target.write_bytes(data)
            return
        with _written_aside(target, data) as aside:
            os.replace(aside, target)
    except FileExistsError:
        raise
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror}") from error


@contextmanager
def _written_aside(path: Path, data: bytes) -> Iterator[Path]:
    """Writes ``data`` under a temporary name beside ``path``. Yields that name, under which nothing
    is left at the end."""
    aside = path.with_name(f"{ASIDE_PREFIX}{secrets.token_hex(8)}")
    try:
        write_synced(aside, data)
        yield aside
    finally:
        aside.unlink(missing_ok=True)


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
