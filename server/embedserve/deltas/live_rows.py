"""Lays out the memory in which the changed rows of a version are shared.

Each table is followed by spare rows. A changed row is written to a spare row and is never
overwritten while a lookup may read it. All spare rows of a version are numbered from 1:

    newest[row]    number of the newest spare row of a row; 0: the row is as published
    views[spare]   view from which on a spare row counts
    before[spare]  spare row that it replaced; 0: the published row

A view is the state of all tables after a delta. The committed view and its seq are one word, so
that one store makes a delta visible in all tables and processes at once. Each reading process has a
cell with the oldest and the newest view that its lookups use. The writer frees only what no cell
can still reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from embedserve.deltas.region import FileRange, map_with_room, shared_memory
from embedserve_store.errors import StoreError
from embedserve_store.format.delta_manifest import position_of
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.format.tables_file import TablesFile, header_bytes
from embedserve_store.model_version import ModelVersion

NUMBER_MAX = 2**32 - 1
"""Maximum seq, view and number of a spare row: each is a uint32."""
BYTES_PER_SPARE = 8
SPARES_PER_ROW = 4
"""Spare rows for each row of a table, if the memory allows as many, beside those that an undo
needs. A row needs one, and another for each change until no lookup reads the one before."""
IDLE = 2**64 - 1
"""Value of a cell while its process reads no rows."""
RANKS_MAX = 4096
"""Ranks of a row_wise table whose rows can change. Spare rows begin this many rows behind it, past
the last row that its ranks would have if each had as many as the first."""
_CACHE_LINE = 8
"""Words of a cache line. Each word that processes write is alone on one."""


class RowsFullError(Exception):
    """The changed rows do not fit into the memory that was given for them."""


@dataclass(frozen=True)
class SpareRows:
    """The spare rows of a table.

    Attributes:
        table: the table.
        row_start: position of the table's row 0 in ``newest``.
        start: number of the first spare row.
        first_row: row number, as kernels count them, of the first spare row.
        rows: uint8 [n, row_bytes], the spare rows themselves.
    """

    table: TableSpec
    row_start: int
    start: int
    first_row: int
    rows: NDArray[np.uint8]


class LiveRows:
    """Changed rows of a version, in memory that is shared with processes that are forked later.

    Attributes:
        version: the version, with spare rows behind its tables, and no table divided by columns.
        start: position of the version in its line of deltas.
        memory_max: bytes that changed rows may take.
        undo: number of deltas whose former rows are kept, as far as the memory allows.
        spares: spare rows of each table, by its name.
        newest, views, before: uint32 arrays, described above.
        peaks: uint64 [tables], number of spare rows of each table that were ever used.
        uploaded: view, and its seq, that lookups of this process use, where they run on a device
            that the rows are copied to first; else None.
    """

    def __init__(self, version: ModelVersion, memory_max: int, readers: int, undo: int = 0) -> None:
        """
        Args:
            version: a version whose tables are mapped.
            memory_max: bytes that changed rows may take.
            readers: number of processes that look rows up.
            undo: number of deltas that can be taken back at once.

        Raises:
            StoreError: the version's deltas cannot be served.
        """
        manifest = version.manifest
        _check_features(version)
        self.memory_max, self.undo = memory_max, undo
        counts = _spare_counts(manifest.tables, memory_max, undo)
        count = sum(counts.values()) + 1
        if count > NUMBER_MAX:
            raise StoreError(
                f"{version.path}: {memory_max} bytes of changed rows are {count} spare rows, more "
                f"than {NUMBER_MAX}: give less memory"
            )
        ranges = _file_ranges(version.tables, counts)
        memory, offsets = map_with_room(version.tables.path, ranges)
        version.tables.check_unchanged()
        data = memory.view()
        data.flags.writeable = False
        # Column shards are copies, which have no spare rows.
        plan = version.plan.with_whole_rows(manifest.tables)
        tables = replace(version.tables, data=data, offsets=offsets)
        self.version = replace(version, plan=plan, tables=tables)
        self.spares = dict(_spare_rows(memory, offsets, manifest.tables, ranges, counts))
        rows = sum(table.num_embeddings for table in manifest.tables)
        self.newest = shared_memory(4 * rows).view(np.uint32)
        self.views = shared_memory(4 * count).view(np.uint32)
        self.before = shared_memory(4 * count).view(np.uint32)
        cells_end = _CACHE_LINE * (2 + readers)
        words = shared_memory(8 * (cells_end + len(counts))).view(np.uint64)
        self._committed, self._written, *_ = words[:cells_end].reshape(-1, _CACHE_LINE)
        self._oldest = words[2 * _CACHE_LINE : cells_end : _CACHE_LINE]
        self._newest = words[2 * _CACHE_LINE + 1 : cells_end : _CACHE_LINE]
        self._oldest[:] = IDLE
        self.peaks = words[cells_end:]
        self.uploaded: tuple[int, int] | None = None
        self.start = position_of(manifest)
        self.commit(1, self.start.seq)

    @property
    def tables(self) -> TablesFile:
        return self.version.tables

    @property
    def committed(self) -> tuple[int, int]:
        """Returns the committed view and its seq, read in one load."""
        return divmod(int(self._committed[0]), 1 << 32)

    @property
    def seq(self) -> int:
        """Returns the seq of the last delta that lookups of this process read."""
        return (self.uploaded or self.committed)[1]

    def commit(self, view: int, seq: int) -> None:
        """Makes ``view`` the view of lookups that begin from now on, in one store."""
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
        """Yields each table with spare rows that were written after ``view``, and the positions of
        these rows among its spare rows. Some may be of a later view than the committed one."""
        for spare, peak in zip(self.spares.values(), self.peaks, strict=True):
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


def _check_features(version: ModelVersion) -> None:
    """Raises StoreError if a feature looks rows up in several tables: its ids go to the kernels
    once, as one number for all of these tables."""
    manifest = version.manifest
    seen: dict[int, str] = {}
    for column in manifest.columns:
        other = seen.setdefault(column.feature, column.table.name)
        if other != column.table.name:
            raise StoreError(
                f"{version.path}: feature {manifest.features[column.feature]!r} is looked up in "
                f"the tables {other!r} and {column.table.name!r}: deltas are served only where a "
                "feature has one table"
            )


def _spare_counts(tables: Sequence[TableSpec], memory_max: int, undo: int) -> dict[str, int]:
    """Returns the number of spare rows of each table, which take memory only once they are used.

    Spare rows for undos are fewer where not all could be numbered.
    """
    least, most = (
        {
            table.name: min(
                memory_max // (table.row_bytes + BYTES_PER_SPARE), per_row * table.num_embeddings
            )
            for table in tables
        }
        for per_row in (SPARES_PER_ROW, SPARES_PER_ROW + undo)
    )
    left, more = NUMBER_MAX - 1 - sum(least.values()), sum(most.values()) - sum(least.values())
    share = max(0.0, min(1.0, left / more)) if more else 0.0
    return {name: one + int(share * (most[name] - one)) for name, one in least.items()}


def _file_ranges(tables: TablesFile, counts: Mapping[str, int]) -> dict[str, FileRange]:
    """Returns the range of each table in its file, with room for ``counts`` spare rows."""
    header = len(header_bytes(tuple(tables.tables.values())))
    return {
        name: FileRange(
            header + start,
            tables.tables[name].nbytes,
            (counts[name] + RANKS_MAX + 1) * tables.tables[name].row_bytes,
        )
        for name, start in tables.offsets.items()
    }


def _spare_rows(
    memory: NDArray[np.uint8],
    offsets: Mapping[str, int],
    tables: Sequence[TableSpec],
    ranges: Mapping[str, FileRange],
    counts: Mapping[str, int],
) -> Iterator[tuple[str, SpareRows]]:
    row_start, start = 0, 1
    for table in tables:
        name, count = table.name, counts[table.name]
        # Rows that begin before lie in part in the last page of the file's range.
        first_row = -(-(ranges[name].mapped - ranges[name].before) // table.row_bytes) + RANKS_MAX
        begin = offsets[name] + first_row * table.row_bytes
        rows = memory[begin : begin + count * table.row_bytes].reshape(count, table.row_bytes)
        yield name, SpareRows(table, row_start, start, first_row, rows)
        row_start += table.num_embeddings
        start += count
