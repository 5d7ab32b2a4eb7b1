"""Merges the changed rows of several deltas: the last value of each row counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embedserve_store.format.delta_file import ChangedRows
from embedserve_store.format.table_spec import TableSpec

DENSE = 8
"""Rows of a table per changed row, up to which changes are merged in an array of all rows; it is
seven times as fast as sorting where all rows change."""


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


TableRows = ChangedRows | MergedRows
"""Changed rows of one table, each once."""


def merged(changes: Sequence[ChangedRows]) -> list[TableRows]:
    """Returns one element for each table of ``changes``; of a row's values the last one stays."""
    by_table: dict[str, list[ChangedRows]] = {}
    for change in changes:
        by_table.setdefault(change.table.name, []).append(change)
    return [own[0] if len(own) == 1 else _last_values(own) for own in by_table.values()]


def _last_values(changes: Sequence[ChangedRows]) -> MergedRows:
    table = changes[0].table
    joined = np.concatenate([one.numbers for one in changes])
    if table.num_embeddings <= DENSE * len(joined):
        positions = np.full(table.num_embeddings, -1)
        positions[joined] = np.arange(len(joined))  # of equal indices the last one counts
        numbers = np.flatnonzero(positions >= 0)
        last = positions[numbers]
    else:
        # Is reversed, since np.unique returns the first position of a row.
        numbers, last = np.unique(joined[::-1], return_index=True)
        last = len(joined) - 1 - last
    return MergedRows(table, numbers, [*_pieces(changes, last)])


def _pieces(
    changes: Sequence[ChangedRows], last: NDArray[np.int64]
) -> Iterator[tuple[ChangedRows, NDArray[np.int64], NDArray[np.int64]]]:
    """Yields the pieces of MergedRows.

    Args:
        last: position of the last value of each row among the values of all ``changes``.
    """
    start = 0
    for change in changes:
        end = start + len(change.numbers)
        positions = np.flatnonzero((last >= start) & (last < end))
        if len(positions):
            yield change, positions, last[positions] - start
        start = end
