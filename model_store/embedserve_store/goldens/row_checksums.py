"""Checksums of a table's rows, to compare all rows of two tables without keeping either.

A checksum is linear: those of column-wise shards add up to that of the whole row. It finds
accidents, not forgeries. Imports no torch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1


def row_checksums(rows: NDArray[np.float32], first_column: int = 0) -> NDArray[np.uint64]:
    """Returns a checksum [n] for each of ``rows`` [n, dim], which begin at ``first_column``.

    The bits of each value, times an odd factor of its column, are added up modulo 2**64, so that
    any change of a single value changes the sum.
    """
    factors = _factors(first_column, rows.shape[1])
    bits = np.ascontiguousarray(rows, np.float32).view(np.uint32).astype(np.uint64)
    checksums: NDArray[np.uint64] = bits @ factors
    return checksums


def _factors(start: int, count: int) -> NDArray[np.uint64]:
    """Returns the odd factors of columns ``start`` to ``start + count``, by SplitMix64."""
    return np.array([_mixed(column) | 1 for column in range(start, start + count)], np.uint64)


def _mixed(number: int) -> int:
    z = ((number + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
