"""Rows that a router keeps of the tables in its shards, because they are looked up often.

A cached row needs no call. Rows are in buckets of four. A row that is missed for the second time is
fetched (row_fetcher.py). In a full bucket it replaces a row that is not marked as looked up. If all
are marked, the marks are cleared, and it is stored when it comes again (the CLOCK algorithm).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch

from embedserve.fanout.pooled_columns import ChunkLayout, ChunkSums, PooledColumns, join_ranges
from embedserve_store.format.manifest import Manifest

WAYS = 4
"""Rows of a bucket."""
ENTRY_BYTES = 17
"""Bytes of a row besides its vectors: two row numbers and the mark."""
CANDIDATES_MAX = 4096
"""Rows that wait to be fetched. Further ones wait for their next miss."""


class UncachedIds(NamedTuple):
    """The ids of a batch that are not in the cache, and the sums of the cached ids.

    Attributes:
        ids: int64 [n] row numbers, feature-major.
        lengths: int32 [features * examples].
        weights: float32 [n], or None.
        sums: float32 [examples, columns with padding]; None if no id is in the cache.
    """

    ids: np.ndarray
    lengths: np.ndarray
    weights: np.ndarray | None
    sums: np.ndarray | None


class CachedRows(NamedTuple):
    """Rows that are in the cache, by feature.

    Attributes:
        is_cached: bool [ids of the feature].
        rows: float32 [cached ids of the feature, tables of the feature, dim].
    """

    is_cached: list[np.ndarray]
    rows: list[np.ndarray]


class RowCache:
    """Cached rows of one version, for batches on the event loop and in threads.

    A row of a feature has the vectors of all tables of the feature, float32, one after the other,
    each padded to whole chunks. Features of the same tables share their rows.

    Attributes:
        sums_bytes: bytes of the sums of an example.
    """

    def __init__(
        self, manifest: Manifest, columns: PooledColumns, local_tables: Sequence[str], nbytes: int
    ) -> None:
        """
        Args:
            columns: columns of the vectors of ``manifest``.
            local_tables: tables that need no cache, because the router has them.
            nbytes: bytes of memory, which is used as rows come.
        """
        features = range(len(manifest.features))
        keys = [[i for i, one in enumerate(manifest.columns) if one.feature == f] for f in features]
        self._features = np.arange(len(features))
        self._width, self._chunks_whole = columns.width, columns.whole.chunks
        self.sums_bytes = 4 * columns.width * columns.whole.chunks
        dims = manifest.length_per_key
        self._layouts = [ChunkLayout([dims[i] for i in own], columns.width) for own in keys]
        self._chunks = np.array([layout.chunks for layout in self._layouts])
        firsts = [*columns.whole.first_chunks, columns.whole.chunks]
        targets = [[t for i in own for t in range(firsts[i], firsts[i + 1])] for own in keys]
        self._sums = ChunkSums([[*enumerate(own)] for own in targets])
        tables = [tuple(manifest.columns[i].table.name for i in own) for own in keys]
        # The first feature of the same tables, whose buckets a feature shares.
        self._groups = np.array([tables.index(names) for names in tables])
        is_remote = [not set(names) <= set(local_tables) for names in tables]
        rows = manifest.rows_per_feature
        needs = {
            i: (rows[i], WAYS * (ENTRY_BYTES + 4 * columns.width * int(self._chunks[i])))
            for i in features
            if self._groups[i] == i and is_remote[i]
        }
        buckets = _share(needs, nbytes)
        # The first bucket stays empty; features without a cache have it.
        self._buckets = np.ones(len(features), np.int64)
        self._first_buckets = np.zeros(len(features), np.int64)
        self._first_chunks = np.zeros(len(features), np.int64)
        bucket, chunk = 1, 0
        for group, count in buckets.items():
            members = self._groups == group
            self._buckets[members], self._first_buckets[members] = count, bucket
            self._first_chunks[members] = chunk - bucket * WAYS * self._chunks[group]
            bucket, chunk = bucket + count, chunk + count * WAYS * int(self._chunks[group])
        self._is_cached = self._first_buckets > 0
        # Keys are row numbers plus one; zeros are no rows. numpy's zeros take no memory until they
        # are written, torch's do.
        self._keys = np.zeros((bucket, WAYS), np.int64)
        self._missed = np.zeros(bucket * WAYS, np.int64)
        self._is_used = np.zeros((bucket, WAYS), np.bool_)
        self._chunk_rows = torch.from_numpy(np.zeros((chunk, columns.width), np.float32))
        self._lock = Lock()
        self._readers = 0
        # Rows that wait for readers to end, as arguments of _store.
        self._waiting: list[tuple[int, np.ndarray, np.ndarray]] = []
        self._candidates: list[tuple[np.ndarray, np.ndarray]] = []
        self._candidate_count = 0
        self._random = np.random.default_rng()

    def take_cached(
        self, ids: np.ndarray, lengths: np.ndarray, weights: np.ndarray | None
    ) -> UncachedIds:
        """Adds the cached rows of a batch, as Engine.lookup takes it, and returns the rest."""
        features = len(self._features)
        examples = lengths.size // features
        feature = np.repeat(self._features, lengths.reshape(features, -1).sum(axis=1))
        with self._reading():
            hits, left, chunks = self._find(ids, feature)
            if not hits.size:
                return UncachedIds(ids, lengths, weights, None)
            own, bags = feature[hits], np.repeat(np.arange(lengths.size), lengths)[hits]
            factors = None if weights is None else weights[hits]
            sums = self._sum(own, chunks, bags - own * examples, examples, factors)
        rest = lengths - np.bincount(bags, minlength=lengths.size).astype(np.int32)
        return UncachedIds(ids[left], rest, None if weights is None else weights[left], sums)

    def take_rows(self, ids: np.ndarray, counts: np.ndarray) -> CachedRows:
        """Returns which rows are cached, and copies of them.

        Args:
            ids: int64 [n] row numbers, feature by feature.
            counts: number of ids of each feature.
        """
        feature = np.repeat(self._features, counts)
        with self._reading():
            hits, _, chunks = self._find(ids, feature)
            own = feature[hits]
            rows = self._chunk_rows[torch.from_numpy(join_ranges(chunks, self._chunks[own]))]
        is_cached = np.zeros(ids.size, np.bool_)
        is_cached[hits] = True
        ends = (np.bincount(own, minlength=counts.size) * self._chunks).cumsum()
        by_feature = np.split(rows.numpy(), ends[:-1])
        shapes = zip(by_feature, self._chunks.tolist(), strict=True)
        return CachedRows(
            np.split(is_cached, counts.cumsum()[:-1]),
            [rows.reshape(-1, chunks, self._width) for rows, chunks in shapes],
        )

    def _find(
        self, ids: np.ndarray, feature: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the positions of cached ids, those of the others, and the first chunk of each
        cached row."""
        bucket = ids % self._buckets[feature] + self._first_buckets[feature]
        keys = ids + 1
        is_here = self._keys.take(bucket, axis=0) == keys[:, None]
        place = bucket * WAYS + is_here.argmax(axis=1)  # of no use where no key is equal
        is_hit = self._keys.take(place) == keys
        hits, left = np.flatnonzero(is_hit), np.flatnonzero(~is_hit)
        if left.size:
            self._note_misses(feature[left], ids[left], bucket[left])
        own, places = feature[hits], place[hits]
        self._is_used.reshape(-1)[places] = True
        return hits, left, self._first_chunks[own] + places * self._chunks[own]

    def _sum(
        self,
        feature: np.ndarray,
        chunks: np.ndarray,
        example: np.ndarray,
        examples: int,
        weights: np.ndarray | None,
    ) -> np.ndarray:
        """Returns the sums of cached rows, float32 [examples, columns with padding].

        Args:
            chunks: the first chunk of each row.
        """
        targets, total = example * self._chunks_whole, examples * self._chunks_whole
        indices, offsets, factors = self._sums.prepare(feature, chunks, targets, total, weights)
        summed = torch.nn.functional.embedding_bag(
            indices, self._chunk_rows, offsets, mode="sum", per_sample_weights=factors
        )
        sums: np.ndarray = summed.numpy().reshape(examples, -1)
        return sums

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Keeps the rows as they are during its block."""
        with self._lock:
            self._readers += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers -= 1
                self._store_waiting()

    def _note_misses(self, feature: np.ndarray, ids: np.ndarray, bucket: np.ndarray) -> None:
        """Queues rows that are missed for the second time."""
        place = bucket * WAYS + ids // self._buckets[feature] % WAYS
        keys = ids + 1
        is_again = (self._missed[place] == keys) & self._is_cached[feature]
        self._missed[place] = keys
        room = CANDIDATES_MAX - self._candidate_count
        if room > 0 and is_again.any():
            again = np.flatnonzero(is_again)[:room]
            self._candidates.append((self._groups[feature[again]], ids[again]))
            self._candidate_count += again.size

    def candidates(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns the features and numbers of queued rows, each row once and in random order, and
        forgets them. Returns None if there are none, or fetched rows wait for readers to end."""
        if self._waiting:
            return None
        found, self._candidates, self._candidate_count = self._candidates, [], 0
        if not found:
            return None
        features, rows = (np.concatenate(one) for one in zip(*found, strict=True))
        pairs = self._random.permutation(np.unique(rows * len(self._features) + features))
        return pairs % len(self._features), pairs // len(self._features)

    def store(self, feature: int, ids: np.ndarray, vectors: np.ndarray) -> None:
        """Stores rows of a feature. A bucket gets one of them at most. While threads read, the rows
        wait; the last of these threads stores them.

        Args:
            ids: int64 [n] row numbers, each once.
            vectors: float32 [n, sum of dims], the vectors of all keys of the feature.
        """
        with self._lock:
            self._waiting.append((feature, ids, vectors))
            self._store_waiting()

    def _store_waiting(self) -> None:
        """Stores the rows that wait, unless a thread reads. Called with the lock."""
        if self._waiting and not self._readers:
            waiting, self._waiting = self._waiting, []
            for rows in waiting:
                self._store(*rows)

    def _store(self, feature: int, ids: np.ndarray, vectors: np.ndarray) -> None:
        layout = self._layouts[feature]
        bucket = ids % self._buckets[feature] + self._first_buckets[feature]
        bucket, first = np.unique(bucket, return_index=True)
        keys = ids[first] + 1
        present, is_used = self._keys[bucket], self._is_used[bucket]
        is_full = (present != 0).all(axis=1) & is_used.all(axis=1)
        self._is_used[bucket[is_full]] = False
        # The first free place, else the first without a mark.
        way = np.where(present == 0, -1, is_used).argmin(axis=1)
        is_new = ~is_full & ~(present == keys[:, None]).any(axis=1)
        bucket, way, first = bucket[is_new], way[is_new], first[is_new]
        rows = layout.padded(vectors[first])
        chunks = self._first_chunks[feature] + (bucket * WAYS + way) * layout.chunks
        places = chunks[:, None] + np.arange(layout.chunks)
        self._chunk_rows[torch.from_numpy(places)] = torch.from_numpy(
            rows.reshape(*places.shape, self._width)
        )
        self._keys[bucket, way] = keys[is_new]
        self._is_used[bucket, way] = True


def _share(needs: dict[int, tuple[int, int]], nbytes: int) -> dict[int, int]:
    """Divides memory evenly, but gives no group more than it needs.

    Args:
        needs: (rows, bytes of a bucket) of each group.

    Returns:
        The number of buckets of each group that has any.
    """
    shares = {}
    by_need = sorted(needs, key=lambda group: -(-needs[group][0] // WAYS) * needs[group][1])
    for position, group in enumerate(by_need):
        rows, bucket_bytes = needs[group]
        count = min(-(-rows // WAYS), nbytes // (len(by_need) - position) // bucket_bytes)
        nbytes -= count * bucket_bytes
        if count:
            shares[group] = count
    return shares
