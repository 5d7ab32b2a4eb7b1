"""Where counts are kept: a row of float64 cells for each worker, in memory that workers share.

A worker writes its own row and reads all of them. A row outlives its worker: the one that
replaces it counts on from there, so that no counter goes backwards. The first cells of a row are
what a worker and the supervisor tell each other. No locks: a cell is eight aligned bytes, and each
has one writer.
"""

from __future__ import annotations

import mmap
from copy import copy

import numpy as np
from numpy.typing import NDArray

READY, RESTARTS, HANGS, BEATS = 0, 1, 2, 3
CONTROL_CELLS = 4
"""Of each row: whether its worker is ready, how often it was replaced, and how often for a hang;
and signs of life, which are the worker's."""

Cells = NDArray[np.float64]


class SharedCounters:
    """The rows of all workers; made before they are forked, they are shared by them."""

    def __init__(self, workers: int, cells_per_worker: int) -> None:
        cells = CONTROL_CELLS + cells_per_worker
        self._memory = mmap.mmap(-1, workers * cells * np.dtype(np.float64).itemsize)
        self.rows: Cells = np.frombuffer(self._memory, np.float64).reshape(workers, cells)

    def set_ready(self, worker: int, is_ready: bool) -> None:
        self.rows[worker, READY] = is_ready

    def count_restart(self, worker: int) -> None:
        self.rows[worker, RESTARTS] += 1

    def count_hang(self, worker: int) -> None:
        self.rows[worker, HANGS] += 1

    def beats(self, worker: int) -> float:
        """How often the worker has shown that it lives."""
        return float(self.rows[worker, BEATS])


class CounterCells:
    """Some cells of one worker (``own``, float64 [n]), and the same of all (``every``,
    float64 [workers, n])."""

    def __init__(self, own: Cells, every: Cells, is_ready: Cells) -> None:
        self.own = own
        self.every = every
        self._is_ready = is_ready

    def total(self, of: NDArray[np.bool_] | None = None) -> Cells:
        """Counts over all workers, those that died among them; or over those ``of`` which it is
        True."""
        total: Cells = (self.every if of is None else self.every[of]).sum(axis=0)
        return total

    def detach(self) -> None:
        """Has this process write elsewhere from now on: others take the cells."""
        self.own = self.own.copy()

    def of_ready(self, of: NDArray[np.bool_] | None = None) -> Cells:
        """[ready workers, n], for what a dead worker has no more of; or those ``of`` which it is
        True."""
        is_shown = self._is_ready != 0
        rows: Cells = self.every[is_shown if of is None else is_shown & of]
        return rows


class WorkerCounters:
    """One worker's row, whose cells are handed out from the front, always in the same order."""

    def __init__(self, shared_counters: SharedCounters, worker: int) -> None:
        self._rows = shared_counters.rows
        self.worker = worker
        self.taken = 0
        """Cells handed out."""

    @property
    def workers(self) -> int:
        return len(self._rows)

    def ready_workers(self) -> int:
        return int(np.count_nonzero(self._rows[:, READY]))

    def restarts(self) -> int:
        return int(self._rows[:, RESTARTS].sum())

    def hangs(self) -> int:
        return int(self._rows[:, HANGS].sum())

    def beat(self) -> None:
        """Shows the supervisor that this worker's event loop goes on."""
        self._rows[self.worker, BEATS] += 1

    def allocate(self, count: int) -> CounterCells:
        """The next ``count`` cells.

        Raises:
            ValueError: the row has no more.
        """
        start = CONTROL_CELLS + self.taken
        every = self._rows[:, start : start + count]
        if every.shape[1] < count:
            raise ValueError(f"count is {count}: a slot has {every.shape[1]} more cells")
        self.taken += count
        return CounterCells(every[self.worker], every, self._rows[:, READY])

    def rewind_to(self, start: int) -> WorkerCounters:
        """The same row, which hands out its cells anew from the one at ``start``."""
        slot = copy(self)
        slot.taken = start
        return slot

    def empty(self, start: int, end: int) -> None:
        """Has the cells of this worker that were handed out from ``start`` to ``end`` be zero."""
        self._rows[self.worker, CONTROL_CELLS + start : CONTROL_CELLS + end] = 0.0


def single_worker_counters(cells: int) -> WorkerCounters:
    """The slot of a process that has no supervisor, and is all there is."""
    slots = SharedCounters(1, cells)
    slots.set_ready(0, True)
    return WorkerCounters(slots, 0)
