"""Requests and outcomes of each named caller, counted in cells of shared memory.

Workers need not agree on the entry of a caller: its count is the sum over all its entries. Callers
beyond CALLERS_MAX are counted together, so that a large token file does not create an unbounded
number of series.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import numpy as np

from embedserve.metrics.families import Sample
from embedserve.metrics.request_metrics import OUTCOMES
from embedserve.metrics.shared_counters import KeyedTable, WorkerCounters, key_of

CALLERS_MAX = 256
"""Callers that one worker counts individually."""
OTHERS = "(others)"
"""Label of all callers beyond CALLERS_MAX. It is not a valid name of a token."""


class Callers(Protocol):
    """Source of the named callers and of their request counts.

    Attributes:
        names: names of the current callers: the same object until they change.
    """

    names: frozenset[str]

    def take_counts(self) -> Iterable[tuple[str, Mapping[str, int]]]:
        """Returns (name, requests by outcome) of each caller that sent requests since the last
        call."""


class CallerMetrics:
    """Request counters of each caller, of this process.

    Attributes:
        callers: source of the counts; None if no caller has a name.
    """

    def __init__(self, counters: WorkerCounters) -> None:
        self.callers: Callers | None = None
        self._table = KeyedTable(counters, CALLERS_MAX + 1, len(OUTCOMES))
        self._table.entries[-1].claim(key_of(OTHERS))
        self._adopt(frozenset())

    def _adopt(self, names: frozenset[str]) -> None:
        """Uses ``names`` as those of the current callers. It hashes all of them, therefore once for
        each change, not for each flush."""
        self._names = names
        self._by_key = {key_of(name): name for name in (*names, OTHERS)}
        self._is_gone = self._table.gone(self._by_key)
        self._entries: dict[str, int] = {}

    def flush(self) -> None:
        """Adds the requests since the last flush to the shared cells."""
        if self.callers is None:
            return
        if self.callers.names is not self._names:
            self._adopt(self.callers.names)
        for name, counts in self.callers.take_counts():
            i = self._entries.get(name)
            if i is None:
                i = self._entries[name] = self._claim(name)
            self._table.own[i, 1:] += [counts.get(outcome, 0) for outcome in OUTCOMES]

    def _claim(self, name: str) -> int:
        """Returns the index of the entry for ``name``, which may be that of a caller that is gone,
        or else the common entry of all others."""
        i = self._table.find(name, self._is_gone)
        if i is None:
            return CALLERS_MAX
        self._table.entries[i].claim(key_of(name))
        self._is_gone[i] = False
        return i

    def samples(self) -> Iterator[Sample]:
        """Yields the requests of the callers that had names at the last flush, summed over all
        workers; zero counts are left out."""
        cells = self._table.every.reshape(-1, 1 + len(OUTCOMES))
        keys, entries = np.unique(cells[:, 0], return_inverse=True)
        sums = np.zeros((len(keys), len(OUTCOMES)))
        np.add.at(sums, entries, cells[:, 1:])
        for key, counts in zip(keys.tolist(), sums.tolist(), strict=True):
            name = self._by_key.get(key)
            if name is None:
                continue
            for outcome, count in zip(OUTCOMES, counts, strict=True):
                if count:
                    yield "embedserve_caller_requests", [name, outcome], count
