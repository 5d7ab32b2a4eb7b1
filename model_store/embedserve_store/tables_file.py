"""tables.safetensors: every table's rows in one file, written as a stream and read as a mapping.

The data starts on a page, and tables come in the order of the largest power of two that divides
their bytes, so that a table of whole cache lines stays on cache lines. Neither writer nor reader
ever holds a whole table in private memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from embedserve_store.direct_file import Writer, new_file
from embedserve_store.safetensors_file import encode_header, map_tensors
from embedserve_store.table_spec import TableSpec

BLOCK_BYTES = 8 << 20
"""Rows are read, encoded and written in blocks of about this size."""

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
    return encode_header(_entries(tables))


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
    header = header_bytes(tables)
    with new_file(path, len(header) + sum(table.nbytes for table in tables)) as file:
        file.write(header)
        for table in file_order(tables):
            blocks = encoded_blocks(table)
            checksums[table.name] = _write_table(file, table, blocks, bytes_done, progress)
            bytes_done += table.nbytes
    return checksums


def _write_table(
    file: Writer,
    table: TableSpec,
    blocks: Iterable[NDArray[np.uint8]],
    bytes_before: int,
    progress: Progress | None,
) -> str:
    """Hashes a block in a thread while the next is read and encoded, and written in another.

    A block is done before the one after the next is asked for, so three exist at most.
    """
    digest = hashlib.sha256()
    rows_done = 0
    before: tuple[Future[Any], ...] = ()
    with ThreadPoolExecutor(1) as writer, ThreadPoolExecutor(1) as hasher:
        for block in blocks:
            for future in before:
                future.result()
            data = np.ascontiguousarray(block).data
            before = writer.submit(file.write, data), hasher.submit(digest.update, data)
            rows_done += len(block)
            if progress:
                bytes_done = bytes_before + rows_done * table.row_bytes
                progress(table.name, rows_done, table.num_embeddings, bytes_done)
        for future in before:
            future.result()
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
    def open(
        cls, path: Path, tables: tuple[TableSpec, ...], *, few_reads: bool = False
    ) -> TablesFile:
        """Maps ``path`` without reading a table byte: the time does not grow with the tables.

        Args:
            few_reads: only a few scattered rows will be asked for, so that reading ahead from
                disk (megabytes a row, on some) would take longer than it saves.

        Raises:
            StoreError: missing, truncated, or not the file of ``tables``.
        """
        entries = _entries(tables)
        return cls(
            path=path,
            data=map_tensors(path, entries, few_reads=few_reads),
            offsets={name: entry["data_offsets"][0] for name, entry in entries.items()},
            tables={table.name: table for table in tables},
        )

    def rows(self, name: str) -> NDArray[np.uint8]:
        """A table's stored rows [num_embeddings, row_bytes], a view of the mapping."""
        table = self.tables[name]
        start = self.offsets[name]
        return self.data[start : start + table.nbytes].reshape(-1, table.row_bytes)
