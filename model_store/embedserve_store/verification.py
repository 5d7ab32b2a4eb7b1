"""Verifies every byte of an opened version against the checksums in its manifest.

Never imports torch, never writes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import StoreError
from embedserve_store.format.manifest import CHECKED_FILES
from embedserve_store.format.manifest_checksum import check_seal, check_sha256
from embedserve_store.format.safetensors_file import LENGTH_BYTES, encode_header
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.format.tables_file import BLOCK_BYTES, Progress, TablesFile, header_bytes
from embedserve_store.ids.id_map import verify_id_maps
from embedserve_store.model_version import ModelVersion
from embedserve_store.plans.host_plan import HostPlan


def verify(version: ModelVersion, progress: Progress | None = None) -> None:
    """Reads every byte of ``version`` and compares it with the checksums in its manifest.

    Of a part only its rows are read, and without rows only the other files. In format version 1 the
    manifest itself has no checksum.

    Raises:
        StoreError: a file or table has changed since it was published.
    """
    manifest_path = version.path / "manifest.json"
    check_seal(_read(manifest_path), str(manifest_path))
    for name in CHECKED_FILES:
        found = hashlib.sha256(_read(version.path / name)).hexdigest()
        check_sha256(found, version.manifest.files[name], str(version.path / name))
    if version.tables.tables:
        _check_header(version.tables.path, header_bytes(version.whole.tables))
    _verify_id_maps(version)
    bytes_before = 0
    for name in version.tables.offsets:
        table = version.tables.tables[name]
        found = table_sha256(version.tables, table, bytes_before, progress)
        check_sha256(found, table.sha256, f"{version.tables.path}: table {name!r}")
        bytes_before += table.nbytes


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error


def _verify_id_maps(version: ModelVersion) -> None:
    if not version.id_maps:
        return
    path = version.path / "ids.safetensors"
    verify_id_maps(path, version.manifest.tables)
    # Opening has compared the parsed header. This compares its bytes, including the padding.
    data = _read_header(path)
    _check_header(path, encode_header(json.loads(data[LENGTH_BYTES:])))


def _check_header(path: Path, expected: bytes) -> None:
    """Raises StoreError unless the header of ``path`` equals ``expected``.

    A header follows from the manifest, so it needs no checksum.
    """
    if _read_header(path) != expected:
        raise StoreError(f"{path}: its header is not as it was published")


def _read_header(path: Path) -> bytes:
    """Returns the bytes of a safetensors file before its data: header length and header."""
    try:
        with open(path, "rb") as file:
            length = file.read(LENGTH_BYTES)
            return length + file.read(int.from_bytes(length, "little"))
    except (OSError, OverflowError) as error:
        raise StoreError(f"{path}: cannot be read: {error}") from error


def part_checksums(tables: TablesFile, hosts: HostPlan) -> dict[str, tuple[str, ...]]:
    """Returns the hexadecimal sha256 of the rows of each part, by table, reading them in blocks."""
    return {
        name: tuple(
            _rows_sha256(tables.rows(name)[rows.start : rows.stop], table.row_bytes)
            for rows in (hosts.rows_on(name, part) for part in range(hosts.parts))
        )
        for name, table in tables.tables.items()
    }


def table_sha256(
    tables: TablesFile, table: TableSpec, bytes_before: int = 0, progress: Progress | None = None
) -> str:
    """Returns the hexadecimal sha256 of a table's rows, reading them in blocks.

    Args:
        bytes_before: bytes of the tables before this one, for ``progress``.
    """
    rows = tables.rows(table.name)

    def report(rows_done: int) -> None:
        if progress:
            bytes_done = bytes_before + rows_done * table.row_bytes
            progress(table.name, rows_done, len(rows), bytes_done)

    return _rows_sha256(rows, table.row_bytes, report)


def _rows_sha256(
    rows: NDArray[np.uint8], row_bytes: int, report: Callable[[int], None] = lambda rows_done: None
) -> str:
    """Returns the hexadecimal sha256 of ``rows``, and reports the rows done after each block."""
    digest = hashlib.sha256()
    step = max(1, BLOCK_BYTES // row_bytes)
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        digest.update(block.data)
        report(start + len(block))
    return digest.hexdigest()
