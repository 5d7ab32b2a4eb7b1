"""Writes deltas into the shared rows of a version. One process writes. A spare row is, in turn:

    state      recorded in                     next state
    free       ``_free``; unused: ``peaks``    written: ``apply``
    written    locals of ``apply``             last: linked; free: ``check`` raises
    last       ``last_spares``                 replaced: a delta changes its row; undone: ``revert``
    replaced   ``_replaced``, a ``before``     free: no lookup and no kept view precedes the
                                               replacement; last or undone: ``revert``
    undone     its view: after the committed   taken out: no lookup has such a view any more
    taken out  ``_taken_out``                  free: no lookup precedes the end of the undo

A killed writer leaves rows in any state, some of a view that was never committed. The next one
treats these as undone, and takes all out that are not the last of their row.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from embedserve.deltas import membarrier
from embedserve.deltas.changed_rows_memory import RowsFullError
from embedserve.deltas.live_rows import LiveRows, View
from embedserve.deltas.merge_changes import TableChange
from embedserve.deltas.row_groups import FreeSpares, Numbers
from embedserve_store.errors import StoreError
from embedserve_store.format.row_layout import dequantize_rows
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.goldens.reference_pooling import RowsOf

_Replaced = deque[tuple[int, dict[int, Numbers]]]
"""Views and numbers of spare rows by group of tables, oldest first: no lookup of this or a later
view reads them."""
WAIT_S = 0.001
"""Interval of the check whether the lookups have ended that must end first."""
LOOKUP_S_MAX = 5.0
"""Longest wait for these lookups, once after an undo. They take milliseconds, unless a worker, a
disk or a GPU hangs. Meanwhile no model gets a delta, and the supervisor no heartbeat."""


@dataclass(frozen=True)
class _GroupChange:
    """Rows of a group of tables that change in any of them."""

    free: FreeSpares
    rows: NDArray[np.int64]
    """Row numbers [n], ascending."""
    tables: Mapping[str, TableChange]
    """Changed rows of each table that has any, by its name."""


class RowsWriter:
    """Writer of the shared rows of one version."""

    def __init__(self, live: LiveRows) -> None:
        """Takes over from a writer that was killed, at whatever instruction.

        Raises:
            OSError: this host does not support membarrier(2).
        """
        self._live = live
        self._free = [FreeSpares(group, index) for index, group in enumerate(live.groups)]
        # Views whose rows are kept, oldest first; the last is the committed one
        self._kept: deque[View] = deque(maxlen=live.undo + 1)
        self._replaced: _Replaced = deque()
        self._taken_out: _Replaced = deque()  # rows that no kept state has
        self._has_undone_rows = True  # a killed writer may have left some
        self._await_until_s = time.monotonic() + LOOKUP_S_MAX
        self._count_changed()
        live.ids.count_again()
        with suppress(StoreError):  # the next change raises it
            self.finish_undo()

    @property
    def rows_changed(self) -> int:
        """Returns the number of rows that differ from those of the version. A row of tables that
        share features counts once."""
        return sum(self._changed[:-1])

    @property
    def ids_changed(self) -> int:
        """Returns the number of ids that differ from those of the version."""
        return self._changed[-1]

    def _count_changed(self) -> None:
        last_spares = map(self._live.last_spares_of, self._live.groups)
        self._changed = [int(np.count_nonzero(one)) for one in last_spares]

    @property
    def undo_from(self) -> int:
        """Returns the first seq that ``revert`` may go back to; the committed one if there is no
        other."""
        views = [*self._kept, *([self._live.committed] if self._has_undone_rows else [])]
        # A version that went back has earlier seqs behind later ones.
        return min(view.seq for view in views[max(0, len(views) - self._live.undo - 1) :])

    @property
    def memory_bytes(self) -> int:
        """Returns the bytes that changed rows have taken; they are used again, not given back."""
        return sum(int(self._live.peaks[one.index]) * one.group.spare_bytes for one in self._free)

    def apply(
        self,
        seq: int,
        changes: Sequence[TableChange],
        check: Callable[[RowsOf], None] | None = None,
    ) -> None:
        """Makes ``changes`` visible, all at once, as the state after delta ``seq``.

        Args:
            changes: rows of each table at most once, each row once.
            check: called before the rows are visible, with a function that returns rows as they
                will be. What it raises is raised, and no row has changed.

        Raises:
            RowsFullError: the rows do not fit. No row has changed.
            StoreError: ``seq`` is too large; or as ``finish_undo``.
        """
        self.finish_undo()
        live = self._live
        view = live.committed.number + 1
        live.check_numbers(view, seq)
        groups = [*self._by_group(changes)]
        self._make_room(groups)
        written = [(change, self._write(change, view)) for change in groups]
        if check is not None:
            self._check(check, written)
        live.set_written(view)
        membarrier.barrier()  # a reader that finds a spare row finds all of the above, too
        replaced = {}
        for change, numbers in written:
            last_spares = live.last_spares_of(change.free.group)
            before = last_spares[change.rows]
            last_spares[change.rows] = numbers
            replaced[change.free.index] = before[before != 0]
            self._changed[change.free.index] += int(np.count_nonzero(before == 0))
        membarrier.barrier()  # a reader that finds the committed view finds its rows, too
        live.commit(view, seq)
        self._kept.append(View(view, seq))
        self._replaced.append((view, replaced))

    def revert(self, target: int, seq: int) -> bool:
        """Makes the rows after delta ``target`` visible again, as the state after delta ``seq``.

        ``finish_undo`` frees the undone rows; the next change calls it, too.

        Returns:
            Whether they were kept. If not, nothing has changed.

        Raises:
            StoreError: ``seq`` is too large; or as ``finish_undo``.
        """
        self.finish_undo()
        view = next((view for view, kept in reversed(self._kept) if kept == target), None)
        if view is None:
            return False
        live = self._live
        live.check_numbers(live.written + 1, seq)
        live.commit(view, seq)
        while self._kept[-1].number > view:
            self._kept.pop()
        while self._replaced and self._replaced[-1][0] > view:
            self._replaced.pop()  # they are the last spares of their rows again
        self._has_undone_rows = True
        self._await_until_s = time.monotonic() + LOOKUP_S_MAX
        return True

    def finish_undo(self) -> None:
        """Frees the rows of undone deltas, once the lookups that began before the undo have ended.

        Raises:
            StoreError: they have not ended LOOKUP_S_MAX after the undo. Nothing has changed.
        """
        if not self._has_undone_rows:
            return
        is_start = not self._kept
        undone = self._take_out_later_rows()
        unread = self._unused() if is_start else self._split(undone)
        self._taken_out.append((self._live.committed.number, unread))
        self._count_changed()
        self._has_undone_rows = False

    def _by_group(self, changes: Sequence[TableChange]) -> Iterator[_GroupChange]:
        """Yields the changes of each group that has any."""
        tables = {change.table.name: change for change in changes if len(change.numbers)}
        for free in self._free:
            own = {one.name: tables[one.name] for one in free.group.tables if one.name in tables}
            rows = [change.numbers for change in own.values()]
            if rows:
                union = rows[0] if len(rows) == 1 else np.unique(np.concatenate(rows))
                yield _GroupChange(free, union, own)

    def _write(self, change: _GroupChange, view: int) -> Numbers:
        """Writes rows that no lookup reads yet; returns the numbers of their spare rows."""
        free = change.free
        numbers = free.take(len(change.rows), self._live.peaks)
        before = self._live.last_spares_of(free.group)[change.rows]
        for table in free.group.tables:
            self._write_table(table, change, numbers, before)
        self._live.views[numbers] = view
        self._live.before[numbers] = before
        return numbers

    def _check(
        self, check: Callable[[RowsOf], None], written: Sequence[tuple[_GroupChange, Numbers]]
    ) -> None:
        """Calls ``check``, and frees the rows that were written if it raises: no row's last spare
        row is one of them yet."""
        of_groups = {change.free.index: (change.rows, numbers) for change, numbers in written}
        try:
            check(partial(self._rows_after, of_groups))
        except BaseException:
            for change, numbers in written:
                change.free.numbers.append(numbers)
            raise

    def _rows_after(
        self,
        written: Mapping[int, tuple[NDArray[np.int64], Numbers]],
        table: TableSpec,
        wanted: NDArray[np.int64],
    ) -> NDArray[np.float32]:
        """Returns the values [n, dim] of the rows ``wanted``, as a lookup will find them.

        Args:
            written: by group, numbers of rows, ascending, and of their spare rows that are not
                visible yet.
        """
        free = next(one for one in self._free if table in one.group.tables)
        spares = self._live.last_spares_of(free.group)[wanted]
        if free.index in written:
            changed, numbers = written[free.index]
            at = np.minimum(np.searchsorted(changed, wanted), len(changed) - 1)
            spares = np.where(changed[at] == wanted, numbers[at], spares)
        rows = self._live.tables.rows(table.name)[wanted]
        is_changed = spares != 0
        rows[is_changed] = self._live.rows[table.name][spares[is_changed] - free.group.start]
        return dequantize_rows(rows, table.dtype, table.embedding_dim)

    def _write_table(
        self, table: TableSpec, change: _GroupChange, numbers: Numbers, before: Numbers
    ) -> None:
        """Writes the rows of a table of a group: those that change in it, and copies of those that
        change in other tables of the group.

        Args:
            numbers: numbers of the spare rows that are written to.
            before: numbers of the last spare rows of the same rows; 0 for the published rows.
        """
        rows, places = self._live.rows[table.name], numbers - change.free.group.start
        own = change.tables.get(table.name)
        if own is not None and len(own.numbers) == len(change.rows):
            own.write_to(rows, places)
            return
        is_copied = change.rows < table.num_embeddings  # no lookup reads other rows
        if own is not None:
            positions = np.searchsorted(change.rows, own.numbers)
            own.write_to(rows, places[positions])
            is_copied[positions] = False
        is_published = is_copied & (before == 0)
        is_spare = is_copied & (before != 0)
        published = self._live.tables.rows(table.name)
        rows[places[is_published]] = published[change.rows[is_published]]
        rows[places[is_spare]] = rows[before[is_spare] - change.free.group.start]

    def _make_room(self, changes: Sequence[_GroupChange]) -> None:
        """Frees as many spare rows as ``changes`` need.

        Rows that nobody needs are freed first. If they do not suffice, undos to the earliest kept
        states are given up one by one, and the rows that only these need are freed. None is given
        up if ``changes`` would not fit even then.

        Raises:
            RowsFullError: ``changes`` do not fit.
        """
        lowest = self._free_unseen()
        if why := self._why_full(changes, self._kept_for_undo(lowest)):
            raise RowsFullError(why)
        while why := self._why_full(changes, Counter()):
            if len(self._kept) == 1:  # a lookup of an earlier view has begun meanwhile
                raise RowsFullError(why)
            self._kept.popleft()
            self._free_unseen()

    def _kept_for_undo(self, lowest: int) -> Counter[int]:
        """Returns the number of rows of each group that only an undo still needs.

        Args:
            lowest: lowest view that a lookup can read.
        """
        rows: Counter[int] = Counter()
        for view, numbers in self._replaced:
            if view <= lowest:
                rows.update({index: len(own) for index, own in numbers.items()})
        return rows

    def _why_full(self, changes: Sequence[_GroupChange], freeable: Counter[int]) -> str:
        """Returns why the memory, or the spare rows of a group, do not suffice; "" if they do.

        Args:
            freeable: rows of each group that count as free in addition to the free ones.
        """
        missing = [
            (one.free, max(0, len(one.rows) - one.free.count - freeable[one.free.index]))
            for one in changes
        ]
        needed = sum(count * free.group.spare_bytes for free, count in missing)
        if self.memory_bytes + needed > self._live.memory_max:
            return (
                f"changed rows have {self.memory_bytes} bytes, {needed} more are needed, the limit "
                f"is {self._live.memory_max}"
            )
        for free, count in missing:
            if int(self._live.peaks[free.index]) + count > free.group.count:
                return (
                    f"{free.group.names}: {free.group.count} rows for changes, and {count} more "
                    "are needed: lookups still read the others"
                )
        return ""

    def _free_unseen(self) -> int:
        """Frees the spare rows that no lookup can read any more, and that no kept state has.

        Returns:
            The lowest view that a lookup can read.
        """
        membarrier.barrier()  # a reader finds the committed view, or this process finds its cell
        lowest = min(self._live.committed.number, self._live.lowest_view_read())
        self._free_up_to(self._taken_out, lowest)
        self._free_up_to(self._replaced, min(self._kept[0].number, lowest))
        return lowest

    def _free_up_to(self, replaced: _Replaced, view: int) -> None:
        while replaced and replaced[0][0] <= view:
            for index, numbers in replaced.popleft()[1].items():
                self._free[index].numbers.append(numbers)

    def _take_out_later_rows(self) -> Numbers:
        """Makes every row's last spare row one of the committed view, and returns the others.

        They are of a killed writer's delta, or of deltas that are undone. Lookups that began before
        may still follow one that is taken out, so its memory is used again once all lookups have a
        later view, which the commit at the end begins. Raises StoreError as ``finish_undo``.
        """
        live = self._live
        view, seq = live.committed
        self._await_lookups_after(view)
        changed = np.flatnonzero(live.last_spares)
        last_spares, taken_out = live.last_spares[changed], [np.zeros(0, np.uint32)]
        while len(late := np.flatnonzero(live.views[last_spares] > view)):
            taken_out.append(last_spares[late])
            last_spares[late] = live.before[last_spares[late]]
        live.last_spares[changed] = last_spares
        view = live.written + 1  # no view is numbered twice
        live.set_written(view)
        membarrier.barrier()
        live.commit(view, seq)
        self._kept.append(View(view, seq))
        return np.concatenate(taken_out)

    def _await_lookups_after(self, view: int) -> None:
        """Waits for lookups that began before an undo. Raises StoreError as ``finish_undo``."""
        membarrier.barrier()  # a reader finds the committed view, or this process finds its cell
        while self._live.highest_view_read() > view:
            if time.monotonic() >= self._await_until_s:
                raise StoreError(f"lookups still read undone rows after {LOOKUP_S_MAX:g} s")
            time.sleep(WAIT_S)

    def _unused(self) -> dict[int, Numbers]:
        """Returns the spare rows that were used before and are no row's last one, by group."""
        live = self._live
        in_use = np.zeros(len(live.views), bool)
        in_use[live.last_spares] = True
        unused = {}
        for free in self._free:
            start = free.group.start
            used_once = in_use[start : start + int(live.peaks[free.index])]
            unused[free.index] = (start + np.flatnonzero(~used_once)).astype(np.uint32)
        return unused

    def _split(self, numbers: Numbers) -> dict[int, Numbers]:
        """Returns ``numbers`` of spare rows by group."""
        starts = [free.group.start for free in self._free]
        numbers = np.sort(numbers)
        return dict(enumerate(np.split(numbers, np.searchsorted(numbers, starts[1:]))))
