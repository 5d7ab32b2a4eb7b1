"""Measures how the rows of a table changed between two versions, block by block.

Takes the stored rows of both versions and returns counts, distances and cosines. version_diff.py
selects the tables to compare. Never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embedserve_store.format.row_layout import dequantize_rows
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.format.tables_file import BLOCK_BYTES


@dataclass(frozen=True)
class RowDiff:
    """Difference between the rows of two tables of equal width, compared by row number.

    The relative distance of a changed row is |after - before| / |before|, over the values that a
    lookup adds up. A row that changes from all zeros has no relative distance. It counts in
    rows_from_zero and in no mean.
    """

    rows: int
    """Number of compared rows: the rows of the smaller table."""
    rows_changed: int = 0
    """Number of rows whose stored bytes differ, or whose values differ if the dtypes do."""
    rows_from_zero: int = 0
    """Number of changed rows that were all zeros before."""
    relative_l2_mean: float = 0.0
    relative_l2_max: float = 0.0
    row_max: int | None = None
    """Number of the row with relative_l2_max; None if no changed row has a relative distance."""
    cosine_mean: float = 1.0
    """Mean cosine over the rows of relative_l2_mean. A row that is now all zeros counts as 0."""

    @property
    def share_changed(self) -> float:
        return self.rows_changed / self.rows


class RowComparison:
    """Accumulates a RowDiff over blocks of rows, in a few times BLOCK_BYTES of memory."""

    def __init__(self, before: TableSpec, after: TableSpec) -> None:
        self._specs = before, after
        self._rows = self._changed = self._from_zero = self._measured = 0
        self._distance = self._cosine = 0.0
        self._worst: tuple[float, int | None] = (0.0, None)

    @property
    def block_rows(self) -> int:
        """Number of rows whose float64 values fill a block of BLOCK_BYTES; at least 1."""
        return max(1, BLOCK_BYTES // (8 * self._specs[0].embedding_dim))

    def add(self, before: NDArray[np.uint8], after: NDArray[np.uint8]) -> None:
        """Adds the next stored rows of both tables, contiguous uint8 [n, row_bytes] each."""
        changed = self._changed_rows(before, after)
        old, new = self._values(0, before[changed]), self._values(1, after[changed])
        old_norm = np.linalg.norm(old, axis=1)
        moved = np.linalg.norm(new - old, axis=1)
        measurable = (old_norm > 0) | (moved == 0)
        self._from_zero += len(changed) - int(measurable.sum())
        self._add_drift(
            numbers=self._rows + changed[measurable],
            distance=moved[measurable] / np.where(old_norm, old_norm, 1.0)[measurable],
            cosine=cosines(old, new)[measurable],
        )
        self._rows += len(before)
        self._changed += len(changed)

    def _changed_rows(
        self, before: NDArray[np.uint8], after: NDArray[np.uint8]
    ) -> NDArray[np.intp]:
        if self._specs[0].dtype == self._specs[1].dtype:
            # In every dtype a row is a multiple of 2 bytes, and 2-byte words compare faster.
            differs = before.view("<u2") != after.view("<u2")
        else:
            differs = self._values(0, before) != self._values(1, after)
        return np.flatnonzero(differs.any(axis=1))

    def _values(self, which: int, rows: NDArray[np.uint8]) -> NDArray[np.float64]:
        """Returns the values as float64, in which the square of any float32 value fits."""
        spec = self._specs[which]
        return dequantize_rows(rows, spec.dtype, spec.embedding_dim).astype(np.float64)

    def _add_drift(
        self, numbers: NDArray[np.intp], distance: NDArray[np.float64], cosine: NDArray[np.float64]
    ) -> None:
        if not len(numbers):
            return
        self._measured += len(numbers)
        self._distance += float(distance.sum())
        self._cosine += float(cosine.sum())
        worst = int(distance.argmax())
        if self._worst[1] is None or distance[worst] > self._worst[0]:
            self._worst = float(distance[worst]), int(numbers[worst])

    def result(self) -> RowDiff:
        return RowDiff(
            rows=self._rows,
            rows_changed=self._changed,
            rows_from_zero=self._from_zero,
            relative_l2_mean=self._distance / max(1, self._measured),
            relative_l2_max=self._worst[0],
            row_max=self._worst[1],
            cosine_mean=self._cosine / self._measured if self._measured else 1.0,
        )


def cosines(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the cosines of the rows of ``a`` and ``b`` [n, dim].

    The cosine is 1 for two rows of zeros, and 0 where only one of the two is zeros.
    """
    lengths_a, lengths_b = np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)
    products = lengths_a * lengths_b
    both_zero = (lengths_a == 0) & (lengths_b == 0)
    result: NDArray[np.float64] = np.einsum("nd,nd->n", a, b) / np.where(products, products, 1.0)
    result[both_zero] = 1.0
    return result
