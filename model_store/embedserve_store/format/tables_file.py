"""tables.safetensors: every table's rows in one file, read as a mapping.

The data starts on a page, and tables come in the order of the largest power of two that divides
their bytes, so that a table of whole cache lines stays on cache lines. Who reads never holds a
whole table in private memory; publishing/tables_writer.py writes the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import StoreError
from embedserve_store.format.safetensors_file import encode_header, map_tensors
from embedserve_store.format.table_spec import TableSpec

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
        columns = table.stored_dim if table.dtype.startswith("float") else table.row_bytes
        entries[table.name] = {
            "dtype": _TENSOR_DTYPES[table.dtype],
            "shape": [table.num_embeddings, columns],
            "data_offsets": [offset, offset + table.nbytes],
        }
        offset += table.nbytes
    return entries


@dataclass(frozen=True)
class FileState:
    """What changes when a file is written to."""

    inode: tuple[int, int]
    nbytes: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path) -> FileState | None:
        """Of the file at ``path``; None where there is none."""
        try:
            found = path.stat()
        except OSError:
            return None
        return cls((found.st_dev, found.st_ino), found.st_size, found.st_mtime_ns)


@dataclass(frozen=True)
class TablesFile:
    """A mapped tables.safetensors whose header says what the manifest says."""

    path: Path
    data: NDArray[np.uint8]
    """The whole data section, mapped read-only, beginning on a page."""
    offsets: Mapping[str, int]
    """Where each table begins in ``data``."""
    tables: Mapping[str, TableSpec]
    opened: FileState | None = None
    """The file as it was when it was mapped; None once the rows are read from elsewhere."""

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
            opened=FileState.of(path),
        )

    @property
    def is_mapped(self) -> bool:
        """Whether ``data`` is the file's, and no copy."""
        return self.opened is not None

    def check_unchanged(self) -> None:
        """Raises StoreError where the mapped file was changed in place.

        What was cut off ends a process that reads it, with SIGBUS; what was written over is
        served. Another file of the same name changes nothing.
        """
        now = FileState.of(self.path)
        if self.opened is None or now is None or now.inode != self.opened.inode:
            return
        if now != self.opened:
            what = "it was written over"
            if now.nbytes != self.opened.nbytes:
                what = f"it has {now.nbytes} bytes, {self.opened.nbytes} were opened"
            raise StoreError(f"{self.path}: changed in place since it was opened: {what}")

    def rows(self, name: str) -> NDArray[np.uint8]:
        """A table's stored rows [num_embeddings, row_bytes], a view of the mapping."""
        table = self.tables[name]
        start = self.offsets[name]
        return self.data[start : start + table.nbytes].reshape(-1, table.row_bytes)
