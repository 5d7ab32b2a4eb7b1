"""Finds the rows of the ids of a batch in one view of all tables."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from embedserve.deltas import membarrier
from embedserve.deltas.live_rows import LiveRows, View
from embedserve.deltas.row_groups import RowGroup
from embedserve_store.errors import StoreError
from embedserve_store.format.changed_ids import AS_PUBLISHED
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.ids.translate import OverrideRows
from embedserve_store.plans.plan import Plan

STEPS_MAX = 100_000
"""Deltas that may be committed during a lookup before it fails."""


class RowsReader:
    """Reader of the shared rows of one version, in one process. Threads may share it.

    Attributes:
        has_ids: whether a table has a vocabulary, whose ids may change.
    """

    def __init__(
        self,
        live: LiveRows,
        reader: int,
        plan: Plan,
        upload: Callable[[int], None] | None = None,
    ) -> None:
        """
        Args:
            reader: number of this process among the readers of ``live``.
            plan: plan of the engine that gets the row numbers.
            upload: copies the rows of a view to the device that looks them up, and returns when
                they are there; None where lookups read the shared rows.

        Raises:
            OSError: this host does not support membarrier(2).
            StoreError: a table is on too many ranks, or tables that share a feature are sharded
                differently.
        """
        membarrier.register()
        live.clear_cell(reader)
        self._live = live
        self._reader = reader
        self._lock = threading.Lock()
        self._views: list[int] = []
        self._upload = upload
        found: dict[str, tuple[int, int, int, int]] = {}
        for group in live.table_groups:
            numbers = (group.row_start, group.first_row - group.start, *_blocks(plan, group))
            found |= dict.fromkeys(group.features, numbers)
        columns = np.array([found[feature] for feature in live.version.manifest.features]).T
        self._row_starts, self._shifts, self._ranks, self._rank_rows = columns.copy()
        self._features = np.arange(len(self._shifts))
        self._is_row_wise = bool((self._ranks > 1).any())
        self._owners = live.ids.owners_of(live.version.manifest.features)
        self.has_ids = bool(self._owners.any())
        if upload is not None:
            live.uploaded = self._begin_committed()
            upload(live.uploaded.number)

    @property
    def uploads_rows(self) -> bool:
        """Returns whether lookups run on a device that ``advance`` uploads rows to."""
        return self._upload is not None

    def begin(self) -> View:
        """Returns the view of a lookup that begins.

        Until ``end`` is called with its number, none of its rows is overwritten.
        """
        with self._lock:
            if (uploaded := self._live.uploaded) is None:
                return self._begin_committed()
            self._views.append(uploaded.number)  # a view that is in use already: the cell is set
            return uploaded

    def advance(self) -> None:
        """Uploads the rows of the committed view, and makes lookups begin with it. Does nothing
        where nothing is uploaded. One thread calls it.

        Raises:
            any error of the upload; lookups then begin with the view before.
        """
        live, before = self._live, self._live.uploaded
        if before is None or self._upload is None:
            return
        if live.committed == before:
            live.upload_since, live.upload_error = 0.0, ""
            return
        live.upload_since = live.upload_since or time.time()
        with self._lock:
            committed = self._begin_committed()
        ended = committed
        try:
            self._upload(committed.number)
            live.uploaded, ended = committed, before
        except Exception as error:  # such as torch's RuntimeError, for CUDA
            live.upload_error = str(error) or type(error).__name__
            raise
        finally:
            self.end(ended.number)
        live.upload_since, live.upload_error = 0.0, ""

    def _begin_committed(self) -> View:
        live = self._live
        while True:
            committed = live.committed
            self._views.append(committed.number)
            self._set_cell()
            if live.committed == committed:
                return committed
            self._end(committed.number)  # the writer may have read the cell before it was set

    def end(self, view: int) -> None:
        with self._lock:
            self._end(view)

    def _end(self, view: int) -> None:
        self._views.remove(view)
        if self._views:
            self._set_cell()
        else:
            self._live.clear_cell(self._reader)

    def _set_cell(self) -> None:
        self._live.set_cell(self._reader, min(self._views), max(self._views))

    def rows_in_view(
        self, ids: NDArray[np.int64], ids_per_feature: NDArray[np.int64], view: int
    ) -> NDArray[np.int64]:
        """Returns the row numbers, as kernels count them, of the rows in ``view``.

        Args:
            ids: int64 [n] row numbers, feature-major; returned themselves if no row has changed.
            ids_per_feature: int64 [F].

        Raises:
            StoreError: too many deltas were committed since ``begin``.
        """
        live = self._live
        last_spares = live.last_spares.take(ids + self._row_starts.repeat(ids_per_feature))
        changed = last_spares.astype(bool).nonzero()[0]
        if not len(changed):
            return ids
        spares = last_spares[changed].astype(np.int64)
        if live.written > view:
            self._go_back(spares, view)
            are_of_view = spares.astype(bool)
            spares, changed = spares[are_of_view], changed[are_of_view]
        features = self._features.repeat(ids_per_feature)[changed]
        rows = spares + self._shifts[features]
        if self._is_row_wise:
            # The row is read by the rank that has the published row, so that sums over ranks stay
            # the same bits. Past the last row, torchrec gives id n to rank n % ranks, as that
            # rank's row n // ranks.
            ranks, rank_rows = self._ranks[features], self._rank_rows[features]
            rank = ids[changed] // rank_rows
            rows = (rows - rank * rank_rows) * ranks + rank
        result = ids.copy()
        result[changed] = rows
        return result

    def override_rows(
        self,
        view: int,
        ids: NDArray[np.int64],
        rows: NDArray[np.int64],
        ids_per_feature: NDArray[np.int64],
    ) -> None:
        """Writes the rows that changed ids have in ``view`` over the published rows.

        Args:
            ids: int64 [n], ids of all features, feature-major.
            rows: int64 [n], published rows of the ids; -1 for an id that is not in a vocabulary.
            ids_per_feature: int64 [F].

        Raises:
            StoreError: as ``rows_in_view``.
        """
        live = self._live
        if live.ids.is_empty:
            return
        owners = self._owners.repeat(ids_per_feature)
        entries = live.ids.entries_of(ids, owners)
        changed = np.flatnonzero(entries >= 0)
        if not len(changed):
            return
        group = live.id_group
        spares = live.last_spares_of(group)[entries[changed]].astype(np.int64)
        if live.written > view:
            self._go_back(spares, view)
        are_of_view = spares.astype(bool)
        spares, changed = spares[are_of_view], changed[are_of_view]
        known = live.rows[live.ids.entries.name].view(np.int64)[spares - group.start, 0]
        is_changed = known != AS_PUBLISHED
        rows[changed[is_changed]] = known[is_changed]

    def _go_back(self, spares: NDArray[np.int64], view: int) -> None:
        """Replaces the spare rows that are newer than ``view`` by the rows before them, 0 for the
        published row."""
        live = self._live
        late = np.flatnonzero(live.views[spares] > view)
        for _ in range(STEPS_MAX):
            if not len(late):
                return
            spares[late] = live.before[spares[late]]
            late = late[live.views[spares[late]] > view]
        raise StoreError(f"more than {STEPS_MAX} deltas were applied during one lookup")


class BatchView:
    """The view that one batch is joined and looked up in. ``end`` must be called once.

    Attributes:
        reader: reader of the rows.
        number: number of the view.
        seq: last delta in the view.
    """

    __slots__ = ("number", "reader", "seq")

    def __init__(self, reader: RowsReader) -> None:
        self.reader = reader
        self.number, self.seq = reader.begin()

    @property
    def override_rows(self) -> OverrideRows | None:
        """Function that writes the rows that changed ids have in the view; None if no id ever
        changes."""
        reader = self.reader
        return partial(reader.override_rows, self.number) if reader.has_ids else None

    def end(self) -> None:
        """Allows the rows of the view to be overwritten."""
        self.reader.end(self.number)


def end_view(view: BatchView | None) -> None:
    """Ends the use of ``view``; does nothing for None, the view of rows that never change."""
    if view is not None:
        view.end()


def _blocks(plan: Plan, group: RowGroup) -> tuple[int, int]:
    """Returns the number of ranks that have rows of a group's tables, and the rows of each.

    Raises:
        StoreError: the ranks are too many, or not the same for all tables.
    """
    found = {_table_blocks(plan, table, group.row_count) for table in group.tables}
    if len(found) > 1:
        raise StoreError(f"{group.names}: they share features, but are sharded differently")
    ((ranks, rows),) = found
    if ranks * rows > group.first_row:
        raise StoreError(f"{group.names}: on {ranks} ranks, more than deltas are served on")
    return ranks, rows


def _table_blocks(plan: Plan, table: TableSpec, row_count: int) -> tuple[int, int]:
    """Returns the number of ranks that have rows of ``table``, and the rows of each: ``row_count``
    if there is one rank."""
    found = plan.tables[table.name]
    assert found.sharding_type != "column_wise", f"{table.name}: shards without spare rows"
    if found.sharding_type != "row_wise" or len(found.shards) == 1:
        return 1, row_count
    return len(found.shards), found.shards[0].row_count
