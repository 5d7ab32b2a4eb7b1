"""Lays out the memory in which the changed rows of a version are shared.

Each table is followed by spare rows. A changed row is written to a spare row and is never
overwritten while a lookup may read it. All spare rows of a version are numbered from 1:

    last_spares[row]   number of the last spare row of a row; 0: the row is as published
    views[spare]       view from which on a spare row counts
    before[spare]      spare row that it replaced; 0: the published row

Tables that share features are a group (row_groups.py), whose spare rows have common numbers.

Ids of a vocabulary change in the same way: their entries (live_ids.py) are the rows of one more
table, which no kernel reads.

A view is the state of all tables after a delta. The committed view and its seq are one word, so
that one 8-byte write makes a delta visible in all tables and processes at once. Each reading
process has a cell with the lowest and the highest view that its lookups use. The writer frees only
what no cell can still reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from embedserve.deltas.live_ids import LiveIds
from embedserve.deltas.map_tables import FileRange, map_with_room
from embedserve.deltas.mappings import map_private, protect
from embedserve.deltas.row_groups import NUMBER_MAX, Numbers, RowGroup, lay_out_groups
from embedserve.deltas.version_memory import VersionMemory
from embedserve_store.errors import StoreError
from embedserve_store.format.changed_ids import ChangedIds
from embedserve_store.format.delta_file import ChangedRows
from embedserve_store.format.delta_manifest import position_of
from embedserve_store.format.tables_file import Progress, TablesFile, header_bytes
from embedserve_store.memory.resident_tables import read_tables
from embedserve_store.model_version import ModelVersion

IDLE = 2**64 - 1
"""Value of a cell while its process reads no rows."""
_CACHE_LINE = 8
"""Words of a cache line. Each word that processes write is alone on one."""

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
        memory: the memory itself; other processes can open it while this one has it.
        start: position of the version in its line of deltas.
        memory_max: bytes that changed rows may take.
        undo: number of steps, of one delta or several, whose former rows are kept, as far as the
            memory allows.
        groups: the groups of tables, then that of the entries of ``ids``.
        ids: changed ids of the vocabularies.
        rows: uint8 [count, row_bytes] for each table, by its name: the spare rows themselves.
        last_spares, views, before: uint32 arrays, described above.
        peaks: uint64 [groups], number of spare rows of each group that were ever used.
        uploaded: view that lookups of this process use, where they run on a device that the rows
            are copied to first; else None.
        upload_since: time since which the committed view is not uploaded, in seconds since the Unix
            epoch; 0 if it is.
        upload_error: why it could not be uploaded; "" if no upload has failed since then.
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
            undo: number of steps that can be taken back from memory.
            memory: memory that all processes share; with that of another process the rows are as
                that one has left them. Default: new memory for processes that are forked later.
            new_ids_percent: ids of each vocabulary that may change, in percent of its ids.

        Raises:
            StoreError: the version's deltas cannot be served.
        """
        self.memory = memory = memory or VersionMemory.create()
        manifest = version.manifest
        groups = manifest.table_groups
        self.memory_max, self.undo = memory_max, undo
        vocabularies = [group for group in groups if group[0].ids.rule == "map"]
        self.ids = LiveIds(vocabularies, new_ids_percent, memory)
        ranges = _file_ranges(version.tables)
        self.groups = tuple(
            lay_out_groups([*groups, (self.ids.entries,)], memory_max, undo, ranges)
        )
        count = sum(group.count for group in self.groups) + 1
        if count > NUMBER_MAX:
            raise StoreError(
                f"{version.path}: {memory_max} bytes of changed rows are {count} spare rows, more "
                f"than {NUMBER_MAX}: give less memory"
            )
        with_room = _with_room(ranges, self.table_groups)
        self._memory, offsets = map_with_room(memory, version.tables.path, with_room)
        version.tables.check_unchanged()
        self.rows = dict(_rows(self._memory, offsets, self.table_groups))
        rows_of_ids = memory.take(self.id_group.count * self.ids.entries.row_bytes)
        self.rows[self.ids.entries.name] = rows_of_ids.reshape(self.id_group.count, -1)
        data = self._memory.view()
        data.flags.writeable = False
        plan = version.plan.with_whole_rows(groups)
        tables = replace(version.tables, data=data, offsets=offsets)
        self.version = replace(version, plan=plan, tables=tables)
        rows = sum(group.row_count for group in self.groups)
        self.last_spares = memory.take(4 * rows).view(np.uint32)
        self.views = memory.take(4 * count).view(np.uint32)
        self.before = memory.take(4 * count).view(np.uint32)
        cells_end = _CACHE_LINE * (2 + readers)
        words = memory.take(8 * (cells_end + len(self.groups))).view(np.uint64)
        self._committed, self._written, *_ = words[:cells_end].reshape(-1, _CACHE_LINE)
        self._lowest_views = words[2 * _CACHE_LINE : cells_end : _CACHE_LINE]
        self._highest_views = words[2 * _CACHE_LINE + 1 : cells_end : _CACHE_LINE]
        self.peaks = words[cells_end:]
        self.uploaded: View | None = None
        self.upload_since, self.upload_error = 0.0, ""
        self.start = position_of(manifest)
        if memory.is_new:
            self._lowest_views[:] = IDLE
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
                map_private(rows)
            read_tables(tables, self._memory, progress)
            for rows in own:
                protect(rows)
        except OSError as error:
            raise StoreError(f"{tables.path}: cannot be resident: {error}") from error
        self.version = replace(self.version, tables=replace(tables, opened=None))
        return self.version

    @property
    def tables(self) -> TablesFile:
        return self.version.tables

    @property
    def table_groups(self) -> tuple[RowGroup, ...]:
        """Returns the groups of tables, without that of ids."""
        return self.groups[:-1]

    @property
    def id_group(self) -> RowGroup:
        """Returns the group of the entries of ``ids``."""
        return self.groups[-1]

    def as_rows(self, changes: Sequence[Change]) -> list[ChangedRows]:
        """Returns ``changes`` as rows, those of ids as rows of their entries, which are added where
        an id has none.

        Raises:
            RowsFullError: there is no room for the ids.
        """
        rows = [one for one in changes if isinstance(one, ChangedRows)]
        ids = [one for one in changes if isinstance(one, ChangedIds)]
        return [*rows, self.ids.add_changes(ids)] if ids else rows

    def last_spares_of(self, group: RowGroup) -> Numbers:
        """Returns the part of ``last_spares`` of a group's rows."""
        return self.last_spares[group.row_start : group.row_start + group.row_count]

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
        """Returns the highest view of any spare row in ``last_spares``, or a higher one."""
        return int(self._written[0])

    def set_written(self, view: int) -> None:
        """Announces that rows of ``view`` are going to be written to ``last_spares``."""
        self._written[0] = view

    def written_since(self, view: int) -> Iterator[tuple[RowGroup, NDArray[np.int64]]]:
        """Yields each group with spare rows that were written after ``view``, and the positions of
        these rows among its spare rows. Some may be of a later view than the committed one."""
        for group, peak in zip(self.table_groups, self.peaks, strict=False):
            written = np.flatnonzero(self.views[group.start : group.start + int(peak)] > view)
            if len(written):
                yield group, written

    def set_cell(self, reader: int, lowest: int, highest: int) -> None:
        """Sets the lowest and the highest view that a process reads."""
        self._lowest_views[reader], self._highest_views[reader] = lowest, highest

    def clear_cell(self, reader: int) -> None:
        """Sets that a process reads no rows; also for one that has ended."""
        self._lowest_views[reader], self._highest_views[reader] = IDLE, 0

    def lowest_view_read(self) -> int:
        """Returns the lowest view in any cell; IDLE if there is none."""
        return int(self._lowest_views.min())

    def highest_view_read(self) -> int:
        """Returns the highest view in any cell; 0 if there is none."""
        return int(self._highest_views.max(initial=0))


@lru_cache(maxsize=16)
def _view_of(word: int) -> View:
    """Returns the view that a committed word names. Kept, because each batch asks for it."""
    return View(*divmod(word, 1 << 32))


def _file_ranges(tables: TablesFile) -> dict[str, FileRange]:
    """Returns the range of each table in its file, without room behind it."""
    header = len(header_bytes(tuple(tables.tables.values())))
    return {
        name: FileRange(header + start, tables.tables[name].nbytes)
        for name, start in tables.offsets.items()
    }


def _with_room(ranges: Mapping[str, FileRange], groups: Sequence[RowGroup]) -> dict[str, FileRange]:
    """Returns ``ranges`` with room for the spare rows of each table."""
    rows = {table.name: one.first_row + one.count for one in groups for table in one.tables}
    specs = {table.name: table for one in groups for table in one.tables}
    return {
        name: replace(own, room=rows[name] * specs[name].row_bytes - own.nbytes)
        for name, own in ranges.items()
    }


def _rows(
    memory: NDArray[np.uint8], offsets: Mapping[str, int], groups: Sequence[RowGroup]
) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """Yields the name and the spare rows of each table."""
    for group in groups:
        for table in group.tables:
            begin = offsets[table.name] + group.first_row * table.row_bytes
            rows = memory[begin : begin + group.count * table.row_bytes]
            yield table.name, rows.reshape(group.count, table.row_bytes)
