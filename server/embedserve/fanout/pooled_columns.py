"""Columns of the vectors that the parts of a pooled model return, in chunks of one width, so that
one operation adds vectors of all widths."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import gcd

import numpy as np
import torch

from embedserve.fanout.partition import Partition
from embedserve.fanout.values_budget import PADDED_TIMES
from embedserve_store.format.manifest import KeyColumns

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


class ChunkLayout:
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
        self._width = width
        self.chunks, self.first_chunks = firsts[-1], firsts[:-1]
        self.is_padded = self.chunks * width != starts[-1]
        self.spans = [
            (slice(start, start + dim), slice(first * width, first * width + dim))
            for start, first, dim in zip(starts, firsts, dims, strict=False)
        ]

    def padded(self, values: np.ndarray) -> np.ndarray:
        """Returns vectors [n, sum of widths] padded to whole chunks."""
        if not self.is_padded:
            return values
        padded = np.zeros((len(values), self.chunks * self._width), np.float32)
        for columns, padded_columns in self.spans:
            padded[:, padded_columns] = values[:, columns]
        return padded

    def without_padding(self, padded: np.ndarray) -> np.ndarray:
        """Returns the vectors [n, sum of widths] of ``padded``."""
        if not self.is_padded:
            return padded
        return np.concatenate([padded[:, columns] for _, columns in self.spans], axis=1)


class ChunkSums:
    """Which chunks of rows of several kinds are added, and to which chunks of the whole result."""

    def __init__(self, chunks: Sequence[Sequence[tuple[int, int]]]) -> None:
        """
        Args:
            chunks: for each kind of row the positions of its chunks, in the row and in a row of the
                whole result.
        """
        flat = np.array([pair for own in chunks for pair in own], np.int64)
        self._sources, self._targets = flat.reshape(-1, 2).T
        self._counts = np.array([len(own) for own in chunks], np.int64)
        self._starts = self._counts.cumsum() - self._counts
        self._is_single = bool((self._counts <= 1).all())

    def prepare(
        self,
        kinds: np.ndarray,
        sources: np.ndarray,
        targets: np.ndarray,
        total: int,
        weights: np.ndarray | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Returns the indices, offsets and weights of an embedding_bag that adds rows. Chunks of
        one target are added in the order of the rows.

        Args:
            kinds: kind of each row.
            sources: the first chunk of each row.
            targets: the first chunk of the row of the whole result that each is added to.
            total: number of chunks of the whole result.
            weights: weight of each row; None for 1.
        """
        pairs = self._starts[kinds]
        if not self._is_single:  # several chunks in a vector, or several tables of a feature
            counts = self._counts[kinds]
            pairs = join_ranges(pairs, counts)
            sources, targets = np.repeat(sources, counts), np.repeat(targets, counts)
            weights = None if weights is None else np.repeat(weights, counts)
        sources, targets = sources + self._sources[pairs], targets + self._targets[pairs]
        # Sorting is stable. Small numbers sort faster.
        order = (targets.astype(np.uint16) if total <= 1 << 16 else targets).argsort(kind="stable")
        offsets = np.zeros(total, np.int64)
        np.bincount(targets, minlength=total)[:-1].cumsum(out=offsets[1:])
        return (
            torch.from_numpy(sources[order]),
            torch.from_numpy(offsets),
            None if weights is None else torch.from_numpy(weights[order]),
        )


class PooledColumns:
    """Columns that the parts of a version return, in chunks of one width, so that one operation
    adds vectors of all widths.

    Attributes:
        width: columns of a chunk.
        whole: layout of a row of the whole result.
        part_layouts: layout of a row of each part.
        whole_width: columns in a row of the whole result, without padding.
        widths: columns in a row of each part, without padding.
        part_spans: for each part the columns of its row, without padding, that are added to one
            after the other of the whole result, and those of the whole result.
        part_chunks: int64 [parts], chunks in a row of each part.
        part_width_max, part_widths_sum: columns in a row of the widest part, and in a row of each,
            with padding.
        sums: sums of the rows of the parts; the row of feature f on part p is of the kind
            p * features + f.
    """

    def __init__(self, partition: Partition) -> None:
        manifest = partition.manifest
        width = self.width = chunk_width(manifest.length_per_key)
        self.whole = ChunkLayout(manifest.length_per_key, width)
        self.part_layouts = [
            ChunkLayout(part.length_per_key, width) for part in partition.manifests
        ]
        self.whole_width = sum(manifest.length_per_key)
        self.widths = [sum(part.length_per_key) for part in partition.manifests]
        self.part_chunks = np.array([part.chunks for part in self.part_layouts])
        self.part_width_max = width * int(self.part_chunks.max())
        self.part_widths_sum = width * int(self.part_chunks.sum())
        whole = {(one.feature, one.table.name): one for one in manifest.columns}
        self.part_spans = [
            _spans(part.columns, [whole[key] for key in keys])
            for part, keys in zip(partition.manifests, partition.columns, strict=True)
        ]
        targets = dict(zip(whole, self.whole.first_chunks, strict=True))
        per_feature: list[list[tuple[int, int]]] = []
        for layout, keys in zip(self.part_layouts, partition.columns, strict=True):
            pairs: list[list[tuple[int, int]]] = [[] for _ in manifest.features]
            ends = [*layout.first_chunks, layout.chunks][1:]
            for key, start, end in zip(keys, layout.first_chunks, ends, strict=True):
                pairs[key[0]].extend((i, targets[key] + i - start) for i in range(start, end))
            per_feature.extend(pairs)
        self.sums = ChunkSums(per_feature)


def _spans(own: Sequence[KeyColumns], whole: Sequence[KeyColumns]) -> list[tuple[slice, slice]]:
    """Returns the columns of keys in a part's row and in the whole result, as few slices."""
    spans: list[tuple[slice, slice]] = []
    for one, target in zip(own, whole, strict=True):
        first, first_target = slice(one.start, one.start), slice(target.start, target.start)
        if spans and (spans[-1][0].stop, spans[-1][1].stop) == (one.start, target.start):
            first, first_target = spans.pop()
        spans.append((slice(first.start, one.end), slice(first_target.start, target.end)))
    return spans


def join_ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns ``counts[i]`` consecutive numbers from ``starts[i]`` on, one range after the other;
    int64."""
    if not counts.size:
        return np.zeros(0, np.int64)
    ends = counts.cumsum()
    numbers: np.ndarray = np.arange(ends[-1]) - np.repeat(ends - counts - starts, counts)
    return numbers
