"""Counters in memory shared by all workers: one row of float64 cells for each worker.

A worker writes its own row and reads all rows. A row outlives its worker: the replacement continues
from the stored values, so that no counter goes backwards. The first cells of a row are exchanged
between the worker and the supervisor. No locks are needed: a cell is eight aligned bytes and has
one writer.

The size of a row is fixed before the workers are forked, and is a little more than all counters
allocate. One counter more may not fit any more: its allocation then fails at each start.

Cells that belong to a name or to a version are allocated together with the cell of a key. They
start from zero when their key changes, and readers add up only the workers that have the same key.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

READY, RESTARTS, HANGS, BEATS = 0, 1, 2, 3
CONTROL_CELLS = 4
"""Control cells at the start of each row: whether the worker is ready, how often it was replaced,
how often because of a hang, and its heartbeats. The worker writes the heartbeats."""
CELLS = 4096
"""Further cells of a row, without those of served names and of parts. About 3,500 are allocated."""
KEY_BYTES = 6
"""Bytes of the hash of a name: 48 bits fit exactly into a float64 cell."""

Cells = NDArray[np.float64]
ClaimedKey = tuple[Cells, float]
"""All workers' cells of a key, float64 [workers], and this worker's key."""


class SharedCounters:
    """Rows of all workers. They are allocated before the workers are forked, which then share
    them."""

    def __init__(self, workers: int, cells_per_worker: int = CELLS) -> None:
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

    def __init__(
        self, own: Cells, every: Cells, is_ready: Cells, keys: Sequence[ClaimedKey]
    ) -> None:
        self.own = own
        self._every = every
        self._is_ready = is_ready
        self._keys = keys

    def rows(self) -> Cells:
        """Returns [workers with the same keys, n], including workers that died."""
        return self._rows(np.ones(len(self._every), np.bool_))

    def ready_rows(self) -> Cells:
        """Returns [ready workers with the same keys, n], for values that a dead worker no longer
        has."""
        return self._rows(self._is_ready != 0)

    def _rows(self, is_counted: NDArray[np.bool_]) -> Cells:
        for keys, key in self._keys:
            is_counted = is_counted & (keys == key)
        rows: Cells = self._every[is_counted]
        return rows

    def total(self) -> Cells:
        """Returns the sums of ``rows``, float64 [n]."""
        total: Cells = self.rows().sum(axis=0)
        return total

    def detach(self) -> None:
        """Detaches from shared memory: later counts stay private, since the cells are reused."""
        self.own = self.own.copy()


class WorkerCounters:
    """One worker's row. Its cells are allocated from the front, in the same order in every
    worker.

    Attributes:
        taken: number of cells allocated.
    """

    def __init__(self, shared_counters: SharedCounters, worker: int) -> None:
        self._rows = shared_counters.rows
        self._cells = self._rows[:, CONTROL_CELLS:]
        self._keys: tuple[ClaimedKey, ...] = ()
        self._allocated: list[CounterCells | KeyedCounters] = []
        self.worker = worker
        self.taken = 0

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
        every = self.take(count)
        cells = CounterCells(every[self.worker], every, self._rows[:, READY], self._keys)
        self._allocated.append(cells)
        return cells

    def allocate_keyed(self) -> KeyedCounters:
        """Returns counters of all cells that are left, after the cell of their key."""
        keyed = KeyedCounters(self, self.take(self._cells.shape[1] - self.taken))
        self._allocated.append(keyed)
        return keyed

    def take(self, count: int) -> Cells:
        """Returns the next ``count`` cells of all workers, float64 [workers, count].

        Raises:
            ValueError: the row has too few cells left.
        """
        every = self._cells[:, self.taken : self.taken + count]
        if every.shape[1] < count:
            raise ValueError(f"count is {count}: the row has {every.shape[1]} more cells")
        self.taken += count
        return every


class KeyedCounters(WorkerCounters):
    """Part of a row whose cells belong to a key, which is claimed before they are allocated.

    Attributes:
        key: this worker's key; 0 for none.
    """

    def __init__(self, parent: WorkerCounters, every: Cells) -> None:
        """``every`` are all workers' cells, the key's first: float64 [workers, 1 + n]."""
        self._rows = parent._rows
        self._cells = every[:, 1:]
        self._parent_keys = parent._keys
        self._allocated = []
        self.worker = parent.worker
        self._every_key = every[:, 0]
        self._own = every[self.worker]

    @property
    def key(self) -> float:
        return float(self._own[0])

    def is_key_common(self) -> bool:
        """Returns whether all ready workers with the same parent have this worker's key."""
        is_peer = self._rows[:, READY] != 0
        for keys, key in self._parent_keys:
            is_peer = is_peer & (keys == key)
        return bool((self._every_key[is_peer] == self.key).all())

    def claim(self, key: float) -> None:
        """Zeroes the cells unless they have this ``key``, and allocates them again from the front.
        Cells allocated before are detached from shared memory."""
        if self.key == key:
            self._detach_cells()
        else:
            self.release()
            self._own[0] = key
        self._keys = (*self._parent_keys, (self._every_key, key))
        self._allocated = []
        self.taken = 0

    def release(self) -> None:
        """Detaches and zeroes the cells; they have no key then."""
        self._detach_cells()
        self._own[0] = 0  # the cells belong to no key while they are zeroed
        self._own[1:] = 0

    def detach(self) -> None:
        """Detaches the cells and their key from shared memory."""
        self._detach_cells()
        self._own = self._own.copy()

    def _detach_cells(self) -> None:
        for cells in self._allocated:
            cells.detach()


class KeyedTable:
    """Entries of equal size in a worker's row, each for one name.

    Attributes:
        entries: counters of each entry.
        own: this worker's cells, the key's first: float64 [entries, 1 + n].
        every: all workers' cells, float64 [workers, entries, 1 + n].
    """

    def __init__(self, counters: WorkerCounters, entries: int, cells: int) -> None:
        """Allocates ``entries`` entries of ``cells`` cells each, and their keys."""
        every = counters.take(entries * (1 + cells))
        self.every = every.reshape(counters.workers, entries, 1 + cells)
        self.own = self.every[counters.worker]
        self.entries = [KeyedCounters(counters, self.every[:, i]) for i in range(entries)]

    def find(self, name: str, is_gone: NDArray[np.bool_] | None = None) -> int | None:
        """Returns the index of an entry that ``name`` may claim, or None if there is none.

        The entry is the one that this worker or its predecessor uses for ``name``, the one that
        another worker uses for it, or one that is free in all workers.

        Args:
            is_gone: entries that any name may take, as ``gone`` returns them; None for none. If it
                is given, any entry that is free in this worker, or gone, is the last choice.
                Workers then have different entries for a name.
        """
        key, own, keys = key_of(name), self.own[:, 0], self.every[:, :, 0]
        is_open = (own == key) | (own == 0)
        if is_gone is not None:
            is_open |= is_gone
        if not is_open.any():
            return None
        choices = [own == key, (keys == key).any(axis=0), ~keys.any(axis=0)]
        if is_gone is not None:
            choices += [own == 0, is_gone]
        for choice in choices:
            found = choice & is_open
            if found.any():
                return int(found.argmax())
        return None

    def gone(self, kept: Collection[float]) -> NDArray[np.bool_]:
        """Returns which of this worker's entries have a key that is not ``kept``, bool
        [entries]."""
        return np.array([key != 0 and key not in kept for key in self.own[:, 0].tolist()])

    def keep(self, names: Iterable[str]) -> None:
        """Releases this worker's entries of all names but ``names``."""
        for i in np.flatnonzero(self.gone({*map(key_of, names)})):
            self.entries[i].release()


def key_of(name: str) -> float:
    """Returns the key of an entry for ``name``; 0 marks a free entry."""
    digest = blake2b(name.encode(), digest_size=KEY_BYTES).digest()
    return float(int.from_bytes(digest, "big") + 1)


def single_worker_counters(cells: int = CELLS) -> WorkerCounters:
    """Returns the counters of a single process without a supervisor."""
    shared = SharedCounters(1, cells)
    shared.set_ready(0, True)
    return WorkerCounters(shared, 0)
