"""Fetches rows for the row cache of a router, by lookups of its own.

Each example has at most one id of a feature, so the sum of a pooled model is the row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from time import monotonic

import numpy as np

from embedserve.errors import EmbedServeError
from embedserve.fanout.batch_fanout import Finish
from embedserve.fanout.row_cache import RowCache
from embedserve.lookup_types import Batch
from embedserve_store.format.manifest import Manifest

logger = logging.getLogger(__name__)

FETCH_S = 0.05
"""Interval of the lookups that fetch rows."""
FAILED_S = 1.0
"""Seconds between a failed lookup of rows and the next."""
VALUES_BYTES_MAX = 128 << 10
"""Bytes of the values of such a lookup, unless one example has more; 128 KiB. They are copied on
the event loop."""

LookUp = Callable[[Batch, Finish], None]


class RowFetcher:
    """Fetches the candidates of a row cache. Used on one event loop."""

    def __init__(self, cache: RowCache, manifest: Manifest) -> None:
        self._cache = cache
        self._manifest = manifest
        row_bytes = 4 * sum(manifest.length_per_key)
        self._rows_max = max(1, VALUES_BYTES_MAX // row_bytes)  # of a feature
        self._next_s = 0.0
        self._is_fetching = False

    def fetch_if_due(self, look_up: LookUp) -> None:
        """Begins a lookup of rows, unless the last one is in flight or began less than FETCH_S ago.
        Logs any error: the batches of callers do not depend on it.

        Args:
            look_up: begins a lookup of float32 values; calls its second argument with them.
        """
        now_s = monotonic()
        if self._is_fetching or now_s < self._next_s:
            return
        self._next_s = now_s + FETCH_S
        try:
            self._fetch(look_up)
        except Exception:
            self._is_fetching, self._next_s = False, now_s + FAILED_S
            logger.exception("rows cannot be fetched for the row cache")

    def _fetch(self, look_up: LookUp) -> None:
        if (found := self._cache.candidates()) is None:
            return
        features, rows = found
        count = len(self._manifest.features)
        by_feature = [rows[features == i][: self._rows_max] for i in range(count)]
        sizes = np.array([own.size for own in by_feature])
        examples = int(sizes.max())
        lengths = (np.arange(examples) < sizes[:, None]).astype(np.int32).reshape(-1)
        # Examples are requests of their own, so that missing rows are counted for each.
        batch = Batch(np.concatenate(by_feature), lengths, None, [1] * examples, examples)
        self._is_fetching = True
        look_up(batch, partial(self._store, batch, by_feature))

    def _store(
        self, batch: Batch, by_feature: list[np.ndarray], values: np.ndarray | EmbedServeError
    ) -> None:
        """Stores the rows of a lookup, without those of parts that have no replica. Rows of a
        lookup that failed are fetched once they are looked up again."""
        self._is_fetching = False
        if isinstance(values, EmbedServeError) or not batch.is_whole:
            self._next_s = monotonic() + FAILED_S
        if isinstance(values, EmbedServeError) or batch.failures:
            return
        vectors: list[list[np.ndarray]] = [[] for _ in by_feature]
        end = 0
        for one in self._manifest.columns:
            start, end = end, end + by_feature[one.feature].size
            if self._manifest.is_pooled:
                own = values[: end - start, one.start : one.end]
            else:  # key after key
                own = values[start:end]
            vectors[one.feature].append(own)
        for feature, rows in enumerate(by_feature):
            own = np.concatenate(vectors[feature], axis=1)
            if (missing := batch.missing_counts) is not None:
                is_there = missing[: rows.size, feature] == 0
                rows, own = rows[is_there], own[is_there]
            if rows.size:
                self._cache.store(feature, rows, own)
