"""Unpooled lookups in parts: each distinct row is requested once, and the rows are spread over the
ids."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from embedserve.engine.pooled_values import to_float32
from embedserve.fanout.partition import Partition, PartLookup
from embedserve.fanout.row_cache import CachedRows, RowCache


class UnpooledBatch:
    """A batch that is looked up in the parts of an unpooled model."""

    def __init__(
        self,
        partition: Partition,
        ids: np.ndarray,
        lengths: np.ndarray,
        skipped: np.ndarray | None = None,
        cache: RowCache | None = None,
    ) -> None:
        """
        Args:
            ids, lengths: as Engine.lookup takes them.
            skipped: positions of ids whose rows nobody reads; None if there are none.
            cache: rows that need no lookup; None for none.
        """
        self._partition = partition
        self._skipped = skipped
        self._lengths = lengths.reshape(len(partition.manifest.features), -1)
        distinct, self._inverse = [], []
        for rows in np.split(ids, self._lengths.sum(axis=1, dtype=np.int64).cumsum()[:-1]):
            unique, inverse = np.unique(rows, return_inverse=True)
            distinct.append(unique)
            self._inverse.append(inverse.reshape(-1))
        counts, flat = np.array([rows.size for rows in distinct]), np.concatenate(distinct)
        self.cached_count = 0
        self._cached: CachedRows | None = None
        if cache is not None:
            self._cached = cached = cache.take_rows(flat, counts)
            is_left = [~one for one in cached.is_cached]
            flat = flat[np.concatenate(is_left)]
            counts = np.array([np.count_nonzero(one) for one in is_left])
            pairs = zip(is_left, self._inverse, strict=True)
            self.cached_count = ids.size - sum(int(left[inverse].sum()) for left, inverse in pairs)
        self._divided = partition.divide(flat, counts.astype(np.int32))
        # int32 [parts, features], the number of distinct rows.
        self._counts = self._divided.lengths[:, :, 0]

    def lookups(self) -> list[PartLookup]:
        """Returns the lookups of the parts that have ids of the batch, one example for each."""
        partition, dim = self._partition, self._partition.manifest.length_per_key[0]
        lookups = []
        for part in self._parts_with_ids():
            counts = self._counts[part]
            rows = sum(int(counts[feature]) for feature, _ in partition.columns[part])
            sent = counts[partition.has_feature[part]]
            lookups.append(self._divided.part_lookup(part, sent, (rows, dim)))
        return lookups

    def _parts_with_ids(self) -> list[int]:
        found: list[int] = np.flatnonzero(self._counts.any(axis=1)).tolist()
        return found

    def prepare(self) -> None:
        """Does nothing: there is nothing to prepare while the parts look up."""

    def merge(self, values: dict[int, np.ndarray]) -> np.ndarray:
        """Returns the rows of the batch, float32 [n, dim]: for each key one row for each id.

        Args:
            values: values of the parts, float32 or float16, in the shapes of their lookups. Rows of
                a part without any are zeros.
        """
        manifest = self._partition.manifest
        dim = manifest.length_per_key[0]
        nothing = np.empty((0, dim), np.float16)  # float16 widens no other dtype
        # Distinct rows by feature and table: ascending, and so part by part.
        pieces: defaultdict[tuple[int, str], list[np.ndarray]] = defaultdict(lambda: [nothing])
        for part in self._parts_with_ids():
            rows, start = values.get(part), 0
            for feature, table in self._partition.columns[part]:
                end = start + int(self._counts[part, feature])
                piece = (
                    np.zeros((end - start, dim), np.float16) if rows is None else rows[start:end]
                )
                pieces[feature, table].append(piece)
                start = end
        tables = [0] * len(manifest.features)  # of each feature, so far
        of_keys = []
        for one in manifest.columns:
            rows = np.concatenate(pieces[one.feature, one.table.name])
            rows = self._with_cached(one.feature, tables[one.feature], rows)
            of_keys.append(rows[self._inverse[one.feature]])
            tables[one.feature] += 1
        return to_float32(np.concatenate(of_keys))

    def _with_cached(self, feature: int, table: int, rows: np.ndarray) -> np.ndarray:
        """Returns the distinct rows of a table of a feature: ``rows`` of the parts, and cached
        ones."""
        if self._cached is None or not (is_cached := self._cached.is_cached[feature]).any():
            return rows
        both = np.empty((is_cached.size, rows.shape[1]), np.float32)
        both[is_cached] = self._cached.rows[feature][:, table]
        both[~is_cached] = to_float32(rows)
        return both

    def count_ids_on(self, part: int) -> np.ndarray:
        """Returns the numbers of ids on ``part``, int [features, examples], without skipped ids."""
        features, examples = self._lengths.shape
        pieces = []
        for feature, (counts, inverse) in enumerate(
            zip(self._counts.T, self._inverse, strict=True)
        ):
            parts = np.repeat(np.arange(counts.size), counts)  # of each distinct row
            if self._cached is not None:
                is_cached, left = self._cached.is_cached[feature], parts
                parts = np.full(is_cached.size, -1)
                parts[~is_cached] = left
            pieces.append(parts[inverse] == part)
        is_there = np.concatenate(pieces)
        if self._skipped is not None:
            is_there[self._skipped] = False
        bags = np.repeat(np.arange(features * examples), self._lengths.reshape(-1))
        counts = np.bincount(bags[is_there], minlength=features * examples)
        return counts.reshape(features, -1)
