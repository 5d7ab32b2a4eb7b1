"""Requests and outcomes of each named caller, counted in cells of shared memory.

Each worker assigns its own entries, whose first cell identifies the caller. Workers need not agree
on the assignment: a caller's count is the sum over all its entries. Callers beyond CALLERS_MAX are
counted together, so that a large token file does not create an unbounded number of series.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Protocol

import numpy as np

from embedserve.metrics.shared_counters import WorkerCounters

CALLERS_MAX = 256
"""Callers that one worker counts individually."""
OTHERS = "(others)"
"""Label of all callers beyond CALLERS_MAX. It is not a valid name of a token."""
OWNER_BYTES = 6
"""Bytes of the hash of a caller's name: 48 bits fit exactly into a float64 cell."""


class Callers(Protocol):
    """Source of the named callers and of their request counts."""

    def names(self) -> Collection[str]:
        """Returns the names of the current callers."""

    def take_counts(self) -> Iterable[tuple[str, Mapping[str, int]]]:
        """Returns (name, requests by outcome) of each caller that sent requests since the last
        call."""


def caller_cells(outcomes: Sequence[str]) -> int:
    """Returns the number of cells that the callers take in a worker's row."""
    return (CALLERS_MAX + 1) * (1 + len(outcomes))


class CallerMetrics:
    """Request counters of each caller, of this process.

    Attributes:
        callers: source of the counts; None if no caller has a name.
    """

    def __init__(self, counters: WorkerCounters, outcomes: Sequence[str]) -> None:
        """``outcomes`` are all possible outcomes of a request."""
        self.callers: Callers | None = None
        self._outcomes = outcomes
        self._cells = counters.allocate(caller_cells(outcomes))
        self._own = self._cells.own.reshape(CALLERS_MAX + 1, -1)
        self._own[CALLERS_MAX, 0] = _owner(OTHERS)
        self._place: dict[str, int] = {}

    def flush(self) -> None:
        """Adds the requests since the last flush to the shared cells."""
        if self.callers is None:
            return
        for name, counts in self.callers.take_counts():
            place = self._place.get(name)
            if place is None:
                place = self._take(name, self.callers.names())
            self._own[place, 1:] += [counts.get(outcome, 0) for outcome in self._outcomes]

    def _take(self, name: str, names: Collection[str]) -> int:
        """Returns the index of the entry for ``name``: its own, a free entry, an entry whose caller
        is no longer among ``names``, or else the common entry of all others."""
        owners, owner = self._own[:CALLERS_MAX, 0], _owner(name)
        kept = [_owner(one) for one in names]
        for found in (owners == owner, owners == 0, ~np.isin(owners, kept)):
            if found.any():
                place = int(found.argmax())
                break
        else:
            return CALLERS_MAX
        if owners[place] != owner:
            self._own[place] = 0.0
            owners[place] = owner
            self._place = {one: at for one, at in self._place.items() if at != place}
        self._place[name] = place
        return place

    def total(self) -> Iterator[tuple[str, str, float]]:
        """Yields (name, outcome, requests) of all workers; zero counts are left out."""
        if self.callers is None:
            return
        cells = self._cells.every.reshape(-1, 1 + len(self._outcomes))
        owners, which = np.unique(cells[:, 0], return_inverse=True)
        sums = np.zeros((len(owners), len(self._outcomes)))
        np.add.at(sums, which, cells[:, 1:])
        counted = dict(zip(owners.tolist(), sums.tolist(), strict=True))
        for name in (*self.callers.names(), OTHERS):
            counts = counted.get(_owner(name), [])
            for outcome, count in zip(self._outcomes, counts, strict=False):
                if count:
                    yield name, outcome, count


def _owner(name: str) -> float:
    """Returns the value of an entry's owner cell for ``name``; 0 marks a free entry."""
    digest = blake2b(name.encode(), digest_size=OWNER_BYTES).digest()
    return float(int.from_bytes(digest, "big") + 1)
