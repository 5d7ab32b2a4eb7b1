"""Merges the changed rows of several deltas: the last value of each row counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embedserve_store.format.delta_file import ChangedRows
from embedserve_store.format.table_spec import TableSpec

DENSE = 8
"""If at least 1 in 8 rows of a table changes, its changes are merged through an array of all rows.
Where all rows change that is seven times as fast as sorting."""


@dataclass(frozen=True)
class MergedRows:
    """Changed rows of a table, each once. Their values stay in the changes that they come from,
    because a copy of all would take longer than to write them.

    Attributes:
        numbers: row numbers [n], ascending.
        pieces: for each change the positions in ``numbers`` of the rows whose values count, and the
            positions of these values in the change.
    """

    table: TableSpec
    numbers: NDArray[np.int64]
    pieces: Sequence[tuple[ChangedRows, NDArray[np.int64], NDArray[np.int64]]]

    def write_to(self, rows: NDArray[np.uint8], places: NDArray[np.integer]) -> None:
        """Writes the values of row ``numbers[i]`` to ``rows[places[i]]``."""
        for change, positions, sources in self.pieces:
            rows[places[positions]] = change.values.take(sources, axis=0)


TableChange = ChangedRows | MergedRows
"""Changed rows of one table, each once."""


def merged(changes: Sequence[ChangedRows]) -> list[TableChange]:
    """Returns one element for each table of ``changes``; of a row's values the last one stays."""
    by_table: dict[str, list[ChangedRows]] = {}
    for change in changes:
        by_table.setdefault(change.table.name, []).append(change)
    return [own[0] if len(own) == 1 else _last_values(own) for own in by_table.values()]


def _last_values(changes: Sequence[ChangedRows]) -> MergedRows:
    table = changes[0].table
    joined = np.concatenate([one.numbers for one in changes])
    numbers, positions = _unique(joined, table.num_embeddings)
    every = np.arange(len(joined))
    last = np.empty(len(numbers), np.int64)
    last[positions] = every  # of equal indices the last one counts
    return MergedRows(table, numbers, [*_pieces(changes, positions, last[positions] == every)])


def _unique(
    numbers: NDArray[np.int64], row_count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the row numbers, each once and ascending, and the position of each of ``numbers``
    among them."""
    if row_count > DENSE * len(numbers):
        return np.unique(numbers, return_inverse=True)
    is_changed = np.zeros(row_count, bool)
    is_changed[numbers] = True
    unique = np.flatnonzero(is_changed)
    position_of = np.empty(row_count, np.int64)
    position_of[unique] = np.arange(len(unique))
    return unique, position_of[numbers]


def _pieces(
    changes: Sequence[ChangedRows], positions: NDArray[np.int64], is_last: NDArray[np.bool_]
) -> Iterator[tuple[ChangedRows, NDArray[np.int64], NDArray[np.int64]]]:
    """Yields the pieces of MergedRows.

    Args:
        positions: position in MergedRows.numbers of each row of all ``changes``.
        is_last: whether the value of each of these rows counts.
    """
    start = 0
    for change in changes:
        end = start + len(change.numbers)
        sources = np.flatnonzero(is_last[start:end])
        if len(sources):
            yield change, positions[start:end][sources], sources
        start = end
