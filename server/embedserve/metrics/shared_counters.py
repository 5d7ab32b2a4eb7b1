"""Counters in memory shared by all workers: one row of float64 cells for each worker.

A worker writes its own row and reads all rows. A row outlives its worker: the replacement continues
from the stored values, so that no counter goes backwards. The first cells of a row are exchanged
between the worker and the supervisor. No locks are needed: a cell is eight aligned bytes and has
one writer.
"""

from __future__ import annotations

import mmap
from copy import copy

import numpy as np
from numpy.typing import NDArray

READY, RESTARTS, HANGS, BEATS = 0, 1, 2, 3
CONTROL_CELLS = 4
"""Control cells at the start of each row: whether the worker is ready, how often it was replaced,
how often because of a hang, and its heartbeats. The worker writes the heartbeats."""

Cells = NDArray[np.float64]


class SharedCounters:
    """Rows of all workers. They are allocated before the workers are forked, which then share
    them."""

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
        """Returns the number of heartbeats of a worker."""
        return float(self.rows[worker, BEATS])


class CounterCells:
    """A range of cells: this worker's (``own``, float64 [n]) and all workers' (``every``, float64
    [workers, n])."""

    def __init__(self, own: Cells, every: Cells, is_ready: Cells) -> None:
        self.own = own
        self.every = every
        self._is_ready = is_ready

    def total(self, of: NDArray[np.bool_] | None = None) -> Cells:
        """Returns the sums over all workers, including those that died, or over those for which
        ``of`` is True."""
        total: Cells = (self.every if of is None else self.every[of]).sum(axis=0)
        return total

    def detach(self) -> None:
        """Detaches from shared memory: later counts stay private, since the cells are reused."""
        self.own = self.own.copy()

    def of_ready(self, of: NDArray[np.bool_] | None = None) -> Cells:
        """Returns [ready workers, n], for values that a dead worker no longer has; limited to the
        workers for which ``of`` is True."""
        is_shown = self._is_ready != 0
        rows: Cells = self.every[is_shown if of is None else is_shown & of]
        return rows


class WorkerCounters:
    """One worker's row. Its cells are allocated from the front, in the same order in every
    worker."""

    def __init__(self, shared_counters: SharedCounters, worker: int) -> None:
        self._rows = shared_counters.rows
        self.worker = worker
        self.taken = 0
        """Number of cells allocated."""

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
        """Records a heartbeat, which shows the supervisor that this worker's event loop is
        running."""
        self._rows[self.worker, BEATS] += 1

    def allocate(self, count: int) -> CounterCells:
        """Returns the next ``count`` cells.

        Raises:
            ValueError: the row has too few cells left.
        """
        start = CONTROL_CELLS + self.taken
        every = self._rows[:, start : start + count]
        if every.shape[1] < count:
            raise ValueError(f"count is {count}: a slot has {every.shape[1]} more cells")
        self.taken += count
        return CounterCells(every[self.worker], every, self._rows[:, READY])

    def rewind_to(self, start: int) -> WorkerCounters:
        """Returns a view of the same row that allocates its cells again from ``start``."""
        slot = copy(self)
        slot.taken = start
        return slot

    def empty(self, start: int, end: int) -> None:
        """Zeroes this worker's allocated cells from ``start`` to ``end``."""
        self._rows[self.worker, CONTROL_CELLS + start : CONTROL_CELLS + end] = 0.0


def single_worker_counters(cells: int) -> WorkerCounters:
    """Returns the counters of a single process without a supervisor."""
    slots = SharedCounters(1, cells)
    slots.set_ready(0, True)
    return WorkerCounters(slots, 0)
