"""Requests and outcomes of each named caller, counted in cells of shared memory.

Workers need not agree on the entry of a caller: its count is the sum over all its entries. Callers
beyond CALLERS_MAX are counted together, so that a large token file does not create an unbounded
number of series.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from embedserve.metrics.families import Sample
from embedserve.metrics.shared_counters import KeyedTable, WorkerCounters, key_of, table_cells

CALLERS_MAX = 256
"""Callers that one worker counts individually."""
OTHERS = "(others)"
"""Label of all callers beyond CALLERS_MAX. It is not a valid name of a token."""


class Callers(Protocol):
    """Source of the named callers and of their request counts."""

    def names(self) -> Collection[str]:
        """Returns the names of the current callers."""

    def take_counts(self) -> Iterable[tuple[str, Mapping[str, int]]]:
        """Returns (name, requests by outcome) of each caller that sent requests since the last
        call."""


def caller_cells(outcomes: Sequence[str]) -> int:
    """Returns the number of cells that the callers take in a worker's row."""
    return table_cells(CALLERS_MAX + 1, len(outcomes))


class CallerMetrics:
    """Request counters of each caller, of this process.

    Attributes:
        callers: source of the counts; None if no caller has a name.
    """

    def __init__(self, counters: WorkerCounters, outcomes: Sequence[str]) -> None:
        """``outcomes`` are all possible outcomes of a request."""
        self.callers: Callers | None = None
        self._outcomes = outcomes
        self._table = KeyedTable(counters, CALLERS_MAX + 1, len(outcomes))
        self._table.entries[-1].claim(key_of(OTHERS))
        self._entries: dict[str, int] = {}

    def flush(self) -> None:
        """Adds the requests since the last flush to the shared cells."""
        if self.callers is None:
            return
        for name, counts in self.callers.take_counts():
            i = self._entries.get(name)
            if i is None:
                i = self._claim(name, self.callers.names())
            self._table.own[i, 1:] += [counts.get(outcome, 0) for outcome in self._outcomes]

    def _claim(self, name: str, names: Collection[str]) -> int:
        """Returns the index of the entry for ``name``, which may be that of a caller that is no
        longer among ``names``, or else the common entry of all others."""
        i = self._table.find(name, {*names, OTHERS})
        if i is None:
            return CALLERS_MAX
        self._table.entries[i].claim(key_of(name))
        self._entries = {one: at for one, at in self._entries.items() if at != i}
        self._entries[name] = i
        return i

    def samples(self) -> Iterator[Sample]:
        """Yields the requests of all workers; zero counts are left out."""
        if self.callers is None:
            return
        cells = self._table.every.reshape(-1, 1 + len(self._outcomes))
        keys, entries = np.unique(cells[:, 0], return_inverse=True)
        sums = np.zeros((len(keys), len(self._outcomes)))
        np.add.at(sums, entries, cells[:, 1:])
        counted = dict(zip(keys.tolist(), sums.tolist(), strict=True))
        for name in (*self.callers.names(), OTHERS):
            counts = counted.get(key_of(name), [])
            for outcome, count in zip(self._outcomes, counts, strict=False):
                if count:
                    yield "embedserve_caller_requests", [name, outcome], count
