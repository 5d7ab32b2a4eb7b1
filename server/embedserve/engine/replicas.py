"""Whole copies of a model's rows, each on a device of its own: which of them looks a batch up."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Protocol

import numpy as np


class Replica(Protocol):
    """One copy, and what looks up in it; device_batches.DeviceBatches is one."""

    def lookup(
        self,
        ids: np.ndarray,
        lengths: np.ndarray,
        weights: np.ndarray | None = None,
        in_half: bool = False,
    ) -> np.ndarray: ...


class Replicas:
    """Gives each batch to the replica with the least work under way, in ids and bags; of equals to
    the next in turn. From several threads at once; while no more than two batches for each
    replica are under way, none has more work than two of the largest are.

    Attributes:
        each: all of them.
    """

    def __init__(self, each: Sequence[Replica]) -> None:
        """
        Args:
            each: at least one.
        """
        self.each = tuple(each)
        self._under_way = [0] * len(self.each)
        self._turn = 0
        self._lock = Lock()

    def lookup(
        self,
        ids: np.ndarray,
        lengths: np.ndarray,
        weights: np.ndarray | None = None,
        in_half: bool = False,
    ) -> np.ndarray:
        """As Engine.lookup, by one of them."""
        work = ids.size + lengths.size
        chosen = self._begin(work)
        try:
            return self.each[chosen].lookup(ids, lengths, weights, in_half)
        finally:
            with self._lock:
                self._under_way[chosen] -= work

    def _begin(self, work: int) -> int:
        """The number of the replica that has so much more ``work`` now."""
        count = len(self.each)
        with self._lock:
            in_turn = ((self._turn + i) % count for i in range(count))
            chosen = min(in_turn, key=self._under_way.__getitem__)
            self._under_way[chosen] += work
            self._turn = chosen + 1
        return chosen
