"""tables.safetensors: every table's rows in one file, written as a stream and read as a mapping.

A safetensors file is an 8-byte length, a JSON header and the tensors' bytes without holes. The
header is padded with spaces so that the data starts on a page, and tables come in the order of
the largest power of two that divides their bytes, so that a table of whole cache lines stays
on cache lines. Neither writer nor reader ever holds a whole table in private memory.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import StoreError
from embedserve_store.manifest import TableSpec

PAGE_BYTES = 4096
BLOCK_BYTES = 8 << 20
"""Rows are read, encoded and written in blocks of about this size."""
HEADER_BYTES_MAX = 100 << 20
"""The limit of the safetensors library."""

_LENGTH_BYTES = 8
_TENSOR_DTYPES = {"float32": "F32", "float16": "F16", "int8": "U8", "int4": "U8"}


class Progress(Protocol):
    """Called as rows are written or verified, table by table."""

    def __call__(self, table: str, rows_done: int, rows_total: int, bytes_done: int) -> None:
        """``bytes_done`` counts stored bytes over all tables so far."""


def file_order(tables: Iterable[TableSpec]) -> list[TableSpec]:
    """Tables as they follow one another in the file; equal powers of two keep their order."""
    return sorted(tables, key=lambda table: -(table.nbytes & -table.nbytes))


def header_bytes(tables: tuple[TableSpec, ...]) -> bytes:
    """Everything in front of the data, a whole number of pages."""
    text = json.dumps(_entries(tables), separators=(",", ":")).encode()
    padding = -(_LENGTH_BYTES + len(text)) % PAGE_BYTES
    text += b" " * padding
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _entries(tables: tuple[TableSpec, ...]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    offset = 0
    for table in file_order(tables):
        columns = table.embedding_dim if table.dtype.startswith("float") else table.row_bytes
        entries[table.name] = {
            "dtype": _TENSOR_DTYPES[table.dtype],
            "shape": [table.num_embeddings, columns],
            "data_offsets": [offset, offset + table.nbytes],
        }
        offset += table.nbytes
    return entries


def write_tables(
    path: Path,
    tables: tuple[TableSpec, ...],
    encoded_blocks: Callable[[TableSpec], Iterable[NDArray[np.uint8]]],
    progress: Progress | None = None,
) -> dict[str, str]:
    """Writes ``path`` and syncs it to disk; returns each table's sha256.

    Args:
        encoded_blocks: gives the stored bytes of a table from its first row to its last,
            in blocks [n, row_bytes].

    Raises:
        OSError: as the file system says, for instance when the disk is full.
    """
    checksums = {}
    bytes_done = 0
    with open(path, "xb") as file:
        file.write(header_bytes(tables))
        for table in file_order(tables):
            blocks = encoded_blocks(table)
            checksums[table.name] = _write_table(file, table, blocks, bytes_done, progress)
            bytes_done += table.nbytes
        file.flush()
        os.fsync(file.fileno())
    return checksums


def _write_table(
    file: IO[bytes],
    table: TableSpec,
    blocks: Iterable[NDArray[np.uint8]],
    bytes_before: int,
    progress: Progress | None,
) -> str:
    digest = hashlib.sha256()
    rows_done = 0
    for block in blocks:
        contiguous = np.ascontiguousarray(block)
        file.write(contiguous.data)
        digest.update(contiguous.data)
        rows_done += len(block)
        if progress:
            bytes_done = bytes_before + rows_done * table.row_bytes
            progress(table.name, rows_done, table.num_embeddings, bytes_done)
    return digest.hexdigest()


@dataclass(frozen=True)
class TablesFile:
    """A mapped tables.safetensors whose header says what the manifest says."""

    path: Path
    data: NDArray[np.uint8]
    """The whole data section, mapped read-only, beginning on a page."""
    offsets: Mapping[str, int]
    """Where each table begins in ``data``."""
    tables: Mapping[str, TableSpec]

    @classmethod
    def open(cls, path: Path, tables: tuple[TableSpec, ...]) -> TablesFile:
        """Maps ``path`` without reading a table byte: the time does not grow with the tables.

        Raises:
            StoreError: missing, truncated, or not the file of ``tables``.
        """
        try:
            with open(path, "rb") as file:
                return cls._map(file, path, tables)
        except OSError as error:
            raise StoreError(f"{path}: cannot be read: {error.strerror}") from error

    @classmethod
    def _map(cls, file: IO[bytes], path: Path, tables: tuple[TableSpec, ...]) -> TablesFile:
        expected = _entries(tables)
        header = _read_header(file, path)
        _check_entries(_parse_header(header, path), expected, path)
        data_start = _LENGTH_BYTES + len(header)
        if data_start % PAGE_BYTES:
            raise StoreError(f"{path}: data starts at byte {data_start}, expected a whole page")
        _check_size(file, path, data_start + sum(table.nbytes for table in tables))
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return cls(
            path=path,
            data=np.frombuffer(mapping, np.uint8, offset=data_start),
            offsets={name: entry["data_offsets"][0] for name, entry in expected.items()},
            tables={table.name: table for table in tables},
        )

    def rows(self, name: str) -> NDArray[np.uint8]:
        """A table's stored rows [num_embeddings, row_bytes], a view of the mapping."""
        table = self.tables[name]
        start = self.offsets[name]
        return self.data[start : start + table.nbytes].reshape(-1, table.row_bytes)


def _read_header(file: IO[bytes], path: Path) -> bytes:
    length = int.from_bytes(_read_exactly(file, _LENGTH_BYTES, path), "little")
    if length > HEADER_BYTES_MAX:
        raise StoreError(
            f"{path}: header length is {length} bytes, more than the limit of {HEADER_BYTES_MAX}: "
            "not a safetensors file"
        )
    return _read_exactly(file, length, path)


def _read_exactly(file: IO[bytes], count: int, path: Path) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise StoreError(f"{path}: ends within its header: truncated or half-written")
    return data


def _parse_header(header: bytes, path: Path) -> dict[str, Any]:
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}: header is not JSON: {error}") from error
    if not isinstance(entries, dict):
        raise StoreError(f"{path}: header is not a JSON object")
    return entries


def _check_entries(found: dict[str, Any], expected: dict[str, Any], path: Path) -> None:
    for name in expected:
        if name not in found:
            raise StoreError(f"{path}: table {name!r} of the manifest is not in the file")
    for name, entry in found.items():
        if name not in expected:
            raise StoreError(f"{path}: tensor {name!r} is not a table of the manifest")
        if entry != expected[name]:
            raise StoreError(
                f"{path}: table {name!r} is {entry} in the file, the manifest means "
                f"{expected[name]}"
            )


def _check_size(file: IO[bytes], path: Path, expected: int) -> None:
    size = os.fstat(file.fileno()).st_size
    if size != expected:
        problem = "truncated or half-written" if size < expected else "bytes after the last table"
        raise StoreError(f"{path}: {size} bytes, expected {expected}: {problem}")
