"""Computes checksums of a table's rows, so that two tables can be compared without keeping either.

A checksum is linear: the checksums of column-wise shards add up to the checksum of the whole row.
It detects accidental changes, not forgeries. Never imports torch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1


def row_checksums(rows: NDArray[np.float32], first_column: int = 0) -> NDArray[np.uint64]:
    """Returns the checksum of each row, uint64 [n].

    The bits of each value are multiplied by an odd factor of its column and added up modulo 2**64.
    Any change of a single value therefore changes the checksum.

    Args:
        rows: values [n, dim], the columns of the table from ``first_column`` on.
    """
    factors = _factors(first_column, rows.shape[1])
    bits = np.ascontiguousarray(rows, np.float32).view(np.uint32).astype(np.uint64)
    checksums: NDArray[np.uint64] = bits @ factors
    return checksums


def _factors(start: int, count: int) -> NDArray[np.uint64]:
    """Returns the odd factors of the columns [start, start + count), from SplitMix64."""
    return np.array([_mixed(column) | 1 for column in range(start, start + count)], np.uint64)


def _mixed(number: int) -> int:
    z = ((number + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
