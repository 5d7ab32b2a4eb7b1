"""Groups of tables with common row numbers, and the numbers of their spare rows.

A feature of several tables gives the kernels one row number for all of them. Tables that share
features, directly or through other tables, are therefore a group with common row numbers: a spare
row is a row of each table of the group, and a row that changes in one table is copied in the
others. All spare rows of a version are numbered from 1, group by group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from embedserve.deltas.map_tables import FileRange
from embedserve_store.format.table_spec import TableSpec

NUMBER_MAX = 2**32 - 1
"""Maximum seq, view and number of a spare row: each is a uint32."""
BYTES_PER_SPARE = 8
SPARES_PER_ROW = 4
"""Spare rows for each row of a table, if the memory allows as many; those for an undo are added. A
changed row takes one, and another at each further change until no lookup reads the earlier one."""
RANKS_MAX = 4096
"""Maximum number of ranks of a row_wise table whose rows can change."""
_GAP_ROWS = RANKS_MAX
"""Rows between a table and its spare rows. Kernels number rows as if each rank had as many as the
first: their numbers reach fewer than RANKS_MAX rows past the last row."""

Numbers = NDArray[np.uint32]
"""Numbers of spare rows."""


@dataclass(frozen=True)
class RowGroup:
    """A group of tables, or the table of the entries of changed ids, and its spare rows.

    Attributes:
        row_start: number of rows of the groups before.
        row_count: rows of the largest table.
        start: number of the first spare row.
        count: number of spare rows.
        first_row: row number, as kernels count them, of the first spare row.
    """

    tables: tuple[TableSpec, ...]
    row_start: int
    row_count: int
    start: int
    count: int
    first_row: int

    @property
    def spare_bytes(self) -> int:
        """Returns the bytes that a spare row takes, with its row of each table."""
        return _spare_bytes(self.tables)

    @property
    def features(self) -> set[str]:
        """Returns the features that are looked up in the tables."""
        return {feature for table in self.tables for feature in table.feature_names}

    @property
    def names(self) -> str:
        """Returns the names of the tables, for errors."""
        names = [repr(table.name) for table in self.tables]
        return f"table {names[0]}" if len(names) == 1 else f"tables {', '.join(names)}"


@dataclass
class FreeSpares:
    """Spare rows of a group that can be written to."""

    group: RowGroup
    index: int
    """Position of the group in ``LiveRows.groups`` and ``LiveRows.peaks``."""
    numbers: list[Numbers] = field(default_factory=list)
    """Numbers of spare rows that were used before."""

    @property
    def count(self) -> int:
        """Returns the number of spare rows that were used before."""
        return sum(map(len, self.numbers))

    def take(self, count: int, peaks: NDArray[np.uint64]) -> Numbers:
        """Returns the numbers of ``count`` spare rows, first those that were used before.

        Args:
            peaks: ``LiveRows.peaks``, which counts those that were not.
        """
        used: Numbers = np.concatenate([*self.numbers, np.zeros(0, np.uint32)])
        taken, rest = used[:count], used[count:]
        self.numbers = [rest]
        missing = count - len(taken)
        peak = int(peaks[self.index])
        peaks[self.index] = peak + missing
        first = self.group.start + peak
        return np.concatenate([taken, np.arange(first, first + missing, dtype=np.uint32)])


def lay_out_groups(
    groups: Sequence[tuple[TableSpec, ...]],
    memory_max: int,
    undo: int,
    ranges: Mapping[str, FileRange],
) -> list[RowGroup]:
    """Returns the groups with their spare rows, which begin where all tables of a group have room.

    Entries of ids, which have no range of a file, get no row numbers of kernels.

    Args:
        groups: tables of each group.
        memory_max: bytes that changed rows may take.
        undo: number of steps whose former rows are kept.
        ranges: range of each table in its file.
    """
    found: list[RowGroup] = []
    row_start, start = 0, 1
    for tables, count in zip(groups, _spare_counts(groups, memory_max, undo), strict=True):
        in_file = [_rows_of_file(one, ranges[one.name]) for one in tables if one.name in ranges]
        first_row = max(in_file, default=0) + _GAP_ROWS
        found.append(RowGroup(tables, row_start, _row_count(tables), start, count, first_row))
        row_start += _row_count(tables)
        start += count
    return found


def _spare_bytes(tables: Sequence[TableSpec]) -> int:
    return sum(table.row_bytes for table in tables) + BYTES_PER_SPARE


def _row_count(tables: Sequence[TableSpec]) -> int:
    return max(table.num_embeddings for table in tables)


def _spare_counts(groups: Sequence[Sequence[TableSpec]], memory_max: int, undo: int) -> list[int]:
    """Returns the number of spare rows of each group, which take memory only once they are used.

    Spare rows for undos are fewer where not all could be numbered.
    """
    least, most = (
        [min(memory_max // _spare_bytes(one), per_row * _row_count(one)) for one in groups]
        for per_row in (SPARES_PER_ROW, SPARES_PER_ROW + undo)
    )
    left, more = NUMBER_MAX - 1 - sum(least), sum(most) - sum(least)
    share = max(0.0, min(1.0, left / more)) if more else 0.0
    return [one + int(share * (high - one)) for one, high in zip(least, most, strict=True)]


def _rows_of_file(table: TableSpec, own: FileRange) -> int:
    """Returns the number of rows of a table that begin in the mapped pages of its file. The last
    of them may lie in part behind the pages."""
    return -(-(own.mapped - own.before) // table.row_bytes)
