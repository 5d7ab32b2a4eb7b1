"""Unpooled lookups in parts: each part is asked once for each distinct row, and the rows are spread
over the ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from embedserve.fanout.partition import Partition, PartLookup


class UnpooledBatch:
    """A batch that is looked up in the parts of an unpooled model."""

    def __init__(self, partition: Partition, ids: np.ndarray, lengths: np.ndarray) -> None:
        self._partition = partition
        manifest = partition.manifest
        features = len(manifest.features)
        per_feature = lengths.reshape(features, -1)
        self._examples = per_feature.shape[1]
        self._lengths = per_feature
        counts = per_feature.sum(axis=1, dtype=np.int64)
        self._ends = np.append(0, counts.cumsum())
        distinct, self._inverse, distinct_counts = [], [], []
        for start, end in zip(self._ends[:-1].tolist(), self._ends[1:].tolist(), strict=True):
            rows, inverse = np.unique(ids[start:end], return_inverse=True)
            distinct.append(rows)
            self._inverse.append(inverse.reshape(-1))
            distinct_counts.append(rows.size)
        self._distinct_ends = np.append(0, np.cumsum(distinct_counts))
        self._divided = partition.divide(
            np.concatenate(distinct), np.array(distinct_counts, np.int32)
        )

    def lookups(self) -> list[PartLookup]:
        """Returns the lookups of the parts that have ids of the batch, one example for each."""
        partition, divided = self._partition, self._divided
        dim = partition.manifest.length_per_key[0]
        lookups = []
        for part, manifest in enumerate(partition.parts):
            lengths = divided.lengths[part, :, 0]
            if not lengths.any():
                continue
            index = [partition.manifest.features.index(one) for one in manifest.features]
            rows = sum(int(lengths[index[one.feature]]) for one in manifest.columns)
            lookups.append(divided.lookup(part, lengths[partition.features[part]], (rows, dim)))
        return lookups

    def prepare(self) -> None:
        """Does nothing: there is nothing to prepare while the parts look up."""

    def merge(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the rows of the batch, float32 [n, dim]: for each key one row for each id.

        Args:
            values: float32 values of each of ``lookups``, in that order and shape.
        """
        manifest = self._partition.manifest
        asked = [lookup.part for lookup in self.lookups()]
        by_part = dict(zip(asked, values, strict=True))
        result = []
        for column in manifest.columns:
            rows = self._rows_of(column.feature, column.table.name, by_part)
            result.append(rows[self._inverse[column.feature]])
        return np.concatenate(result)

    def _rows_of(self, feature: int, table: str, by_part: dict[int, np.ndarray]) -> np.ndarray:
        """Returns the distinct rows of ``table`` for ``feature``, in the order in which they were
        asked for: ascending, and so part by part."""
        manifest = self._partition.manifest
        pieces = [np.empty((0, manifest.length_per_key[0]), np.float32)]
        for part, values in by_part.items():
            described = self._partition.parts[part]
            start = 0
            for column in described.columns:
                name = described.features[column.feature]
                index = manifest.features.index(name)
                count = int(self._divided.lengths[part, index, 0])
                if index == feature and column.table.name == table:
                    pieces.append(values[start : start + count])
                start += count
        return np.concatenate(pieces)

    def examples_on(self, part: int) -> np.ndarray:
        """Returns the indices of the examples that have ids on ``part``."""
        divided, found = self._divided, []
        for feature in range(len(self._partition.manifest.features)):
            before = int(divided.lengths[:part, feature].sum())
            rows = slice(before, before + int(divided.lengths[part, feature, 0]))
            is_there = np.zeros(
                self._distinct_ends[feature + 1] - self._distinct_ends[feature], bool
            )
            is_there[rows] = True
            bags = np.repeat(np.arange(self._examples), self._lengths[feature])
            found.append(bags[is_there[self._inverse[feature]]])
        return np.unique(np.concatenate(found))
