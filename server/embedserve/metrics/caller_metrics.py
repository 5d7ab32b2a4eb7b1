"""What was answered to each caller who has a name, in places of a slot.

Each worker has its own places, whose first cell tells whose they are: they agree on nothing, and
what is read of a name is the sum of all its places. A name past CALLERS_MAX is counted with all
others that have no place, so that a file of many tokens makes no more series than that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Protocol

import numpy as np

from embedserve.metrics.shared_counters import WorkerCounters

CALLERS_MAX = 256
"""Names that are counted alone, by one worker."""
OTHERS = "(others)"
"""Of all others. No name that a token may have."""
OWNER_BYTES = 6
"""Of a name's hash: a cell holds it exactly."""


class Callers(Protocol):
    """Those who have names."""

    def names(self) -> Collection[str]:
        """Of those that there are now."""

    def take_counts(self) -> Iterable[tuple[str, Mapping[str, int]]]:
        """(name, requests by outcome) of those that asked since the last time."""


def caller_cells(outcomes: Sequence[str]) -> int:
    """That the callers take of a slot."""
    return (CALLERS_MAX + 1) * (1 + len(outcomes))


class CallerMetrics:
    """What one process answered to each caller.

    Attributes:
        callers: who asks; None where nobody has a name.
    """

    def __init__(self, counters: WorkerCounters, outcomes: Sequence[str]) -> None:
        """``outcomes`` are all that a request may have."""
        self.callers: Callers | None = None
        self._outcomes = outcomes
        self._cells = counters.allocate(caller_cells(outcomes))
        self._own = self._cells.own.reshape(CALLERS_MAX + 1, -1)
        self._own[CALLERS_MAX, 0] = _owner(OTHERS)
        self._place: dict[str, int] = {}

    def flush(self) -> None:
        """Counts what was asked since the last time."""
        if self.callers is None:
            return
        for name, counts in self.callers.take_counts():
            place = self._place.get(name)
            if place is None:
                place = self._take(name, self.callers.names())
            self._own[place, 1:] += [counts.get(outcome, 0) for outcome in self._outcomes]

    def _take(self, name: str, names: Collection[str]) -> int:
        """The place of ``name``: the one that it has, a free one, that of somebody who is none of
        ``names`` any more, or the one of all others."""
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
        """(name, outcome, requests) of all workers, where there were any."""
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
    """Of a place; 0 of none."""
    digest = blake2b(name.encode(), digest_size=OWNER_BYTES).digest()
    return float(int.from_bytes(digest, "big") + 1)
