"""One version of a model as a router looks it up: its parts, and what a batch costs."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from embedserve.fanout.local_part import LocalPart
from embedserve.fanout.part_messages import PartMessages
from embedserve.fanout.partition import Partition
from embedserve.fanout.pooled_batch import DenseBatch, PackedBatch
from embedserve.fanout.pooled_columns import PooledColumns
from embedserve.fanout.row_cache import RowCache
from embedserve.fanout.unpooled_batch import UnpooledBatch
from embedserve.lookup_types import Batch
from embedserve.metrics.rate_limited_logger import RateLimitedLogger
from embedserve.model_names import VersionKey
from embedserve_store.model_version import ModelVersion
from embedserve_store.parts.local_tables import with_local_part

if TYPE_CHECKING:
    from embedserve.fanout.shards import Shards

logger = logging.getLogger(__name__)

PartedBatch = PackedBatch | DenseBatch | UnpooledBatch
"""A batch that is looked up in the parts."""

COST_FACTOR = 16
"""Handling one byte in a router takes as long as 16 bytes of an engine's lookup."""
ID_BYTES = 24
"""Bytes that a router handles for an id: it is received, divided over the parts and sent."""
CACHE_ID_BYTES = 48
"""Further bytes for an id with a row cache: it is looked for there, and its row is added."""
DENSE_SHARE = 2 / 3
"""Share of the bags on all parts that have an id in a batch whose empty bags are not left out. The
parts return up to half as many bytes more, but dividing and adding takes half the time."""


class ExpectedPart(NamedTuple):
    """A part of a version. Only shards that list it with the same values are called."""

    key: VersionKey
    fingerprint: str
    part: int
    part_count: int

    def __str__(self) -> str:
        model, version = self.key
        return f"part {self.part} of {self.part_count} of {model!r} version {version}"


def expected_parts(version: ModelVersion) -> list[ExpectedPart]:
    """Returns what the shards of each part of ``version`` have to serve."""
    manifest, hosts = version.whole, version.plan.hosts
    assert hosts is not None
    key = VersionKey(manifest.model, manifest.version)
    return [
        ExpectedPart(key, manifest.fingerprint, part, hosts.parts) for part in range(hosts.parts)
    ]


class PartedVersion:
    """The parts of one version. Tables that are looked up in this process are the last part.

    Attributes:
        model: name of the model.
        shards: caller of the parts that shards serve.
        expected: what the shards of each part have to serve.
        local: the part in this process; None for none.
        local_number: number of the part in this process.
        means: columns of tables with mean pooling.
        log: log of lookups that fail.
    """

    def __init__(
        self, version: ModelVersion, shards: Shards, local: LocalPart | None, inline_bytes_max: int
    ) -> None:
        """
        Args:
            version, shards, local, inline_bytes_max: as for RouterEngine.
        """
        manifest, hosts = version.manifest, version.plan.hosts
        assert hosts is not None  # a store opened for a router has checked it
        self.model = manifest.model
        self.shards, self.local = shards, local
        self.expected = expected_parts(version)
        self.local_number = len(self.expected)
        self._has_local_tables = [False] * hosts.parts
        if local is not None:
            self._has_local_tables = [
                any(hosts.rows_on(name, part) for name in local.tables)
                for part in range(hosts.parts)
            ]
            hosts = with_local_part(hosts, local.tables)
        self._partition = Partition(manifest, hosts)
        self._bags = int(self._partition.feature_counts.sum())  # of an example, in all parts
        self._columns = PooledColumns(self._partition) if manifest.is_pooled else None
        # Bytes of the result for an example of a pooled model, and for an id of another.
        self._example_bytes = 4 * sum(manifest.length_per_key) if manifest.is_pooled else 0
        keys = Counter(one.feature for one in manifest.columns)
        most_keys = 0 if manifest.is_pooled else max(keys.values())
        self._row_bytes = 4 * manifest.length_per_key[0] * most_keys
        self._work_bytes_max = inline_bytes_max // COST_FACTOR
        self.means = [one for one in manifest.columns if one.table.pooling == "mean"]
        self.log = RateLimitedLogger(logger)

    def messages(self, dtype: str) -> list[PartMessages]:
        """Returns the messages of each part that shards serve, with values of ``dtype``."""
        partition = self._partition
        return [
            PartMessages(
                partition.manifests[number],
                partition.sent_features(number),
                dtype,
                has_more=self._has_local_tables[number],
            )
            for number in range(self.local_number)
        ]

    def is_large(self, batch: Batch, *, has_cache: bool) -> bool:
        """Returns whether threads divide ``batch`` and add its values, not the event loop."""
        per_id = ID_BYTES + self._row_bytes + (CACHE_ID_BYTES if has_cache else 0)
        work_bytes = per_id * batch.ids.size + self._example_bytes * batch.batch_size
        return work_bytes > self._work_bytes_max

    def values_bytes(self, batch: Batch, cache: RowCache | None) -> int:
        """Returns the bytes of float32 values that the parts of a batch return, and of the sums of
        its rows in ``cache``, at most."""
        if self._columns is None:
            return self._row_bytes * batch.ids.size
        widest, all_parts = self._columns.part_width_max, self._columns.part_widths_sum
        by_ids = int(batch.ids.size * widest / DENSE_SHARE)  # a bag on a part has an id
        sums_bytes = 0 if cache is None else batch.batch_size * cache.sums_bytes
        return 4 * min(by_ids, batch.batch_size * all_parts) + sums_bytes

    def row_cache(self, nbytes: int) -> RowCache | None:
        """Returns an empty cache for rows; None without memory for it."""
        if not nbytes:
            return None
        local = () if self.local is None else self.local.tables
        columns = self._columns or PooledColumns(self._partition)
        return RowCache(self._partition.manifest, columns, local, nbytes)

    def divide(self, batch: Batch, cache: RowCache | None) -> PartedBatch:
        """Divides the ids of ``batch`` that are not in ``cache`` over the parts."""
        if self._columns is None:
            rows = UnpooledBatch(self._partition, batch.ids, batch.lengths, batch.skipped, cache)
            batch.cached_count = rows.cached_count
            return rows
        ids, lengths, weights, sums = batch.ids, batch.lengths, batch.weights, None
        if cache is not None:
            ids, lengths, weights, sums = cache.take_cached(ids, lengths, weights)
            batch.cached_count = batch.ids.size - ids.size
        divided = self._partition.divide(ids, lengths, weights)
        is_dense = np.count_nonzero(divided.lengths) >= DENSE_SHARE * self._bags * batch.batch_size
        kind = DenseBatch if is_dense else PackedBatch
        return kind(self._partition, self._columns, divided, sums)
