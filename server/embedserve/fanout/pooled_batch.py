"""Pooled lookups in parts: the bags that are requested of each part, and the sum of their vectors.

In a DenseBatch few bags are empty, and a part that has ids gets all examples. In a PackedBatch bags
without an id on a part are left out: those that have one are packed to the front of each feature.
The sums of the parts are added in the order of the parts, so that equal requests get equal bits,
whichever part responds first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from embedserve.engine.pooled_values import to_float32
from embedserve.fanout.partition import DividedIds, Partition, PartLookup
from embedserve.fanout.pooled_columns import PooledColumns


class PooledBatch(ABC):
    """A batch that is looked up in the parts of a pooled model."""

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
        self._set_up()

    @abstractmethod
    def _set_up(self) -> None:
        """Sets what the kind of batch needs besides."""

    def count_ids_on(self, part: int) -> np.ndarray:
        """Returns the numbers of ids on ``part``, int [features, examples]."""
        counts: np.ndarray = self._divided.lengths[part]
        return counts


class DenseBatch(PooledBatch):
    """A batch with its empty bags. No bag is moved: what the parts return is added column by
    column."""

    def _set_up(self) -> None:
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
            values = _as_float32(self._values[part])
            for own, whole in columns.part_spans[part]:
                sums[:, whole] += values[:, own]
        if self._cached is not None:
            sums += columns.whole.without_padding(self._cached)
        return sums


class PackedBatch(PooledBatch):
    """A batch without its empty bags."""

    def _set_up(self) -> None:
        parts, features, examples = self._divided.lengths.shape
        # A bag is one (part, feature, example) that has an id.
        flat = self._divided.lengths.reshape(-1)
        bags = np.flatnonzero(flat)
        self._bag_lengths = flat[bags]
        # Index of the bag's part and feature: part * features + feature.
        self._part_features = part_features = bags // examples
        self._bag_examples = bags - part_features * examples
        self._bag_parts = part_features // features
        counts = np.bincount(part_features, minlength=parts * features)
        self._sizes = counts.reshape(parts, features).max(axis=1)  # examples of each part's lookup
        # Position of each bag in its feature, on its part.
        self._bag_positions = np.arange(bags.size) - (counts.cumsum() - counts)[part_features]

    def lookups(self) -> list[PartLookup]:
        """Returns the lookups of the parts that have ids of the batch."""
        partition, divided, sizes = self._partition, self._divided, self._sizes
        ends = (sizes * partition.feature_counts).cumsum()
        spans = [0, *ends.tolist()]
        lengths = np.zeros(spans[-1], np.int32)
        indices = partition.feature_index.reshape(-1)[self._part_features]
        starts = (ends - sizes * partition.feature_counts)[self._bag_parts]
        lengths[starts + indices * sizes[self._bag_parts] + self._bag_positions] = self._bag_lengths
        return [
            divided.part_lookup(part, lengths[start:end], (size, self._columns.widths[part]))
            for part, (size, (start, end)) in enumerate(
                zip(sizes.tolist(), pairwise(spans), strict=True)
            )
            if size
        ]

    @cached_property
    def _sum(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns which chunks of the parts are added: their indices, and for each chunk of the
        result where its indices begin."""
        columns, parts = self._columns, self._bag_parts
        counts = self._sizes * columns.part_chunks
        firsts = counts.cumsum() - counts
        sources = firsts[parts] + self._bag_positions * columns.part_chunks[parts]
        targets = self._bag_examples * columns.whole.chunks
        # Bags are in the order of the parts.
        total = self._examples * columns.whole.chunks
        indices, offsets, _ = columns.sums.prepare(self._part_features, sources, targets, total)
        return indices, offsets

    @cached_property
    def _values(self) -> tuple[np.ndarray, list[int]]:
        """Returns the padded values of all parts, float32 and zeros at first, and where those of
        each part begin."""
        ends = (self._sizes * self._columns.part_chunks).cumsum() * self._columns.width
        return np.zeros(ends[-1], np.float32), [0, *ends.tolist()]

    def prepare(self) -> None:
        """Prepares the sum while the parts look up."""
        _ = self._sum, self._values

    def add(self, part: int, values: np.ndarray) -> None:
        """Takes the values of ``part``, float32 or float16, in the shape of its lookup. They are
        copied, so that a response need not stay in memory."""
        values_of_all, starts = self._values
        layout = self._columns.part_layouts[part]
        own = values_of_all[starts[part] : starts[part + 1]].reshape(len(values), -1)
        layout.copy_padded(_as_float32(values), own)

    def merge(self) -> np.ndarray:
        """Returns the sums of the batch, float32 [examples, sum of dims]. Parts that have added
        nothing count as zeros."""
        columns, (values, _) = self._columns, self._values
        shape = (self._examples, columns.whole.chunks * columns.width)
        if not values.size:
            sums = np.zeros(shape, np.float32) if self._cached is None else self._cached
            return columns.whole.without_padding(sums)
        indices, offsets = self._sum
        summed = torch.nn.functional.embedding_bag(
            indices, torch.from_numpy(values).view(-1, columns.width), offsets, mode="sum"
        )
        sums = summed.numpy().reshape(shape)
        if self._cached is not None:
            sums += self._cached
        return columns.whole.without_padding(sums)


def _as_float32(values: np.ndarray) -> np.ndarray:
    """Returns ``values`` of a response as float32."""
    if values.dtype == np.float32:
        return values
    return to_float32(values.copy())  # torch takes no read-only view of a response
