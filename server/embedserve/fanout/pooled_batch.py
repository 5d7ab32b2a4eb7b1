"""Pooled lookups in parts: the bags that each part is asked for, and the sum of what they return.

Bags without an id on a part are left out: those that have one are packed to the front of each
feature. The sums of the parts are added in the order of the parts, so that equal requests get equal
bits, whichever part has answered first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from math import gcd

import numpy as np
import torch

from embedserve.engine.pooled_values import to_float32
from embedserve.fanout.partition import DividedIds, Partition, PartLookup
from embedserve.fanout.values_budget import PADDED_TIMES

CHUNKS_PER_KEY = 4
"""Maximum number of chunks per vector, on average. Where exact chunks would be more, wider ones are
used, and vectors are padded."""
CHUNK_COLUMNS = 64
"""Overhead of a chunk, as the number of columns that are added in the same time."""


def chunk_width(dims: Sequence[int]) -> int:
    """Returns the width of the chunks that vectors of these widths are added in.

    It divides all of them, unless the chunks would be very many, as with widths of 64 and 1. Then
    the last chunk of a vector is padded.
    """
    exact, total = gcd(*dims), sum(dims)
    if total // exact <= CHUNKS_PER_KEY * len(dims):
        return exact

    def chunks(width: int) -> int:
        return sum(-(-dim // width) for dim in dims)

    widths = [
        width
        for width in sorted({exact, 4, 8, 16, 32, 64, *dims})
        if chunks(width) * width <= PADDED_TIMES * total
    ]
    return min(widths, key=lambda width: chunks(width) * (width + CHUNK_COLUMNS))


class _Layout:
    """Vectors of several keys, one after the other, and the same padded to whole chunks.

    Attributes:
        chunks: chunks of all vectors.
        first_chunks: the first chunk of each vector.
        spans: columns of each vector, and its columns in the padded row.
        is_padded: whether a vector is padded.
    """

    def __init__(self, dims: Sequence[int], width: int) -> None:
        counts = [-(-dim // width) for dim in dims]
        starts, firsts = [0, *accumulate(dims)], [0, *accumulate(counts)]
        self.chunks, self.first_chunks = firsts[-1], firsts[:-1]
        self.is_padded = self.chunks * width != starts[-1]
        self.spans = [
            (slice(start, start + dim), slice(first * width, first * width + dim))
            for start, first, dim in zip(starts, firsts, dims, strict=False)
        ]

    def copy_padded(self, values: np.ndarray, padded: np.ndarray) -> None:
        """Copies vectors [n, sum of widths] to their columns of ``padded``."""
        if not self.is_padded:
            padded[:] = values
            return
        for columns, padded_columns in self.spans:
            padded[:, padded_columns] = values[:, columns]

    def without_padding(self, padded: np.ndarray) -> np.ndarray:
        """Returns the vectors [n, sum of widths] of ``padded``."""
        if not self.is_padded:
            return padded
        return np.concatenate([padded[:, columns] for _, columns in self.spans], axis=1)


class PooledColumns:
    """Columns that the parts of a version return, in chunks of one width, so that one operation
    adds vectors of all widths.

    Attributes:
        width: columns of a chunk.
        whole: layout of a row of the whole result.
        parts: layout of a row of each part.
        widths: columns in a row of each part, without padding.
        part_chunks: int64 [parts], chunks in a row of each part.
        part_width_max, part_widths_sum: columns in a row of the widest part, and in a row of each,
            with padding.
        starts: int64 [parts * features + 1]; the chunks of feature f on part p are those from
            starts[p * features + f] on, in ``sources`` and ``targets``.
        sources, targets: int64, positions of a chunk in a row of its part and in a row of the
            whole result.
    """

    def __init__(self, partition: Partition) -> None:
        manifest = partition.manifest
        width = self.width = chunk_width(manifest.length_per_key)
        self.whole = _Layout(manifest.length_per_key, width)
        self.parts = [_Layout(part.length_per_key, width) for part in partition.parts]
        self.widths = [sum(part.length_per_key) for part in partition.parts]
        self.part_chunks = np.array([part.chunks for part in self.parts])
        self.part_width_max = width * int(self.part_chunks.max())
        self.part_widths_sum = width * int(self.part_chunks.sum())
        columns = zip(manifest.columns, self.whole.first_chunks, strict=True)
        targets = {(one.feature, one.table.name): first for one, first in columns}
        per_feature: list[list[tuple[int, int]]] = []
        for layout, keys in zip(self.parts, partition.columns, strict=True):
            pairs: list[list[tuple[int, int]]] = [[] for _ in manifest.features]
            ends = [*layout.first_chunks, layout.chunks][1:]
            for key, start, end in zip(keys, layout.first_chunks, ends, strict=True):
                pairs[key[0]].extend((i, targets[key] + i - start) for i in range(start, end))
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
        # A bag is one (part, feature, example) that has an id.
        flat = divided.lengths.reshape(-1)
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
        counts, starts = columns.counts[self._part_features], columns.starts[self._part_features]
        if (counts == 1).all():
            pairs = starts
        else:  # several chunks in a vector, or several tables of a feature
            ends = counts.cumsum()
            pairs = np.arange(ends[-1]) - np.repeat(ends - counts - starts, counts)
            sources, targets = np.repeat(sources, counts), np.repeat(targets, counts)
        sources = sources + columns.sources[pairs]
        targets = targets + columns.targets[pairs]
        # Sorting is stable, and bags are in the order of the parts. Small numbers sort faster.
        total = self._examples * columns.whole.chunks
        keys = targets.astype(np.uint16) if total <= 1 << 16 else targets
        order = keys.argsort(kind="stable")
        offsets = np.zeros(total, np.int64)
        np.bincount(targets, minlength=total)[:-1].cumsum(out=offsets[1:])
        return torch.from_numpy(sources[order]), torch.from_numpy(offsets)

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
        layout = self._columns.parts[part]
        own = values_of_all[starts[part] : starts[part + 1]].reshape(len(values), -1)
        if values.dtype != np.float32:
            values = to_float32(values.copy())  # torch takes no read-only view of a response
        layout.copy_padded(values, own)

    def merge(self) -> np.ndarray:
        """Returns the sums of the batch, float32 [examples, sum of dims]. Parts that have added
        nothing count as zeros."""
        columns, (values, _) = self._columns, self._values
        shape = (self._examples, columns.whole.chunks * columns.width)
        if not values.size:
            return columns.whole.without_padding(np.zeros(shape, np.float32))
        indices, offsets = self._sum
        summed = torch.nn.functional.embedding_bag(
            indices, torch.from_numpy(values).view(-1, columns.width), offsets, mode="sum"
        )
        return columns.whole.without_padding(summed.numpy().reshape(shape))

    def count_ids_on(self, part: int) -> np.ndarray:
        """Returns the numbers of ids on ``part``, int [features, examples]."""
        counts: np.ndarray = self._divided.lengths[part]
        return counts
