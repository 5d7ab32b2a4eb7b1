"""Pooled lookups in parts: the bags that each part is asked for, and the sum of what they return.

Bags without an id on a part are left out: those that have one are packed to the front of each
feature. The sums of the parts are added in the order of the parts, so that equal requests get equal
bits, whichever part has answered first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from math import gcd

import numpy as np
import torch

from embedserve.engine.pooled_values import to_float32
from embedserve.fanout.partition import DividedIds, Partition, PartLookup


class PooledColumns:
    """Columns that the parts of a version return, in chunks of one width.

    The width divides that of every key, so that one operation adds vectors of all widths.

    Attributes:
        width: columns of a chunk.
        chunks: chunks in a row of the whole result.
        part_chunks: int64 [parts], chunks in a row of the values of each part.
        starts: int64 [parts * features + 1]; the chunks of feature f on part p are those from
            starts[p * features + f] on, in ``sources`` and ``targets``.
        sources, targets: int64, positions of a chunk in a row of its part and in a row of the
            whole result.
    """

    def __init__(self, partition: Partition) -> None:
        manifest = partition.manifest
        self.width = gcd(*manifest.length_per_key)
        self.chunks = sum(manifest.length_per_key) // self.width
        self.part_chunks = np.array(
            [sum(part.length_per_key) // self.width for part in partition.parts]
        )
        whole = {(one.feature, one.table.name): one for one in manifest.columns}
        per_feature: list[list[tuple[int, int]]] = []
        for part, keys in zip(partition.parts, partition.columns, strict=True):
            pairs: list[list[tuple[int, int]]] = [[] for _ in manifest.features]
            for one, key in zip(part.columns, keys, strict=True):
                target = whole[key].start // self.width
                start, end = one.start // self.width, one.end // self.width
                pairs[key[0]].extend((start + i, target + i) for i in range(end - start))
            per_feature.extend(pairs)
        flat = np.array([pair for pairs_ in per_feature for pair in pairs_], np.int64)
        self.sources, self.targets = flat.reshape(-1, 2).T
        counts = np.array([len(pairs_) for pairs_ in per_feature], np.int64)
        self.starts = np.append(0, counts.cumsum())
        self.counts = counts


class PooledBatch:
    """A batch that is looked up in the parts of a pooled model."""

    def __init__(self, partition: Partition, columns: PooledColumns, divided: DividedIds) -> None:
        self._partition = partition
        self._columns = columns
        self._divided = divided
        self._examples = divided.lengths.shape[2]
        parts, features, examples = divided.lengths.shape
        # A bag is one (part, feature, example) that has an id; a cell is one (part, feature).
        flat = divided.lengths.reshape(-1)
        bags = np.flatnonzero(flat)
        self._bag_lengths = flat[bags]
        self._cells = cells = bags // examples
        self._bag_examples = bags - cells * examples
        self._bag_parts = cells // features
        counts = np.bincount(cells, minlength=parts * features)
        self._sizes = counts.reshape(parts, features).max(axis=1)  # examples of each part's lookup
        # Position of each bag in its feature, on its part.
        self._bag_positions = np.arange(cells.size) - (counts.cumsum() - counts)[cells]

    def lookups(self) -> list[PartLookup]:
        """Returns the lookups of the parts that have ids of the batch."""
        partition, divided, sizes = self._partition, self._divided, self._sizes
        ends = (sizes * partition.feature_counts).cumsum()
        spans = [0, *ends.tolist()]
        lengths = np.zeros(spans[-1], np.int32)
        local = partition.local.reshape(-1)[self._cells]
        starts = (ends - sizes * partition.feature_counts)[self._bag_parts]
        lengths[starts + local * sizes[self._bag_parts] + self._bag_positions] = self._bag_lengths
        width, chunks = self._columns.width, self._columns.part_chunks.tolist()
        return [
            divided.lookup(part, lengths[start:end], (size, chunks[part] * width))
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
        targets = self._bag_examples * columns.chunks
        counts, starts = columns.counts[self._cells], columns.starts[self._cells]
        if (counts == 1).all():
            pairs = starts
        else:  # several chunks in a vector, or several tables of a feature
            ends = counts.cumsum()
            pairs = np.arange(ends[-1]) - np.repeat(ends - counts - starts, counts)
            sources, targets = np.repeat(sources, counts), np.repeat(targets, counts)
        sources = sources + columns.sources[pairs]
        targets = targets + columns.targets[pairs]
        # Sorting is stable, and bags are in the order of the parts. Small numbers sort faster.
        total = self._examples * columns.chunks
        keys = targets.astype(np.uint16) if total <= 1 << 16 else targets
        order = keys.argsort(kind="stable")
        offsets = np.zeros(total, np.int64)
        np.bincount(targets, minlength=total)[:-1].cumsum(out=offsets[1:])
        return torch.from_numpy(sources[order]), torch.from_numpy(offsets)

    def prepare(self) -> None:
        """Prepares the sum while the parts look up."""
        _ = self._sum

    def merge(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the sums of the batch, float32 [examples, sum of dims].

        Args:
            values: values of each of ``lookups``, float32 or float16, in that order and shape.
        """
        columns = self._columns
        shape = (self._examples, columns.chunks * columns.width)
        if not values:
            return np.zeros(shape, np.float32)
        flat = to_float32(np.concatenate([one.reshape(-1) for one in values]))
        indices, offsets = self._sum
        summed = torch.nn.functional.embedding_bag(
            indices, torch.from_numpy(flat).view(-1, columns.width), offsets, mode="sum"
        )
        result: np.ndarray = summed.numpy().reshape(shape)
        return result

    def count_ids_on(self, part: int) -> np.ndarray:
        """Returns the numbers of ids on ``part``, int [features, examples]."""
        counts: np.ndarray = self._divided.lengths[part]
        return counts
