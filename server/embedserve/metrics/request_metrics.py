"""Counters of requests by protocol and by version, and of a version's batches, in shared memory.

A request is counted for a version once that has been chosen. Requests rejected earlier, such as for
an unknown model or a body that cannot be decoded, are counted by protocol only. No name sent by a
client creates a series.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from random import random
from time import perf_counter

import numpy as np

from embedserve.lookup_types import Batch
from embedserve.metrics.families import Sample
from embedserve.metrics.histogram import (
    COUNT_BUCKETS,
    LOOKUP_SECONDS_BUCKETS,
    PENDING_MAX,
    SECONDS_BUCKETS,
    Histogram,
)
from embedserve.metrics.rate_limited_logger import Fields, RateLimitedLogger
from embedserve.metrics.row_to_rank import DIVIDED_CELLS, RowToRank
from embedserve.metrics.shadow_metrics import ShadowMetrics
from embedserve.metrics.shared_counters import (
    Cells,
    KeyedCounters,
    WorkerCounters,
    single_worker_counters,
)
from embedserve.model_info import ModelInfo
from embedserve_store.plans.access_counts import AccessCounts, reads_per_rank, row_read_bytes

logger = logging.getLogger("embedserve.requests")

OUTCOMES = (
    "OK",
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "FAILED_PRECONDITION",
    "INTERNAL",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED",
    "UNAVAILABLE",
    "UNIMPLEMENTED",
)
"""Outcomes of a request: OK, CANCELLED if its client left, or the gRPC code of its error."""
NO_FAILURES = ("OK", "CANCELLED")
LINES_MAX = 10
"""Log lines of one kind, such as slow requests or rejections with one error code, in a period of
RateLimitedLogger. The first line of a later period reports how many were left out."""
SAMPLING_SHARE = 1 / 200
"""Largest share of the event loop's time spent on finding the ranks of rows."""
SAMPLE_PAUSE_S_MAX = 1.0
"""Mean seconds between two samples, at most. A sample takes longer if its process is interrupted,
and the share alone would then let the counters stand still for many seconds."""
VERSION_BUCKETS = {
    "embedserve_queue_wait_seconds": SECONDS_BUCKETS,
    "embedserve_batch_examples": COUNT_BUCKETS,
    "embedserve_batch_ids": COUNT_BUCKETS,
    "embedserve_lookup_seconds": LOOKUP_SECONDS_BUCKETS,
}
"""Bucket bounds of the histograms of a version, by family; VersionMetrics names the histograms."""
PARTS_COUNTED_MAX = 1024
"""Parts of a version whose absence is counted; further parts are not. They take 8 KiB for each
version and worker."""


class RequestMetrics:
    """Request counters of one protocol or version; the readers sum over all workers.

    Attributes:
        count_answered: records the seconds of an answered request, from its arrival to its encoded
            response. It is list.append, because it is called for every request.
        pending: seconds of answered requests that are not yet counted.
        seconds: histogram of the latency of all requests, whatever their outcome.
    """

    def __init__(self, counters: WorkerCounters) -> None:
        # A count for each outcome, then the total seconds of answered and of failed requests.
        self._cells = counters.allocate(len(OUTCOMES) + 2)
        self.seconds = Histogram(SECONDS_BUCKETS, counters)
        self.pending: list[float] = []
        self.count_answered = self.pending.append

    def count_outcome(self, outcome: str, seconds: float) -> None:
        """Counts a request that was not answered; ``outcome`` is one of OUTCOMES."""
        own = self._cells.own
        own[OUTCOMES.index(outcome)] += 1
        if outcome not in NO_FAILURES:
            own[-1] += seconds
        self.seconds.observe(seconds)
        self.seconds.flush_if_full()

    def flush(self) -> None:
        own = self._cells.own
        own[0] += len(self.pending)
        own[-2] += sum(self.pending)
        self.seconds.observe_many(self.pending)
        self.pending.clear()
        self.seconds.flush()

    def total(self) -> dict[str, float]:
        """Returns requests by outcome, zeros included, summed over all workers."""
        counts = self._cells.total()[: len(OUTCOMES)].tolist()
        return dict(zip(OUTCOMES, counts, strict=True))

    def total_seconds(self) -> tuple[float, float]:
        """Returns the total seconds of (answered, failed) requests of all workers. Cancelled
        requests count in neither."""
        answered_s, failed_s = self._cells.total()[-2:].tolist()
        return answered_s, failed_s

    def samples(self, family: str, labels: Sequence[str], always: str = "") -> Iterator[Sample]:
        """Yields the samples of ``family``_requests and ``family``_request_seconds. Outcomes
        without requests are left out, except ``always``."""
        for outcome, count in self.total().items():
            if count or outcome == always:
                yield f"{family}_requests", [*labels, outcome], count
        yield f"{family}_request_seconds", labels, self.seconds.samples()


class ProtocolMetrics:
    """Requests of one protocol (rest or grpc), answered and rejected.

    Attributes:
        protocol: name of the protocol.
        requests: requests by outcome, and their latencies.
        response_bytes: bytes of encoded responses of this process alone.
        log: rate-limited log of requests that failed.
    """

    def __init__(self, counters: WorkerCounters | None = None, protocol: str = "rest") -> None:
        counters = counters or single_worker_counters()
        self.protocol = protocol
        self.log = RateLimitedLogger(logger, LINES_MAX)
        self.requests = RequestMetrics(counters)
        self.response_bytes = 0
        self._pending = self.requests.pending
        self._bytes = counters.allocate(1)
        self._bytes_before = float(self._bytes.own[0])

    def count_answered(self, seconds: float, response_bytes: int) -> None:
        """Counts an answered request. It is called for every request and costs an append and an
        addition."""
        pending = self._pending
        pending.append(seconds)
        self.response_bytes += response_bytes
        if len(pending) >= PENDING_MAX:
            self.requests.flush()

    def count_rejected(
        self, code: str, message: str, seconds: float, fields: Callable[[], Fields] | None = None
    ) -> None:
        """Counts and logs a rejected request.

        Args:
            code, message: those of the EmbedServeError.
            fields: returns further named values for the log line.
        """
        self.requests.count_outcome(code, seconds)
        self.log.log(logging.INFO, f"rejected with {code}", message, fields=fields)

    def count_cancelled(self, seconds: float) -> None:
        """Counts a request whose client disconnected before its response."""
        self.requests.count_outcome("CANCELLED", seconds)

    def flush(self) -> None:
        self.requests.flush()
        self._bytes.own[0] = self._bytes_before + self.response_bytes

    def samples(self) -> Iterator[Sample]:
        """Yields the samples of all workers."""
        yield from self.requests.samples("embedserve", [self.protocol])
        yield "embedserve_response_bytes", [self.protocol], float(self._bytes.total()[0])


class LookupMetrics:
    """Access counts of a version's tables: ids by feature, and reads of row-wise tables by rank.

    Every id is counted, and each id without a row. The ranks of the rows of row-wise tables are
    found for a sample of the batches, within a bounded share of the event loop's time, and the
    counted reads are divided in the sampled proportions. All other counts by table and rank follow
    from the plan. Bytes follow from lookups.
    """

    def __init__(
        self,
        model: ModelInfo,
        counters: WorkerCounters,
        columns_max: int,
        sampling_share: float = SAMPLING_SHARE,
    ) -> None:
        self._model = model
        self._features = len(model.features)
        self._sampling_share = sampling_share
        self._requested = counters.allocate(columns_max)
        self._unknown = counters.allocate(columns_max)
        self._per_rank = counters.allocate(DIVIDED_CELLS)
        # A skipped id reads no row, except in an unpooled model, where it is read and zeroed.
        self._is_left_out = model.skips_unknown & model.is_pooled
        self._index = RowToRank(model)
        self._next_sample_s = 0.0  # time at which the next batch is sampled

    def observe(self, batch: Batch) -> None:
        """Counts the ids of a batch that is looked up, and samples its rows when a sample is
        due."""
        self._requested.own[: self._features] += batch.ids_per_feature
        if batch.unknown_counts is not None:
            self._unknown.own[: self._features] += batch.unknown_counts.sum(axis=0)
        is_indexed = self._index.tables and batch.ids.size
        if is_indexed and (start_s := perf_counter()) >= self._next_sample_s:
            self._index.sample(batch)
            end_s = perf_counter()
            pause_s = min((end_s - start_s) / self._sampling_share, SAMPLE_PAUSE_S_MAX)
            # A random pause around the mean: a fixed pause could stay in step with periodic
            # traffic and sample the same requests every time.
            self._next_sample_s = end_s + pause_s * (0.5 + random())

    def flush(self) -> None:
        """Divides the reads since the last flush among the ranks, in the sampled proportions. A
        table without samples is left for a later flush."""
        if not self._index.tables:
            return
        sampled = self._index.take_samples()
        total = sampled.sum(axis=1)
        has_samples = total > 0
        own = self._per_rank.own[: sampled.size].reshape(sampled.shape)
        read = self._index.sum_by_table(self._reads(self._requested.own, self._unknown.own))
        # Rounding must not make a counter smaller, which would look like a restart.
        more = np.maximum(read - own.sum(axis=1), 0.0)[has_samples, None] * sampled[has_samples]
        own[has_samples] += more / total[has_samples, None]

    def _reads(self, requested: Cells, unknown: Cells) -> Cells:
        """Returns the rows read, [F], for the cells of requested ids and of ids without a row."""
        count = self._features
        read: Cells = requested[:count] - np.where(self._is_left_out, unknown[:count], 0.0)
        return read

    def unknown_ids(self) -> Cells:
        """Returns float64 [F], ids without a row, over all workers that serve this version. During
        a switch the workers change at slightly different moments."""
        return self._unknown.total()[: self._features]

    def reads(self) -> AccessCounts:
        """Returns the rows read by all workers."""
        model, ranks = self._model, self._model.plan.world_size
        read = self._reads(self._requested.total(), self._unknown.total()).tolist()
        by_feature = dict(zip(model.features, read, strict=True))
        per_rank = self._per_rank.total()[: self._index.cells].reshape(-1, ranks)
        names = [table.name for table in self._index.tables]
        return AccessCounts(
            by_table={
                table.name: sum(by_feature[feature] for feature in table.feature_names)
                for table in model.tables
            },
            by_rank=dict(zip(names, per_rank.tolist(), strict=True)),
        )

    def samples(self, labels: Sequence[str]) -> Iterator[Sample]:
        """Yields the samples of a version with ``labels``."""
        model, plan, reads = self._model, self._model.plan, self.reads()
        unknown_ids = self.unknown_ids()
        for i in np.flatnonzero(~model.rejects_unknown):
            yield "embedserve_unknown_ids", [*labels, model.features[i]], float(unknown_ids[i])
        for feature, count in zip(model.features, self._requested.total().tolist(), strict=False):
            yield "embedserve_feature_ids", [*labels, feature], count
        for table in model.tables:
            count = reads.by_table[table.name]
            nbytes = count * row_read_bytes(plan.tables[table.name], table, model.device_type)
            yield "embedserve_table_lookups", [*labels, table.name], count
            yield "embedserve_table_read_bytes", [*labels, table.name], nbytes
        for name, counts in reads.by_rank.items():
            for rank, count in enumerate(counts):
                yield "embedserve_row_wise_lookups", [*labels, name, str(rank)], count
        per_rank = reads_per_rank(plan, model.tables, reads, model.device_type)
        for rank, (lookups, nbytes) in enumerate(zip(*per_rank, strict=True)):
            yield "embedserve_rank_lookups", [*labels, str(rank)], lookups
            yield "embedserve_rank_read_bytes", [*labels, str(rank)], nbytes


class VersionMetrics:
    """Counters of one version. When the version is replaced, the next version reuses its cells.

    Attributes:
        model: the version.
        lookups: access counts of the version's tables.
        shadow: comparison with another version, if this version runs as its shadow.
        requests: requests routed to this version, by outcome, and their latencies.
    """

    def __init__(self, model: ModelInfo, counters: KeyedCounters, columns_max: int) -> None:
        """Continues from the values in the cells if they belong to the same version; zeroes them
        otherwise."""
        self.model = model
        counters.claim(model.version)
        self._missing_parts = counters.allocate(PARTS_COUNTED_MAX)
        self._cached_ids = counters.allocate(1)
        self.lookups = LookupMetrics(model, counters, columns_max)
        self.requests = RequestMetrics(counters)
        self._histograms = {
            family: Histogram(buckets, counters) for family, buckets in VERSION_BUCKETS.items()
        }
        self.shadow = ShadowMetrics(model, counters, columns_max)  # takes all cells that are left
        self.wait_seconds = self._histograms["embedserve_queue_wait_seconds"]
        self.batch_examples = self._histograms["embedserve_batch_examples"]
        self.batch_ids = self._histograms["embedserve_batch_ids"]
        self.lookup_seconds = self._histograms["embedserve_lookup_seconds"]

    def observe_batch(self, batch: Batch) -> None:
        """Counts a batch that is to be looked up."""
        self.batch_examples.observe(batch.batch_size)
        self.batch_ids.observe(batch.ids.size)
        self.lookups.observe(batch)

    def count_parts(self, batch: Batch) -> None:
        """Counts the parts that a router's batch lacks, and its ids in the row cache."""
        for part in batch.missing_parts:
            if part < PARTS_COUNTED_MAX:
                self._missing_parts.own[part] += 1
        self._cached_ids.own[0] += batch.cached_count

    def flush_if_full(self) -> None:
        """Flushes what is pending once it is much; called for every batch that is taken.

        A batch has as many waits as requests, and at most one value in each other histogram, so
        that no other may grow beyond the waits.
        """
        if len(self.requests.pending) >= PENDING_MAX:
            self.requests.flush()
        if len(self.wait_seconds.pending) >= PENDING_MAX:
            for one in self._histograms.values():
                one.flush()

    def flush(self) -> None:
        self.lookups.flush()
        self.requests.flush()
        for one in self._histograms.values():
            one.flush()

    def samples(self) -> Iterator[Sample]:
        """Yields the samples over all workers that serve this version."""
        model = self.model
        labels = [model.name, model.tag, str(model.version)]
        yield from self.requests.samples("embedserve_model", labels, always="OK")
        for family, histogram in self._histograms.items():
            yield family, labels, histogram.samples()
        missing = self._missing_parts.total()[: _parts_of(model)]
        for part, batches in enumerate(missing.tolist()):
            yield "embedserve_missing_parts", [*labels, str(part)], batches
        if model.shards is not None:
            yield "embedserve_row_cache_hits", labels, int(self._cached_ids.total()[0])
        for rank, nbytes in enumerate(model.bytes_per_rank):
            yield "embedserve_table_bytes", [*labels, str(rank)], nbytes
        yield from self.lookups.samples(labels)
        yield from self.shadow.samples(labels)


def _parts_of(model: ModelInfo) -> int:
    """Returns the number of parts that are counted of a router's ``model``; 0 for any other."""
    hosts = model.plan.hosts
    return 0 if model.shards is None or hosts is None else min(hosts.parts, PARTS_COUNTED_MAX)
