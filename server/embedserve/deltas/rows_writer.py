"""Writes deltas into the shared rows of a version. One process writes.

A killed writer leaves rows of a view that was never committed. The next writer takes them out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from embedserve.deltas import membarrier
from embedserve.deltas.live_rows import BYTES_PER_SPARE, LiveRows, RowsFullError, SpareRows
from embedserve_store.format.delta_file import ChangedRows

Numbers = NDArray[np.uint32]


@dataclass
class _Free:
    """Spare rows of a table that can be written to."""

    spare: SpareRows
    index: int
    """Position of the table in ``LiveRows.peaks``."""
    numbers: list[Numbers] = field(default_factory=list)
    """Numbers of rows that were used before."""

    @property
    def count(self) -> int:
        return sum(map(len, self.numbers))


class RowsWriter:
    """Writer of the shared rows of one version.

    Attributes:
        rows_changed: number of rows that were published anew.
    """

    def __init__(self, live: LiveRows) -> None:
        """Takes over from a writer that was killed, at whatever instruction.

        Raises:
            OSError: this host does not support membarrier(2).
        """
        self._live = live
        self._free = {
            name: _Free(spare, index) for index, (name, spare) in enumerate(live.spares.items())
        }
        # (view, numbers by table): rows that no lookup of this or a later view reads
        self._replaced: deque[tuple[int, dict[str, Numbers]]] = deque()
        membarrier.barrier()
        self._take_out_uncommitted()
        self.rows_changed = int(np.count_nonzero(live.newest))

    @property
    def memory_bytes(self) -> int:
        """Returns the bytes that changed rows have taken; they are used again, not given back."""
        return sum(
            int(self._live.peaks[one.index]) * _spare_bytes(one.spare)
            for one in self._free.values()
        )

    def apply(self, seq: int, changes: Sequence[ChangedRows]) -> None:
        """Makes ``changes`` visible, all at once, as the state after delta ``seq``.

        Args:
            changes: rows of each table at most once, each row once.

        Raises:
            RowsFullError: the rows do not fit. Nothing has changed.
            StoreError: ``seq`` is too large.
        """
        live = self._live
        view = live.committed[0] + 1
        live.check_numbers(view, seq)
        changes = [change for change in changes if len(change.numbers)]
        self._free_unseen()
        self._check_room(changes)
        written = [(change, self._write(change, view)) for change in changes]
        live.set_written(view)
        membarrier.barrier()  # a reader that finds a spare row finds all of the above, too
        replaced = {}
        for change, numbers in written:
            newest = self._newest(change.table.name)
            before = newest[change.numbers]
            newest[change.numbers] = numbers
            replaced[change.table.name] = before[before != 0]
            self.rows_changed += int(np.count_nonzero(before == 0))
        membarrier.barrier()
        live.commit(view, seq)
        self._replaced.append((view, replaced))

    def _write(self, change: ChangedRows, view: int) -> Numbers:
        """Writes rows that no lookup reads yet; returns the numbers of their spare rows."""
        free = self._free[change.table.name]
        numbers = self._allocate(free, len(change.numbers))
        free.spare.rows[numbers - free.spare.start] = change.values
        self._live.views[numbers] = view
        self._live.before[numbers] = self._newest(change.table.name)[change.numbers]
        return numbers

    def _newest(self, table: str) -> Numbers:
        spare = self._live.spares[table]
        return self._live.newest[spare.row_start : spare.row_start + spare.table.num_embeddings]

    def _allocate(self, free: _Free, count: int) -> Numbers:
        """Returns the numbers of ``count`` free rows, first those that were used before."""
        known: Numbers = np.concatenate([*free.numbers, np.zeros(0, np.uint32)])
        taken, rest = known[:count], known[count:]
        free.numbers = [rest] if len(rest) else []
        missing = count - len(taken)
        if not missing:
            return taken
        peak = int(self._live.peaks[free.index])
        self._live.peaks[free.index] = peak + missing
        first = free.spare.start + peak
        return np.concatenate([taken, np.arange(first, first + missing, dtype=np.uint32)])

    def _check_room(self, changes: Sequence[ChangedRows]) -> None:
        """Raises RowsFullError if the memory, or the spare rows of a table, do not suffice."""
        missing = {}
        for change in changes:
            free = self._free[change.table.name]
            missing[change.table.name] = max(0, len(change.numbers) - free.count)
        needed = sum(
            count * _spare_bytes(self._free[name].spare) for name, count in missing.items()
        )
        if self.memory_bytes + needed > self._live.memory_max:
            raise RowsFullError(
                f"changed rows have {self.memory_bytes} bytes, {needed} more are needed, the limit "
                f"is {self._live.memory_max}"
            )
        for name, count in missing.items():
            free, most = self._free[name], len(self._live.spares[name].rows)
            if int(self._live.peaks[free.index]) + count > most:
                raise RowsFullError(
                    f"table {name!r} has {most} rows for changes, and {count} more are needed: "
                    "lookups still read the others"
                )

    def _free_unseen(self) -> None:
        """Frees the replaced rows that no lookup can read any more."""
        live = self._live
        view = live.committed[0]
        live.raise_floor(view)
        membarrier.barrier()  # a reader finds the new floor, or this process finds its cell
        oldest = live.oldest_read()
        while self._replaced and self._replaced[0][0] <= min(view, oldest):
            for table, numbers in self._replaced.popleft()[1].items():
                self._free[table].numbers.append(numbers)

    def _take_out_uncommitted(self) -> None:
        """Makes every row's newest spare row one that is committed.

        A lookup that began before may still follow a row that is taken out. Its memory is used
        again once all lookups have a later view, which the commit at the end begins.
        """
        live = self._live
        view, seq = live.committed
        changed = np.flatnonzero(live.newest)
        newest = live.newest[changed]
        while len(late := np.flatnonzero(live.views[newest] > view)):
            newest[late] = live.before[newest[late]]
        live.newest[changed] = newest
        in_use = np.zeros(len(live.views), bool)
        in_use[newest] = True
        unused = {}
        for name, free in self._free.items():
            start = free.spare.start
            used_once = in_use[start : start + int(live.peaks[free.index])]
            unused[name] = (start + np.flatnonzero(~used_once)).astype(np.uint32)
        live.set_written(view + 1)
        membarrier.barrier()
        live.commit(view + 1, seq)
        self._replaced.append((view + 1, unused))


def _spare_bytes(spare: SpareRows) -> int:
    return spare.table.row_bytes + BYTES_PER_SPARE
