"""Load balancing over replicas: full copies of a model's rows, each on its own device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Lock

import numpy as np


class Replicas:
    """Sends each batch to the replica with the least work in flight, counted in ids and bags.

    Equally loaded replicas are chosen in turn. Thread-safe. While at most two batches per replica
    are in flight, no replica has more work than two of the largest batches.

    Attributes:
        each: lookups of all replicas.
    """

    def __init__(self, each: Iterable[Callable[..., np.ndarray]]) -> None:
        """
        Args:
            each: at least one lookup, such as that of a DeviceBatches.
        """
        self.each = tuple(each)
        self._in_flight = [0] * len(self.each)
        self._turn = 0
        self._lock = Lock()

    def lookup(
        self,
        ids: np.ndarray,
        lengths: np.ndarray,
        weights: np.ndarray | None = None,
        as_float16: bool = False,
    ) -> np.ndarray:
        """Looks up one batch on one of the replicas; arguments and result are those of
        Engine.lookup."""
        work = ids.size + lengths.size
        chosen = self._begin(work)
        try:
            return self.each[chosen](ids, lengths, weights, as_float16)
        finally:
            with self._lock:
                self._in_flight[chosen] -= work

    def _begin(self, work: int) -> int:
        """Chooses a replica, adds ``work`` to its load, and returns its index."""
        count = len(self.each)
        with self._lock:
            in_turn = ((self._turn + i) % count for i in range(count))
            chosen = min(in_turn, key=self._in_flight.__getitem__)
            self._in_flight[chosen] += work
            self._turn = chosen + 1
        return chosen
