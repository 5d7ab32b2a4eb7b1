"""Lays out the memory in which the changed rows of a version are shared.

Each table is followed by spare rows. A changed row is written to a spare row and is never
overwritten while a lookup may read it. All spare rows of a version are numbered from 1:

    newest[row]    number of the newest spare row of a row; 0: the row is as published
    views[spare]   view from which on a spare row counts
    before[spare]  spare row that it replaced; 0: the published row

A feature of several tables gives the kernels one row number for all of them. Tables that share
features, directly or through other tables, are therefore a group with common row numbers: a spare
row is a row of each table of the group, and a row that changes in one table is copied in the
others.

Ids of a vocabulary change in the same way: their entries (live_ids.py) are the rows of one more
table, which no kernel reads.

A view is the state of all tables after a delta. The committed view and its seq are one word, so
that one 8-byte write makes a delta visible in all tables and processes at once. Each reading
process has a cell with the oldest and the newest view that its lookups use. The writer frees only
what no cell can still reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from embedserve.deltas.live_ids import LiveIds
from embedserve.deltas.map_tables import (
    FileRange,
    make_read_only,
    map_with_room,
    replace_by_memory,
)
from embedserve.deltas.version_memory import VersionMemory
from embedserve_store.errors import StoreError
from embedserve_store.format.changed_ids import ChangedIds
from embedserve_store.format.delta_file import ChangedRows
from embedserve_store.format.delta_manifest import position_of
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.format.tables_file import Progress, TablesFile, header_bytes
from embedserve_store.memory.resident_tables import read_tables
from embedserve_store.model_version import ModelVersion

NUMBER_MAX = 2**32 - 1
"""Maximum seq, view and number of a spare row: each is a uint32."""
BYTES_PER_SPARE = 8
SPARES_PER_ROW = 4
"""Spare rows for each row of a table, if the memory allows as many; those for an undo are added. A
changed row takes one, and another at each further change until no lookup reads the earlier one."""
IDLE = 2**64 - 1
"""Value of a cell while its process reads no rows."""
RANKS_MAX = 4096
"""Maximum number of ranks of a row_wise table whose rows can change."""
_GAP_ROWS = RANKS_MAX
"""Rows between a table and its spare rows. Kernels number rows as if each rank had as many as the
first: their numbers reach fewer than RANKS_MAX rows past the last row."""
_CACHE_LINE = 8
"""Words of a cache line. Each word that processes write is alone on one."""


@dataclass(frozen=True)
class SpareRows:
    """The spare rows of a group of tables, or of the entries of changed ids. Each is a row of all
    tables of the group.

    Attributes:
        tables: the tables.
        row_start: position of the tables' row 0 in ``newest``.
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
    def nbytes_each(self) -> int:
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


Change = ChangedRows | ChangedIds


class View(NamedTuple):
    """The state of all tables after a delta.

    Attributes:
        number: number of the view, from 1 since the start of the server.
        seq: last delta in it.
    """

    number: int
    seq: int


class LiveRows:
    """Changed rows of a version, in memory that processes share.

    Attributes:
        version: the version, with spare rows behind its tables. Its plan has each row on one rank,
            the same in all tables of a group.
        start: position of the version in its line of deltas.
        memory_max: bytes that changed rows may take.
        undo: number of deltas whose former rows are kept, as far as the memory allows.
        spares: spare rows of each group of tables, then those of ``ids``.
        ids: changed ids of the vocabularies.
        rows: uint8 [count, row_bytes] for each table, by its name: the spare rows themselves.
        newest, views, before: uint32 arrays, described above.
        peaks: uint64 [groups], number of spare rows of each group that were ever used.
        uploaded: view that lookups of this process use, where they run on a device that the rows
            are copied to first; else None.
    """

    def __init__(
        self,
        version: ModelVersion,
        memory_max: int,
        readers: int,
        undo: int = 0,
        memory: VersionMemory | None = None,
        new_ids_percent: float = 0.0,
    ) -> None:
        """
        Args:
            version: a version whose tables are mapped.
            memory_max: bytes that changed rows may take.
            readers: number of processes that look rows up.
            undo: number of deltas that can be taken back at once.
            memory: memory that all processes share; with that of another process the rows are as
                that one has left them. Default: new memory for processes that are forked later.
            new_ids_percent: ids of each vocabulary that may change, in percent of its ids.

        Raises:
            StoreError: the version's deltas cannot be served.
        """
        memory = memory or VersionMemory.create()
        manifest = version.manifest
        groups = manifest.table_groups
        self.memory_max, self.undo = memory_max, undo
        vocabularies = [group for group in groups if group[0].ids.rule == "map"]
        self.ids = LiveIds(vocabularies, new_ids_percent, memory)
        all_groups = [*groups, (self.ids.entries,)]
        counts = _spare_counts(all_groups, memory_max, undo)
        count = sum(counts) + 1
        if count > NUMBER_MAX:
            raise StoreError(
                f"{version.path}: {memory_max} bytes of changed rows are {count} spare rows, more "
                f"than {NUMBER_MAX}: give less memory"
            )
        ranges = _file_ranges(version.tables)
        self.spares = tuple(_spare_rows(all_groups, counts, ranges))
        with_room = _with_room(ranges, self.table_spares)
        self._memory, offsets = map_with_room(memory, version.tables.path, with_room)
        version.tables.check_unchanged()
        self.rows = dict(_rows(self._memory, offsets, self.table_spares))
        rows_of_ids = memory.take(self.id_spares.count * self.ids.entries.row_bytes)
        self.rows[self.ids.entries.name] = rows_of_ids.reshape(self.id_spares.count, -1)
        data = self._memory.view()
        data.flags.writeable = False
        plan = version.plan.with_whole_rows(groups)
        tables = replace(version.tables, data=data, offsets=offsets)
        self.version = replace(version, plan=plan, tables=tables)
        rows = sum(spare.row_count for spare in self.spares)
        self.newest = memory.take(4 * rows).view(np.uint32)
        self.views = memory.take(4 * count).view(np.uint32)
        self.before = memory.take(4 * count).view(np.uint32)
        cells_end = _CACHE_LINE * (2 + readers)
        words = memory.take(8 * (cells_end + len(counts))).view(np.uint64)
        self._committed, self._written, *_ = words[:cells_end].reshape(-1, _CACHE_LINE)
        self._oldest = words[2 * _CACHE_LINE : cells_end : _CACHE_LINE]
        self._newest = words[2 * _CACHE_LINE + 1 : cells_end : _CACHE_LINE]
        self.peaks = words[cells_end:]
        self.uploaded: View | None = None
        self.start = position_of(manifest)
        if memory.is_new:
            self._oldest[:] = IDLE
            self.commit(1, self.start.seq)

    def make_resident(self, progress: Progress | None = None) -> ModelVersion:
        """Copies the tables into memory in place of the mapped file, at the same addresses.

        Returns:
            The version, which is ``version`` from now on.

        Raises:
            StoreError: there is not enough memory, or the tables can no longer be read.
        """
        tables = self.tables
        own = [tables.rows(name) for name in tables.tables]
        try:
            for rows in own:
                replace_by_memory(rows)
            read_tables(tables, self._memory, progress)
            for rows in own:
                make_read_only(rows)
        except OSError as error:
            raise StoreError(f"{tables.path}: cannot be resident: {error}") from error
        self.version = replace(self.version, tables=replace(tables, opened=None))
        return self.version

    @property
    def tables(self) -> TablesFile:
        return self.version.tables

    @property
    def table_spares(self) -> tuple[SpareRows, ...]:
        """Returns the spare rows of the groups of tables, without those of ids."""
        return self.spares[:-1]

    @property
    def id_spares(self) -> SpareRows:
        """Returns the spare rows of ``ids``."""
        return self.spares[-1]

    def as_rows(self, changes: Sequence[Change]) -> list[ChangedRows]:
        """Returns ``changes`` as rows, those of ids as rows of their entries, which are added where
        an id has none.

        Raises:
            RowsFullError: there is no room for the ids.
        """
        rows = [one for one in changes if isinstance(one, ChangedRows)]
        ids = [one for one in changes if isinstance(one, ChangedIds)]
        return [*rows, self.ids.add_changes(ids)] if ids else rows

    def newest_of(self, spare: SpareRows) -> NDArray[np.uint32]:
        """Returns the part of ``newest`` of a group's rows."""
        return self.newest[spare.row_start : spare.row_start + spare.row_count]

    @property
    def committed(self) -> View:
        """Returns the committed view, by one 8-byte read."""
        return _view_of(int(self._committed[0]))

    @property
    def seq(self) -> int:
        """Returns the seq of the last delta that lookups of this process read."""
        return (self.uploaded or self.committed).seq

    def commit(self, view: int, seq: int) -> None:
        """Makes ``view`` the view of lookups that begin from now on, by one 8-byte write."""
        self._committed[0] = view << 32 | seq

    def check_numbers(self, view: int, seq: int) -> None:
        """Raises StoreError if a view or a seq is larger than a uint32.

        A view counts from 1 with each start of the server; no delta has such a seq.
        """
        if max(view, seq) > NUMBER_MAX:
            raise StoreError(
                f"{self.version.path}: seq {seq} or view {view} is above {NUMBER_MAX}: restart the "
                "server"
            )

    @property
    def written(self) -> int:
        """Returns the newest view of any row in ``newest``, or a later one."""
        return int(self._written[0])

    def set_written(self, view: int) -> None:
        """Announces that rows of ``view`` are going to be written to ``newest``."""
        self._written[0] = view

    def written_since(self, view: int) -> Iterator[tuple[SpareRows, NDArray[np.int64]]]:
        """Yields each group with spare rows that were written after ``view``, and the positions of
        these rows among its spare rows. Some may be of a later view than the committed one."""
        for spare, peak in zip(self.table_spares, self.peaks, strict=False):
            written = np.flatnonzero(self.views[spare.start : spare.start + int(peak)] > view)
            if len(written):
                yield spare, written

    def set_cell(self, reader: int, oldest: int, newest: int) -> None:
        """Sets the oldest and the newest view that a process reads."""
        self._oldest[reader], self._newest[reader] = oldest, newest

    def clear_cell(self, reader: int) -> None:
        """Sets that a process reads no rows; also for one that has ended."""
        self._oldest[reader], self._newest[reader] = IDLE, 0

    def oldest_read(self) -> int:
        """Returns the oldest view in any cell; IDLE if there is none."""
        return int(self._oldest.min())

    def newest_read(self) -> int:
        """Returns the newest view in any cell; 0 if there is none."""
        return int(self._newest.max(initial=0))


@lru_cache(maxsize=16)
def _view_of(word: int) -> View:
    """Returns the view that a committed word names. Kept, because each batch asks for it."""
    return View(*divmod(word, 1 << 32))


def _spare_bytes(group: Sequence[TableSpec]) -> int:
    return sum(table.row_bytes for table in group) + BYTES_PER_SPARE


def _row_count(group: Sequence[TableSpec]) -> int:
    return max(table.num_embeddings for table in group)


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


def _file_ranges(tables: TablesFile) -> dict[str, FileRange]:
    """Returns the range of each table in its file, without room behind it."""
    header = len(header_bytes(tuple(tables.tables.values())))
    return {
        name: FileRange(header + start, tables.tables[name].nbytes)
        for name, start in tables.offsets.items()
    }


def _spare_rows(
    groups: Sequence[tuple[TableSpec, ...]], counts: Sequence[int], ranges: Mapping[str, FileRange]
) -> Iterator[SpareRows]:
    """Yields the spare rows of each group. They begin where all of its tables have room. Entries of
    ids, which have no range of a file, get no row numbers of kernels."""
    row_start, start = 0, 1
    for group, count in zip(groups, counts, strict=True):
        in_file = [_rows_of_file(one, ranges[one.name]) for one in group if one.name in ranges]
        first_row = max(in_file, default=0) + _GAP_ROWS
        yield SpareRows(group, row_start, _row_count(group), start, count, first_row)
        row_start += _row_count(group)
        start += count


def _rows_of_file(table: TableSpec, own: FileRange) -> int:
    """Returns the number of rows of a table that begin in the mapped pages of its file. The last
    of them may lie in part behind the pages."""
    return -(-(own.mapped - own.before) // table.row_bytes)


def _with_room(
    ranges: Mapping[str, FileRange], spares: Sequence[SpareRows]
) -> dict[str, FileRange]:
    """Returns ``ranges`` with room for the spare rows of each table."""
    rows = {table.name: one.first_row + one.count for one in spares for table in one.tables}
    specs = {table.name: table for one in spares for table in one.tables}
    return {
        name: replace(own, room=rows[name] * specs[name].row_bytes - own.nbytes)
        for name, own in ranges.items()
    }


def _rows(
    memory: NDArray[np.uint8], offsets: Mapping[str, int], spares: Sequence[SpareRows]
) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """Yields the name and the spare rows of each table."""
    for spare in spares:
        for table in spare.tables:
            begin = offsets[table.name] + spare.first_row * table.row_bytes
            rows = memory[begin : begin + spare.count * table.row_bytes]
            yield table.name, rows.reshape(spare.count, table.row_bytes)
