"""Pooled lookups in parts: the bags that are requested of each part, and the sum of their vectors.

In a DenseBatch few bags are empty, and a part that has ids gets all examples. In a PackedBatch bags
without an id on a part are left out: those that have one are packed to the front of each feature.
The sums of the parts are added in the order of the parts, so that equal requests get equal bits,
whichever part responds first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from io import BytesIO
from itertools import pairwise
from typing import NamedTuple

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

    @abstractmethod
    def merge(self, values: dict[int, np.ndarray]) -> np.ndarray:
        """Returns the sums of the batch, float32 [examples, sum of dims].

        Args:
            values: values of the parts, float32 or float16, in the shapes of their lookups. A part
                without any counts as zeros. Emptied, so that a response need not stay in memory.
        """

    def count_ids_on(self, part: int) -> np.ndarray:
        """Returns the numbers of ids on ``part``, int [features, examples]."""
        counts: np.ndarray = self._divided.lengths[part]
        return counts


class DenseBatch(PooledBatch):
    """A batch with its empty bags. No bag is moved: what the parts return is added column by
    column."""

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

    def merge(self, values: dict[int, np.ndarray]) -> np.ndarray:
        """Returns the sums of the batch; see PooledBatch.merge."""
        columns = self._columns
        sums = np.zeros((self._examples, columns.whole_width), np.float32)
        for part in sorted(values):
            own_values = _as_float32(values.pop(part))
            for own, whole in columns.part_spans[part]:
                sums[:, whole] += own_values[:, own]
        if self._cached is not None:
            sums += columns.whole.without_padding(self._cached)
        return sums


class _Bags(NamedTuple):
    """Bags of a batch, in the order of the parts: each (part, feature, example) that has an id.

    Attributes:
        numbers: (part * features + feature) * examples + example of each bag.
        lengths: ids of each bag.
        kinds: part * features + feature of each bag.
        positions: position of each bag among those of its kind.
        sizes: examples of each part's lookup, [parts].
    """

    numbers: np.ndarray
    lengths: np.ndarray
    kinds: np.ndarray
    positions: np.ndarray
    sizes: np.ndarray


class PackedBatch(PooledBatch):
    """A batch without its empty bags."""

    @cached_property
    def _bags(self) -> _Bags:
        lengths = self._divided.lengths
        parts, features, examples = lengths.shape
        flat = lengths.reshape(-1)
        numbers = np.flatnonzero(flat != 0)
        kinds = numbers // examples
        counts = np.bincount(kinds, minlength=parts * features)
        return _Bags(
            numbers,
            flat[numbers],
            kinds,
            np.arange(numbers.size) - (counts.cumsum() - counts)[kinds],
            counts.reshape(parts, features).max(axis=1),
        )

    def lookups(self) -> list[PartLookup]:
        """Returns the lookups of the parts that have ids of the batch."""
        partition, divided, bags = self._partition, self._divided, self._bags
        sizes = bags.sizes
        counts = sizes * partition.feature_counts
        ends = counts.cumsum()
        spans = [0, *ends.tolist()]
        lengths = np.zeros(spans[-1], np.int32)
        starts = (ends - counts)[:, None] + sizes[:, None] * partition.feature_index
        lengths[starts.reshape(-1)[bags.kinds] + bags.positions] = bags.lengths
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
        columns, bags, features = self._columns, self._bags, self._divided.lengths.shape[1]
        kinds, chunks = bags.kinds, columns.part_chunks
        counts = bags.sizes * chunks
        firsts = (counts.cumsum() - counts).repeat(features)
        sources = firsts[kinds] + bags.positions * chunks.repeat(features)[kinds]
        targets = (bags.numbers - kinds * self._examples) * columns.whole.chunks
        # Bags are in the order of the parts.
        total = self._examples * columns.whole.chunks
        indices, offsets, _ = columns.sums.prepare(kinds, sources, targets, total)
        return indices, offsets

    def prepare(self) -> None:
        """Prepares the sum while the parts look up."""
        _ = self._sum

    def merge(self, values: dict[int, np.ndarray]) -> np.ndarray:
        """Returns the sums of the batch; see PooledBatch.merge."""
        columns = self._columns
        shape = (self._examples, columns.whole.chunks * columns.width)
        if not values:
            sums = np.zeros(shape, np.float32) if self._cached is None else self._cached
            return columns.whole.without_padding(sums)
        indices, offsets = self._sum
        summed = torch.nn.functional.embedding_bag(
            indices, self._chunks_of(values), offsets, mode="sum"
        )
        sums = summed.numpy().reshape(shape)
        if self._cached is not None:
            sums += self._cached
        return columns.whole.without_padding(sums)

    def _chunks_of(self, values: dict[int, np.ndarray]) -> torch.Tensor:
        """Returns the padded values of all parts, float32 [chunks, width of a chunk]. They are
        copied, and taken out of ``values`` one after the other, so that a response need not stay
        in memory."""
        columns = self._columns
        row_bytes = 4 * columns.width * columns.part_chunks
        rows = BytesIO()
        for part, nbytes in enumerate((self._bags.sizes * row_bytes).tolist()):
            if part in values:
                own_values = _as_float32(values.pop(part))
                rows.write(columns.part_layouts[part].padded(own_values).data)
            else:
                rows.write(bytes(nbytes))
        return torch.frombuffer(rows.getbuffer(), dtype=torch.float32).view(-1, columns.width)


def _as_float32(values: np.ndarray) -> np.ndarray:
    """Returns ``values`` of a response as float32."""
    if values.dtype == np.float32:
        return values
    return to_float32(values.copy())  # torch takes no read-only view of a response
