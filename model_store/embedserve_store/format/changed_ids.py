"""Encodes and decodes a delta's files of ids: changes of the vocabularies.

A file is a safetensors file with three tensors for each table: TABLE.ids and TABLE.id_rows, int64
[n], the ids that have a row from now on, and these rows; TABLE.removed, int64 [m], the ids that
have none any more. Strings are their hashes. As rows, ids are absolute: applying a delta twice
changes nothing. Never imports torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import StoreError
from embedserve_store.format.delta_file import FILE_VALUES_BYTES, check_bytes, repeated_row
from embedserve_store.format.delta_manifest import DeltaFile, IdCounts
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.safetensors_file import (
    ITEM_BYTES,
    Tensors,
    consecutive,
    content_of,
    data_bytes,
    encode_header,
)
from embedserve_store.format.table_spec import TableSpec

REMOVED = -1
"""Row of an id that has been removed."""
AS_PUBLISHED = -2
"""Row of an id that is in the vocabulary, or is not, as it was published; only in memory."""
_FILE_IDS = FILE_VALUES_BYTES // (2 * ITEM_BYTES["I64"])


@dataclass(frozen=True)
class ChangedIds:
    """Changes of a table's vocabulary."""

    table: TableSpec
    ids: NDArray[np.int64]
    """Ids [n], ascending, none twice; strings are their hashes."""
    rows: NDArray[np.int64]
    """Rows [n] of the ids; REMOVED for an id that is removed."""

    def __len__(self) -> int:
        return len(self.ids)

    def rows_of(
        self, ids: NDArray[np.int64], otherwise: NDArray[np.int64] | int
    ) -> NDArray[np.int64]:
        """Returns the rows [n] of ``ids`` [n]; ``otherwise`` [n] for ids that have not changed."""
        if not len(self.ids):
            return np.broadcast_to(np.int64(otherwise), ids.shape).copy()
        at = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[at] == ids, self.rows[at], otherwise)

    def then(self, later: ChangedIds) -> ChangedIds:
        """Returns these changes, followed by those of a later delta."""
        ids = np.union1d(self.ids, later.ids)
        return ChangedIds(self.table, ids, later.rows_of(ids, self.rows_of(ids, REMOVED)))


def no_ids(table: TableSpec) -> ChangedIds:
    """Returns changes of ``table`` without any id."""
    return ChangedIds(table, np.zeros(0, np.int64), np.zeros(0, np.int64))


def removed_ids(table: TableSpec, ids: NDArray[np.int64]) -> ChangedIds:
    """Returns changes of ``table`` that remove ``ids`` [n]."""
    return ChangedIds(table, ids, np.full(len(ids), REMOVED, np.int64))


def compose_ids(changes: Iterable[Mapping[str, ChangedIds]]) -> dict[str, ChangedIds]:
    """Returns changes that follow one another as one, by table: of an id the last change counts."""
    joined: dict[str, ChangedIds] = {}
    for one in changes:
        for name, change in one.items():
            joined[name] = joined[name].then(change) if name in joined else change
    return joined


def unite_ids(changes: Sequence[ChangedIds]) -> ChangedIds:
    """Returns changes of one table and one delta, which have no id in common, as one. The ids of
    each may be in any order."""
    ids = np.concatenate([change.ids for change in changes])
    order = np.argsort(ids)
    rows = np.concatenate([change.rows for change in changes])
    return ChangedIds(changes[0].table, ids[order], rows[order])


def split_ids(changes: Sequence[ChangedIds]) -> Iterator[list[ChangedIds]]:
    """Yields the changes of each file of a delta, at most FILE_VALUES_BYTES in a file."""
    in_file: list[ChangedIds] = []
    room = _FILE_IDS
    for change in changes:
        start = 0
        while start < len(change):
            piece = slice(start, start + room)
            in_file.append(replace(change, ids=change.ids[piece], rows=change.rows[piece]))
            start += len(in_file[-1])
            room -= len(in_file[-1])
            if not room:
                yield in_file
                in_file, room = [], _FILE_IDS
    if in_file:
        yield in_file


def encode_ids(changes: Sequence[ChangedIds], name: str) -> tuple[DeltaFile, bytes]:
    """Returns the description of a file with ``changes``, and its bytes."""
    counts = _counts(changes)
    tensors: list[NDArray[np.int64]] = []
    for change in changes:
        is_removed = change.rows == REMOVED
        tensors += change.ids[~is_removed], change.rows[~is_removed], change.ids[is_removed]
    pieces = [np.ascontiguousarray(tensor, "<i8").tobytes() for tensor in tensors]
    data = b"".join([encode_header(_tensors(counts)), *pieces])
    return DeltaFile(name, len(data), hashlib.sha256(data).hexdigest(), {}, counts), data


def encoded_id_bytes(changes: Sequence[ChangedIds]) -> int:
    """Returns the bytes of the file that ``encode_ids`` makes of ``changes``."""
    tensors = _tensors(_counts(changes))
    return len(encode_header(tensors)) + data_bytes(tensors)


def decode_ids(
    data: bytes, file: DeltaFile, tables: Mapping[str, TableSpec], where: str
) -> list[ChangedIds]:
    """Returns the changes in the bytes of a file.

    Args:
        tables: the tables of the version, by name; each table of ``file`` is one of them.

    Raises:
        StoreError: the bytes differ from ``file``. Or a row is outside its table. Or ids are not
            ascending, or an id is both there and removed.
    """
    check_bytes(data, file, where)
    tensors = _tensors(file.ids)
    content = content_of(data, tensors, where)
    changes = []
    for name in file.ids:
        ids, rows, removed = (
            content[start:stop].view("<i8")
            for start, stop in (
                tensors[f"{name}.{kind}"]["data_offsets"] for kind in ("ids", "id_rows", "removed")
            )
        )
        check_ids(tables[name], ids, rows, removed, where)
        there = ChangedIds(tables[name], ids, rows)
        changes.append(unite_ids([there, removed_ids(tables[name], removed)]))
    return changes


def check_ids(
    table: TableSpec,
    ids: NDArray[np.int64],
    rows: NDArray[np.int64],
    removed: NDArray[np.int64],
    where: str,
) -> None:
    """Raises StoreError unless ``ids`` and ``removed`` ascend and have no id in common, and
    ``rows`` are rows of the table."""
    where = f"{where}: table {table.name!r}"
    for what, numbers in (("ids", ids), ("removed", removed)):
        falling = np.flatnonzero(numbers[1:] <= numbers[:-1])
        if len(falling):
            at = falling[0]
            raise StoreError(
                f"{where}: {what}[{at + 1}] is {numbers[at + 1]} after {numbers[at]}: ids ascend, "
                "and none occurs twice"
            )
    outside = np.flatnonzero((rows < 0) | (rows >= table.num_embeddings))
    if len(outside):
        raise StoreError(
            f"{where}: id_rows[{outside[0]}] is {rows[outside[0]]}, the table has "
            f"{table.num_embeddings} rows"
        )
    if (both := repeated_row(ids, removed)) is not None:
        raise StoreError(f"{where}: id {both} has a row, and is removed")


def check_same_ids(changes: Mapping[str, ChangedIds], base: Manifest, where: str) -> None:
    """Raises StoreError unless tables that share a feature have the same changes: they have one
    vocabulary.

    Args:
        changes: changes of a delta, by table.
    """
    for group in base.table_groups:
        first, *others = (changes.get(table.name, no_ids(table)) for table in group)
        for other in others:
            is_same = np.array_equal(first.ids, other.ids)
            if not is_same or not np.array_equal(first.rows, other.rows):
                raise StoreError(
                    f"{where}: tables {first.table.name!r} and {other.table.name!r} share "
                    "features, but their ids change differently"
                )


def _counts(changes: Sequence[ChangedIds]) -> dict[str, IdCounts]:
    removed = {one.table.name: int(np.count_nonzero(one.rows == REMOVED)) for one in changes}
    return {
        one.table.name: IdCounts(len(one) - removed[one.table.name], removed[one.table.name])
        for one in changes
    }


def _tensors(counts: Mapping[str, IdCounts]) -> Tensors:
    """Returns the header of a file."""
    return consecutive(
        (f"{name}.{kind}", "I64", [count])
        for name, one in counts.items()
        for kind, count in (("ids", one.new), ("id_rows", one.new), ("removed", one.removed))
    )
