"""Lists and reads the files of a published version, in a folder or behind a URL.

Never imports torch, never writes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from embedserve_store.errors import StoreError, reading, unreadable
from embedserve_store.format.json_fields import parse_json
from embedserve_store.format.manifest import CHECKED_FILES, Manifest, parse_manifest
from embedserve_store.format.manifest_checksum import check_sha256
from embedserve_store.format.regular_file import stat_regular
from embedserve_store.parts.part import NO_ROWS, RowSelection
from embedserve_store.plans.plan import Plan
from embedserve_store.transfer.file_check import (
    IDS,
    MANIFEST,
    TABLES,
    FileCheck,
    FileLayout,
    file_layouts,
)
from embedserve_store.writing.direct_file import DIRECT_BYTES_MIN
from embedserve_store.writing.version_lock import VersionLock, lock_shared

PLAN = "plan.json"
SMALL_FILE_BYTES_MAX = 256 << 20
"""Maximum bytes of a manifest, plan or goldens file, which is read whole; 256 MiB.

This code publishes no larger file.
"""
BLOCK_BYTES = 8 << 20
"""Bytes of a block in which a local file is read; 8 MiB."""

Blocks = Callable[[str, int, int], Iterator[bytes]]
"""Reads a file of a version, by its name, from a byte to before another, in blocks."""


@dataclass(frozen=True)
class FileRange:
    """Contiguous bytes of tables.safetensors, with the checksums of the tables in them."""

    start: int
    layout: FileLayout

    @property
    def stop(self) -> int:
        return self.start + self.layout.nbytes


@dataclass(frozen=True)
class StoredVersion:
    """A version in a store, with its manifest read and checked."""

    where: str
    """Folder or URL of the version."""
    model: str
    number: int
    manifest_json: bytes
    manifest: Manifest
    files: Mapping[str, int]
    """Size in bytes of each file of the version except the manifest, small files first."""
    blocks: Blocks = field(compare=False, repr=False)
    lock: VersionLock | None = field(default=None, compare=False, repr=False)
    """Lock that prevents the removal of a version in a folder."""
    selection: RowSelection = None
    """Rows that are transferred; None for all. The others are left out of the copy."""
    ranges: tuple[FileRange, ...] = ()
    """Ranges of tables.safetensors of a part, which is not among ``files`` then."""

    @property
    def path(self) -> str:
        """Path of the version's folder in the store."""
        return f"{self.model}/{self.number}"

    @property
    def nbytes(self) -> int:
        ranges = sum(one.layout.nbytes for one in self.ranges)
        return len(self.manifest_json) + sum(self.files.values()) + ranges

    def plan(self) -> Plan:
        """Reads the sharding plan of the whole version.

        Raises:
            StoreError: the plan is damaged.
            UnreachableError: the store stopped responding.
        """
        where = f"{self.where}/{PLAN}"
        text = b"".join(self.blocks(PLAN, 0, self.files[PLAN]))
        check_sha256(hashlib.sha256(text).hexdigest(), self.manifest.files[PLAN], where)
        plan = Plan.from_json(parse_json(text, where), where)
        plan.check(self.manifest.tables, where)
        return plan

    def check(self, name: str) -> FileCheck:
        """Returns the check of a file's bytes; errors name the file in this store."""
        return FileCheck(file_layouts(self.manifest)[name], f"{self.where}/{name}")

    def check_small_files(self) -> None:
        """Reads the plan and the goldens, and compares them with their checksums.

        Raises:
            StoreError: a file has changed since it was published.
            UnreachableError: the store stopped responding.
        """
        for name in CHECKED_FILES:
            check = self.check(name)
            for block in self.blocks(name, 0, self.files[name]):
                check.update(block)
            if problem := check.problem():
                raise StoreError(problem)


def stored_version(
    where: str,
    model: str,
    number: int,
    listed: Mapping[str, int],
    read_manifest: Callable[[], bytes],
    blocks: Blocks,
    lock: VersionLock | None = None,
    selection: RowSelection = None,
) -> StoredVersion:
    """Reads the manifest of a version and checks it against the files in the version's folder.

    Args:
        listed: size in bytes of each file in the folder, by name.
        selection: rows that will be transferred. Without rows, the file of rows need not exist.

    Raises:
        StoreError: the manifest is damaged or of another version, or a file is missing or has the
            wrong size.
    """
    _check_small(listed[MANIFEST], f"{where}/{MANIFEST}")
    text = read_manifest()
    manifest = parse_manifest(text, f"{where}/{MANIFEST}")
    manifest.check_place(model, number, f"{where}/{MANIFEST}")
    layouts = file_layouts(manifest)
    if selection == NO_ROWS:
        del layouts[TABLES]
    for name in layouts:
        if name not in listed:
            raise StoreError(f"{where}/{name}: does not exist")
    for name in CHECKED_FILES:
        _check_small(listed[name], f"{where}/{name}")
    for name in layouts.keys() & {IDS, TABLES}:
        if listed[name] != layouts[name].nbytes:
            raise StoreError(
                f"{where}/{name}: {listed[name]} bytes, expected {layouts[name].nbytes}"
            )
    files = {name: listed[name] for name in layouts}
    return StoredVersion(where, model, number, text, manifest, files, blocks, lock)


def _check_small(size: int, where: str) -> None:
    if size > SMALL_FILE_BYTES_MAX:
        raise StoreError(f"{where}: {size} bytes, the limit is {SMALL_FILE_BYTES_MAX}")


def version_in_folder(folder: Path) -> StoredVersion:
    """Returns the version STORE/MODEL/NUMBER. It is locked against removal while it is referred to.

    Raises:
        StoreError: the version does not exist or is damaged.
    """
    lock = lock_shared(folder)
    # A link without a target is no file.
    listed = {path.name: path.stat().st_size for path in folder.iterdir() if path.exists()}
    return stored_version(
        str(folder),
        folder.parent.name,
        int(folder.name),
        listed,
        lambda: read_file(folder / MANIFEST),
        lambda name, start, stop: file_blocks(folder / name, start, stop),
        lock,
    )


def check_small_files(folder: Path, manifest: Manifest) -> None:
    """Raises StoreError if a file in ``folder``, of those that the manifest has a sha256 of, has
    changed since it was published."""
    for name in CHECKED_FILES:
        found = hashlib.sha256(read_file(folder / name)).hexdigest()
        check_sha256(found, manifest.files[name], str(folder / name))


def read_file(path: Path, bytes_max: int = SMALL_FILE_BYTES_MAX) -> bytes:
    """Reads a small local file.

    Raises:
        MissingFileError: the file does not exist.
        StoreError: the file cannot be read, or has more than ``bytes_max`` bytes.
    """
    try:
        size = stat_regular(path).st_size
        if size <= bytes_max:
            with path.open("rb") as file:
                return file.read(size)
    except OSError as error:
        raise unreadable(path, "cannot be read", error) from error
    raise StoreError(f"{path}: {size} bytes, the limit is {bytes_max}")


def file_blocks(path: Path, start: int, stop: int) -> Iterator[bytes]:
    """Reads bytes ``start`` to ``stop`` of a local file.

    A large file leaves no pages in memory, unless a process has them mapped.

    Raises:
        StoreError: the file cannot be read.
    """
    with reading(path), open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        file.seek(start)
        while block := file.read(min(BLOCK_BYTES, stop - start)):
            yield block
            if size >= DIRECT_BYTES_MIN:
                os.posix_fadvise(file.fileno(), start, len(block), os.POSIX_FADV_DONTNEED)
            start += len(block)
