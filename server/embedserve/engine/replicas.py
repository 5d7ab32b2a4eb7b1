"""Whole copies of a model's rows, each on a device of its own: which of them looks a batch up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    the next in turn. From several threads at once.

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
        with self._least_loaded(ids.size + lengths.size) as replica:
            return replica.lookup(ids, lengths, weights, in_half)

    @contextmanager
    def _least_loaded(self, work: int) -> Iterator[Replica]:
        """Within, it has so much more ``work``."""
        count = len(self.each)
        with self._lock:
            in_turn = ((self._turn + i) % count for i in range(count))
            chosen = min(in_turn, key=self._under_way.__getitem__)
            self._under_way[chosen] += work
            self._turn = chosen + 1
        try:
            yield self.each[chosen]
        finally:
            with self._lock:
                self._under_way[chosen] -= work
