"""Collects the unique row numbers of many files, in memory of the order of the result."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MERGE_MIN = 1 << 20
"""Row numbers that wait to be merged, at least; 8 MiB. As many wait as are merged already, so that
each number is sorted a few times only."""


class RowNumbers:
    """Unique row numbers of a table."""

    def __init__(self) -> None:
        self._unique = np.zeros(0, np.int64)
        self._waiting: list[NDArray[np.int64]] = []
        self._count = 0

    def add(self, numbers: NDArray[np.int64]) -> None:
        """Adds a copy of ``numbers``, which may be a view of a file's bytes."""
        self._waiting.append(numbers.astype(np.int64, copy=True))
        self._count += len(numbers)
        if self._count > max(MERGE_MIN, len(self._unique)):
            self._merge()

    def ascending(self) -> NDArray[np.int64]:
        """Returns the numbers, int64 [n], unique and ascending."""
        self._merge()
        return self._unique

    def _merge(self) -> None:
        numbers = np.concatenate([self._unique, *self._waiting])
        self._waiting, self._count = [], 0  # before numpy copies the numbers once more
        self._unique = np.unique(numbers)
