"""How far the rows of one table moved between two versions, added up block by block.

Takes stored rows of both and gives counts, distances and cosines; version_diff.py decides which
tables are worth it. Never imports torch.
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
    """How the rows that two tables of one width both have differ, by their numbers.

    A changed row's relative distance is |after - before| / |before| over the values that a lookup
    adds up. A row that was all zeros before has none: it counts in rows_from_zero and in no mean.
    """

    rows: int
    """Compared: as many as the smaller table has."""
    rows_changed: int = 0
    """Of other stored bytes; where the dtypes differ, of other values."""
    rows_from_zero: int = 0
    """Of those changed."""
    relative_l2_mean: float = 0.0
    relative_l2_max: float = 0.0
    row_max: int | None = None
    """The row of relative_l2_max; None where no changed row has a relative distance."""
    cosine_mean: float = 1.0
    """Over the rows of relative_l2_mean; a row that is all zeros after counts as 0."""

    @property
    def share_changed(self) -> float:
        return self.rows_changed / self.rows


class RowComparison:
    """Adds up a RowDiff over blocks of rows; holds a few times BLOCK_BYTES."""

    def __init__(self, before: TableSpec, after: TableSpec) -> None:
        self._specs = before, after
        self._rows = self._changed = self._from_zero = self._measured = 0
        self._distance = self._cosine = 0.0
        self._worst: tuple[float, int | None] = (0.0, None)

    @property
    def block_rows(self) -> int:
        """Rows whose float64 values fill a block."""
        return max(1, BLOCK_BYTES // (8 * self._specs[0].embedding_dim))

    def add(self, before: NDArray[np.uint8], after: NDArray[np.uint8]) -> None:
        """The next rows of both tables as stored, [n, row_bytes] each, contiguous."""
        changed = self._changed_rows(before, after)
        old, new = self._values(0, before[changed]), self._values(1, after[changed])
        old_norm, new_norm = np.linalg.norm(old, axis=1), np.linalg.norm(new, axis=1)
        moved = np.linalg.norm(new - old, axis=1)
        measurable = (old_norm > 0) | (moved == 0)
        self._from_zero += len(changed) - int(measurable.sum())
        self._add_drift(
            numbers=self._rows + changed[measurable],
            distance=_divide(moved, old_norm, 0)[measurable],
            cosine=_cosine(old, new, old_norm * new_norm, moved)[measurable],
        )
        self._rows += len(before)
        self._changed += len(changed)

    def _changed_rows(
        self, before: NDArray[np.uint8], after: NDArray[np.uint8]
    ) -> NDArray[np.intp]:
        if self._specs[0].dtype == self._specs[1].dtype:
            # Rows are whole numbers of 2 bytes in every dtype, and words compare faster.
            differs = before.view("<u2") != after.view("<u2")
        else:
            differs = self._values(0, before) != self._values(1, after)
        return np.flatnonzero(differs.any(axis=1))

    def _values(self, which: int, rows: NDArray[np.uint8]) -> NDArray[np.float64]:
        """float64, in which the squares of all float32 values have room."""
        spec = self._specs[which]
        return dequantize_rows(rows, spec.dtype, spec.embedding_dim).astype(np.float64)

    def _add_drift(
        self,
        numbers: NDArray[np.intp],
        distance: NDArray[np.float64],
        cosine: NDArray[np.float64],
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


def _divide(
    above: NDArray[np.float64], below: NDArray[np.float64], where_zero: float
) -> NDArray[np.float64]:
    result = np.full_like(above, where_zero)
    return np.divide(above, below, out=result, where=below > 0)


def _cosine(
    old: NDArray[np.float64],
    new: NDArray[np.float64],
    norms: NDArray[np.float64],
    moved: NDArray[np.float64],
) -> NDArray[np.float64]:
    """1 for rows whose values are the same, both zero included; 0 where one of two is zero."""
    cosine = _divide(np.einsum("ij,ij->i", old, new), norms, 0)
    cosine[moved == 0] = 1
    return cosine
