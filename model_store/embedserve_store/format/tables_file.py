"""Defines and maps tables.safetensors, which holds the rows of every table.

The data starts on a page. Tables are sorted by the largest power of two that divides their bytes,
so a table of whole cache lines is aligned to cache lines. Readers never hold a whole table in
private memory. publishing/tables_writer.py writes the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import StoreError
from embedserve_store.format.safetensors_file import (
    ITEM_BYTES,
    consecutive,
    encode_header,
    map_tensors,
)
from embedserve_store.format.table_spec import TableSpec

BLOCK_BYTES = 8 << 20
"""Approximate bytes of a block in which rows are read, encoded and written; 8 MiB."""

_TENSOR_DTYPES = {"float32": "F32", "float16": "F16", "int8": "U8", "int4": "U8"}


class Progress(Protocol):
    """Callback that reports progress while rows are written, copied, compared or verified."""

    def __call__(self, table: str, rows_done: int, rows_total: int, bytes_done: int) -> None:
        """Reports the rows of ``table`` that are done, and the stored bytes of all tables so far.

        Tables are reported one after the other.
        """


def file_order(tables: Iterable[TableSpec]) -> list[TableSpec]:
    """Returns the tables in the order of the file. Tables with equal powers keep their order."""
    return sorted(tables, key=lambda table: -(table.nbytes & -table.nbytes))


def header_bytes(tables: tuple[TableSpec, ...]) -> bytes:
    """Returns the bytes of the file before the data, a whole number of pages."""
    return encode_header(_entries(tables))


def tables_file_bytes(tables: tuple[TableSpec, ...]) -> int:
    """Returns the bytes of tables.safetensors for ``tables``."""
    return len(header_bytes(tables)) + sum(table.nbytes for table in tables)


def _entries(tables: tuple[TableSpec, ...]) -> dict[str, Any]:
    entries = []
    for table in file_order(tables):
        dtype = _TENSOR_DTYPES[table.dtype]
        columns = table.row_bytes // ITEM_BYTES[dtype]
        entries.append((table.name, dtype, [table.num_embeddings, columns]))
    return consecutive(entries)


@dataclass(frozen=True)
class FileState:
    """File status that changes when the file is written to."""

    inode: tuple[int, int]
    nbytes: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path) -> FileState | None:
        """Returns the state of the file at ``path``; None if it cannot be read."""
        try:
            found = path.stat()
        except OSError:
            return None
        return cls((found.st_dev, found.st_ino), found.st_size, found.st_mtime_ns)


@dataclass(frozen=True)
class TablesFile:
    """A mapped tables.safetensors whose header matches the manifest."""

    path: Path
    data: NDArray[np.uint8]
    """Mapping of the tables, read-only, starting at a page: the whole data section. A server of
    deltas maps each table by itself, with memory for changed rows behind it."""
    offsets: Mapping[str, int]
    """Offset of each table in ``data``, in bytes."""
    tables: Mapping[str, TableSpec]
    opened: FileState | None = None
    """State of the file when it was mapped; None if ``data`` is a copy."""
    file_offsets: Mapping[str, int] | None = None
    """Offset of each table from the beginning of the file, if the file has more rows than these
    tables: for a part of a version. None if the tables are the whole file."""

    @classmethod
    def open(
        cls, path: Path, tables: tuple[TableSpec, ...], *, few_reads: bool = False
    ) -> TablesFile:
        """Maps ``path`` without reading a table, so the time does not grow with the tables.

        Args:
            few_reads: whether only a few scattered rows will be read. Read-ahead, which reads
                megabytes per row on some disks, would then take longer than it saves.

        Raises:
            StoreError: the file is missing or truncated, or does not match ``tables``.
        """
        entries = _entries(tables)
        return cls(
            path=path,
            data=map_tensors(path, entries, few_reads=few_reads),
            offsets={name: entry["data_offsets"][0] for name, entry in entries.items()},
            tables={table.name: table for table in tables},
            opened=FileState.of(path),
        )

    @classmethod
    def open_ranges(
        cls,
        path: Path,
        tables: tuple[TableSpec, ...],
        ranges: tuple[TableSpec, ...],
        first_rows: Mapping[str, int],
    ) -> TablesFile:
        """Maps ``path`` as ``open`` does, for a range of the rows of some tables.

        Args:
            tables: tables of the whole file.
            ranges: tables with the rows of their ranges only.
            first_rows: first row of each range by table.

        Raises:
            StoreError: as ``open``.
        """
        whole = cls.open(path, tables)
        offsets = {
            table.name: whole.offsets[table.name] + first_rows[table.name] * table.row_bytes
            for table in ranges
        }
        offsets = dict(sorted(offsets.items(), key=lambda item: item[1]))
        header = len(header_bytes(tables))
        return replace(
            whole,
            offsets=offsets,
            tables={table.name: table for table in ranges},
            file_offsets={name: header + offset for name, offset in offsets.items()},
        )

    @classmethod
    def without_rows(cls, path: Path) -> TablesFile:
        """Returns tables without any rows, for a process that holds none. Opens no file."""
        return cls(path, np.zeros(0, np.uint8), {}, {})

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the tables, which for a part are fewer than those of the file."""
        return sum(table.nbytes for table in self.tables.values())

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Returns the ranges of ``data`` that have rows of the tables, as start and stop.

        Ranges that touch are joined. The range of a whole file is all of ``data``.
        """
        if self.file_offsets is None:
            return [(0, self.data.nbytes)]
        joined: list[tuple[int, int]] = []
        for name, start in sorted(self.offsets.items(), key=lambda item: item[1]):
            stop = start + self.tables[name].nbytes
            if joined and joined[-1][1] == start:
                start = joined.pop()[0]
            joined.append((start, stop))
        return joined

    @property
    def is_mapped(self) -> bool:
        """Returns whether ``data`` is a mapping of the file, not a copy."""
        return self.opened is not None

    def check_unchanged(self) -> None:
        """Raises StoreError if the mapped file was changed in place.

        A process that reads a truncated range dies with SIGBUS, and overwritten rows are served.
        Replacing the file by another of the same name is harmless and not an error.
        """
        now = FileState.of(self.path)
        if self.opened is None or now is None or now.inode != self.opened.inode:
            return
        if now != self.opened:
            what = "it was written over"
            if now.nbytes != self.opened.nbytes:
                what = f"it has {now.nbytes} bytes, {self.opened.nbytes} were opened"
            raise StoreError(f"{self.path}: changed in place since it was opened: {what}")

    def blocks(self, name: str) -> Iterator[NDArray[np.uint8]]:
        """Yields a table's stored rows from the first to the last, in blocks of BLOCK_BYTES."""
        rows, step = self.rows(name), max(1, BLOCK_BYTES // self.tables[name].row_bytes)
        return (rows[start : start + step] for start in range(0, len(rows), step))

    def rows(self, name: str) -> NDArray[np.uint8]:
        """Returns a table's stored rows, uint8 [num_embeddings, row_bytes], a view of ``data``."""
        table = self.tables[name]
        start = self.offsets[name]
        return self.data[start : start + table.nbytes].reshape(-1, table.row_bytes)
