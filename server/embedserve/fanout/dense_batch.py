"""Pooled lookups in parts of a batch with few empty bags.

Each part that has ids is asked for all examples, so that no bag is moved: what the parts return is
added column by column, in the order of the parts.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from embedserve.engine.pooled_values import to_float32
from embedserve.fanout.partition import DividedIds, Partition, PartLookup
from embedserve.fanout.pooled_columns import PooledColumns


class DenseBatch:
    """A batch that is looked up in the parts of a pooled model with its empty bags."""

    def __init__(
        self,
        partition: Partition,
        columns: PooledColumns,
        divided: DividedIds,
        cached: np.ndarray | None = None,
    ) -> None:
        """
        Args:
            cached: sums of the ids that were not divided, as UncachedIds has them.
        """
        self._partition, self._columns, self._divided = partition, columns, divided
        self._cached = cached
        self._examples = divided.lengths.shape[2]
        self._values: dict[int, np.ndarray] = {}

    def lookups(self) -> list[PartLookup]:
        """Returns the lookups of the parts that have ids of the batch."""
        divided, has_feature = self._divided, self._partition.has_feature
        return [
            divided.part_lookup(
                part,
                divided.lengths[part, has_feature[part]].reshape(-1),
                (self._examples, self._columns.widths[part]),
            )
            for part, (start, end) in enumerate(pairwise(divided.ends))
            if start < end
        ]

    def prepare(self) -> None:
        """Does nothing: there is nothing to prepare while the parts look up."""

    def add(self, part: int, values: np.ndarray) -> None:
        """Takes the values of ``part``, float32 or float16, in the shape of its lookup."""
        self._values[part] = values

    def merge(self) -> np.ndarray:
        """Returns the sums of the batch, float32 [examples, sum of dims]. Parts that have added
        nothing count as zeros."""
        columns = self._columns
        sums = np.zeros((self._examples, columns.whole_width), np.float32)
        for part in sorted(self._values):
            values = self._values[part]
            if values.dtype != np.float32:
                values = to_float32(values.copy())  # torch takes no read-only view of a response
            for own, whole in columns.part_spans[part]:
                sums[:, whole] += values[:, own]
        if self._cached is not None:
            sums += columns.whole.without_padding(self._cached)
        return sums

    def count_ids_on(self, part: int) -> np.ndarray:
        """Returns the numbers of ids on ``part``, int [features, examples]."""
        counts: np.ndarray = self._divided.lengths[part]
        return counts
