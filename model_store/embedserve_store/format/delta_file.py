"""Encodes and decodes a delta's files of rows.

A file is a safetensors file with two tensors for each table: TABLE.rows, int64 row numbers [n], and
TABLE.values, the stored bytes [n, row_bytes] in the layout of row_layout.py. All rows are whole and
absolute, so that applying a delta twice changes nothing. Never imports torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import StoreError
from embedserve_store.format.delta_manifest import DeltaFile
from embedserve_store.format.manifest_checksum import check_sha256
from embedserve_store.format.row_layout import unstorable_rows
from embedserve_store.format.safetensors_file import (
    Tensors,
    consecutive,
    content_of,
    data_bytes,
    encode_header,
)
from embedserve_store.format.table_spec import TableSpec

FILE_VALUES_BYTES = 32 << 20
"""Approximate bytes of values after which a writer begins a new file; 32 MiB."""


@dataclass(frozen=True)
class ChangedRows:
    """Changed rows of a table."""

    table: TableSpec
    numbers: NDArray[np.int64]
    """Row numbers [n], ascending."""
    values: NDArray[np.uint8]
    """Stored bytes [n, row_bytes]."""

    def write_to(self, rows: NDArray[np.uint8], places: NDArray[np.integer]) -> None:
        """Writes the values of row ``numbers[i]`` to ``rows[places[i]]``."""
        rows[places] = self.values


def split(changes: Mapping[str, ChangedRows]) -> Iterator[list[ChangedRows]]:
    """Yields the rows of each file of a delta: at most FILE_VALUES_BYTES of values, or one row."""
    in_file: list[ChangedRows] = []
    file_bytes = 0
    for change in changes.values():
        step = max(1, FILE_VALUES_BYTES // change.table.row_bytes)
        for start in range(0, len(change.numbers), step):
            stop = start + step
            piece = ChangedRows(change.table, change.numbers[start:stop], change.values[start:stop])
            if in_file and file_bytes + piece.values.nbytes > FILE_VALUES_BYTES:
                yield in_file
                in_file, file_bytes = [], 0
            in_file.append(piece)
            file_bytes += piece.values.nbytes
    if in_file:
        yield in_file


def encode(changes: list[ChangedRows], name: str) -> tuple[DeltaFile, bytes]:
    """Returns the description of a file with the rows of ``changes``, and its bytes."""
    rows = {change.table.name: len(change.numbers) for change in changes}
    pieces = [encode_header(_tensors_of(changes))]
    pieces += [np.ascontiguousarray(change.numbers, "<i8").tobytes() for change in changes]
    pieces += [np.ascontiguousarray(change.values).tobytes() for change in changes]
    data = b"".join(pieces)
    return DeltaFile(name, len(data), hashlib.sha256(data).hexdigest(), rows), data


def encoded_bytes(changes: list[ChangedRows]) -> int:
    """Returns the bytes of the file that ``encode`` makes of ``changes``."""
    tensors = _tensors_of(changes)
    return len(encode_header(tensors)) + data_bytes(tensors)


def check_bytes(data: bytes, file: DeltaFile, where: str) -> None:
    """Raises StoreError unless ``data`` has the size and checksum of ``file``."""
    if len(data) != file.nbytes:
        raise StoreError(f"{where}: {len(data)} bytes, the manifest has {file.nbytes}")
    check_sha256(hashlib.sha256(data).hexdigest(), file.sha256, where)


def decode(
    data: bytes, file: DeltaFile, tables: Mapping[str, TableSpec], where: str
) -> list[ChangedRows]:
    """Returns the rows in the bytes of a file, as views of ``data``.

    Args:
        tables: the tables of the version, by name; each table of ``file`` is one of them.

    Raises:
        StoreError: the bytes differ from ``file``. Or a row number is outside its table or not
            above the one before. Or a row holds a value, scale or bias that is not finite.
    """
    check_bytes(data, file, where)
    tensors = _tensors(file.rows, tables)
    content = content_of(data, tensors, where)
    changes = []
    for name, count in file.rows.items():
        table = tables[name]
        start, stop = tensors[f"{name}.rows"]["data_offsets"]
        numbers = content[start:stop].view("<i8")
        start, stop = tensors[f"{name}.values"]["data_offsets"]
        values = content[start:stop].reshape(count, table.row_bytes)
        check_rows(table, numbers, values, where)
        changes.append(ChangedRows(table, numbers, values))
    return changes


def repeated_row(*numbers: NDArray[np.int64]) -> int | None:
    """Returns the lowest row that occurs more than once in ``numbers``; None if there is none."""
    ordered = np.sort(np.concatenate(numbers)) if numbers else np.zeros(0, np.int64)
    twice = np.flatnonzero(np.diff(ordered) == 0)
    return int(ordered[twice[0]]) if len(twice) else None


def check_rows(
    table: TableSpec, numbers: NDArray[np.int64], values: NDArray[np.uint8], where: str
) -> None:
    """Raises StoreError unless ``numbers`` ascend within the table and ``values`` are finite."""
    where = f"{where}: table {table.name!r}"
    outside = np.flatnonzero((numbers < 0) | (numbers >= table.num_embeddings))
    if len(outside):
        raise StoreError(
            f"{where}: rows[{outside[0]}] is {numbers[outside[0]]}, the table has "
            f"{table.num_embeddings} rows"
        )
    falling = np.flatnonzero(np.diff(numbers) <= 0)
    if len(falling):
        at = falling[0]
        raise StoreError(
            f"{where}: rows[{at + 1}] is {numbers[at + 1]} after {numbers[at]}: row numbers "
            "ascend, and none occurs twice"
        )
    broken = unstorable_rows(values, table.dtype)
    if len(broken):
        raise StoreError(
            f"{where}: row {numbers[broken[0]]} holds a value that is not finite, or too large for "
            f"{table.dtype}"
        )


def _tensors_of(changes: list[ChangedRows]) -> Tensors:
    rows = {change.table.name: len(change.numbers) for change in changes}
    return _tensors(rows, {change.table.name: change.table for change in changes})


def _tensors(rows: Mapping[str, int], tables: Mapping[str, TableSpec]) -> Tensors:
    """Returns the header of a file: all row numbers come first, so that they are aligned."""
    numbers = ((f"{name}.rows", "I64", [count]) for name, count in rows.items())
    values = (
        (f"{name}.values", "U8", [count, tables[name].row_bytes]) for name, count in rows.items()
    )
    return consecutive((*numbers, *values))
