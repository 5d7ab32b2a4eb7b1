"""Pulls a version of a remote store into a cache folder, where it appears whole or not at all.

The files are downloaded into a hidden folder, synced, loaded, verified to the last byte and made
read-only. Then the folder is renamed. Other processes that need the same version wait for a lock.
Never imports torch.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from embedserve_store.errors import StoreError
from embedserve_store.format.manifest import CHECKED_FILES, Manifest, parse_manifest
from embedserve_store.format.tables_file import header_bytes
from embedserve_store.local_store import SMALL_FILE_BYTES_MAX, LocalStore
from embedserve_store.remote.remote_files import RemoteFolder, TransferProgress
from embedserve_store.verification import verify
from embedserve_store.writing.staging import (
    check_room,
    check_writable,
    make_read_only,
    staging_folder,
    sync,
    write_synced,
)

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
TABLES = "tables.safetensors"
IDS = "ids.safetensors"


@dataclass(frozen=True)
class RemoteVersion:
    """A version as listed by a remote store, with its manifest read and checked."""

    model: str
    number: int
    manifest_json: bytes
    manifest: Manifest
    files: Mapping[str, int]
    """Size in bytes of each file of the version except the manifest, small files first."""

    @property
    def path(self) -> str:
        """Path of the version's folder in the store."""
        return f"{self.model}/{self.number}"

    @property
    def nbytes(self) -> int:
        return len(self.manifest_json) + sum(self.files.values())


def file_names(manifest: Manifest) -> tuple[str, ...]:
    """Returns the names of a version's files except manifest.json."""
    has_map = any(table.ids.rule == "map" for table in manifest.tables)
    return (*CHECKED_FILES, *((IDS,) if has_map else ()), TABLES)


def read_manifest(
    remote: RemoteFolder, model: str, number: int, listed: Mapping[str, int]
) -> RemoteVersion:
    """Reads the manifest of a version and checks it against the files in the version's folder.

    Args:
        listed: size in bytes of each file in the folder, by name.

    Raises:
        StoreError: the manifest is damaged, or a file is missing or has the wrong size.
    """
    where = f"{remote.url}/{model}/{number}"
    _check_small(listed[MANIFEST], f"{where}/{MANIFEST}")
    text = remote.read(f"{model}/{number}/{MANIFEST}")
    manifest = parse_manifest(text, f"{where}/{MANIFEST}")
    names = file_names(manifest)
    for name in names:
        if name not in listed:
            raise StoreError(f"{where}/{name}: does not exist")
    _check_sizes(listed, manifest, where)
    return RemoteVersion(model, number, text, manifest, {name: listed[name] for name in names})


def _check_sizes(listed: Mapping[str, int], manifest: Manifest, where: str) -> None:
    for name in CHECKED_FILES:
        _check_small(listed[name], f"{where}/{name}")
    expected = len(header_bytes(manifest.tables)) + manifest.nbytes
    if listed[TABLES] != expected:
        raise StoreError(f"{where}/{TABLES}: {listed[TABLES]} bytes, expected {expected}")


def _check_small(size: int, where: str) -> None:
    if size > SMALL_FILE_BYTES_MAX:
        raise StoreError(f"{where}: {size} bytes, the limit is {SMALL_FILE_BYTES_MAX}")


def pull(
    remote: RemoteFolder,
    version: RemoteVersion,
    folder: Path,
    progress: TransferProgress | None = None,
) -> None:
    """Makes ``folder``, CACHE/MODEL/NUMBER, a verified copy of ``version``.

    Does nothing if another process has made the copy meanwhile.

    Raises:
        StoreError: there is too little disk space, or a file is damaged or changed during the
            download.
        UnreachableError: the store stopped responding.
        OSError: the cache cannot be written.
    """
    cache = folder.parent.parent
    check_writable(cache)
    with _lock(cache, version, f"{remote.url}/{version.path}"):
        if folder.is_dir():
            return
        check_room(cache, version.nbytes)
        with staging_folder(folder.parent) as staging:
            staged = staging / version.path
            staged.mkdir(parents=True)
            _download(remote, version, staged, progress)
            _verify(staging, version, progress)
            _reveal(staged, folder)


def _download(
    remote: RemoteFolder, version: RemoteVersion, staged: Path, progress: TransferProgress | None
) -> None:
    for name, size in version.files.items():

        def report(bytes_done: int, name: str = name, size: int = size) -> None:
            if progress:
                progress(name, bytes_done, size)

        remote.download(f"{version.path}/{name}", staged / name, size, report)
    write_synced(staged / MANIFEST, version.manifest_json)


def _verify(staging: Path, version: RemoteVersion, progress: TransferProgress | None) -> None:
    """Verifies the download. ``staging`` is laid out as a store that holds only this version."""

    def report(table: str, rows_done: int, rows_total: int, bytes_done: int) -> None:
        if progress:
            progress("checksums", bytes_done, version.manifest.nbytes)

    verify(LocalStore(staging).load(version.model, version.number), report)


def _reveal(staged: Path, folder: Path) -> None:
    make_read_only(staged)
    sync(staged)
    try:
        os.rename(staged, folder)
    except OSError as error:
        # Without locks, another process may have pulled the version first.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    sync(folder.parent)


@contextmanager
def _lock(cache: Path, version: RemoteVersion, where: str) -> Iterator[None]:
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
            logger.info("%s: another process is pulling it, waiting", where)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            logger.info("%s: the cache has no locks: %s", where, error.strerror)
        yield
    finally:
        os.close(lock)
