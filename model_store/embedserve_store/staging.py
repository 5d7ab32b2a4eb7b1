"""Makes a version appear whole or not at all: staging folder, sync, rename.

A version is written into a hidden folder beside the published ones and renamed when complete.
Readers ignore hidden folders, so what a killed publisher leaves behind is never seen.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from embedserve_store.errors import StoreError

RENAME_ATTEMPTS = 100
"""Other publishers of the same model may take a number between our look and our rename."""

VERSION_PATTERN = re.compile(r"[1-9][0-9]*")


def version_numbers(model_folder: Path) -> list[int]:
    """Names in ``model_folder`` that are positive integers, ascending.

    Raises:
        OSError: the folder cannot be listed.
    """
    names = os.listdir(model_folder)
    return sorted(int(name) for name in names if VERSION_PATTERN.fullmatch(name))


@contextmanager
def staging_folder(model_folder: Path) -> Iterator[Path]:
    """A new hidden folder in ``model_folder`` (made if need be), removed unless it was renamed.

    Raises:
        OSError: the folder cannot be made.
    """
    _make_folders(model_folder)
    staging = model_folder / f".staging-{secrets.token_hex(8)}"
    try:
        staging.mkdir()
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _make_folders(folder: Path) -> None:
    """As mkdir -p, each new folder synced into its parent."""
    if folder.is_dir():
        return
    _make_folders(folder.parent)
    folder.mkdir(exist_ok=True)
    sync(folder.parent)


def publish_staged(staging: Path, write_manifest: Callable[[int], None]) -> int:
    """Renames ``staging`` to the next version number, which it returns.

    ``write_manifest`` writes and syncs the manifest for a version number. Two publishers never
    clobber one another: renaming onto a version fails, and the later one takes the next number.

    Raises:
        OSError: as the file system says.
        StoreError: other publishers took every number tried.
    """
    model_folder = staging.parent
    for _ in range(RENAME_ATTEMPTS):
        version = max(version_numbers(model_folder), default=0) + 1
        write_manifest(version)
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


def sync(path: Path) -> None:
    """Flushes a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, data: bytes) -> None:
    """Writes a small file and flushes it to disk."""
    path.write_bytes(data)
    sync(path)
