"""Histograms with fixed buckets, in Prometheus' layout. All buckets of the server are defined here.

Observed values are buffered in a list and counted in bulk, in cells of shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from embedserve.metrics.shared_counters import Cells, WorkerCounters, single_worker_counters

SECONDS_BUCKETS = tuple(
    round(step * scale, 6)
    for scale in (0.0001, 0.001, 0.01, 0.1, 1.0)
    for step in (1, 1.5, 2, 3, 5, 7.5)
)
"""Bucket bounds in seconds: 100 microseconds to 7.5 seconds, six per decade."""

LOOKUP_SECONDS_BUCKETS = (0.00001, 0.00002, 0.00003, 0.00005, 0.000075, *SECONDS_BUCKETS)
COUNT_BUCKETS = tuple(float(2**i) for i in range(21))
PENDING_MAX = 4096
"""Observations buffered in a list before they are counted in bulk."""

HistogramSamples = tuple[list[tuple[str, float]], float]
"""([(bound, cumulative count), …, ("+Inf", count)], sum of all values)."""


class Histogram:
    """Histogram with fixed buckets. Observations are buffered until ``flush``, or until
    ``flush_if_full`` finds PENDING_MAX of them.

    Attributes:
        pending: observed values that are not yet counted.
        observe: observes a value. It is list.append, because it is called for every batch.
        observe_many: observes several values. It is list.extend.
    """

    def __init__(self, buckets: Sequence[float], counters: WorkerCounters | None = None) -> None:
        self.buckets = tuple(buckets)
        self._bounds = np.array(buckets)
        # A count for each bucket, a count for values above all bounds, and the sum of all values.
        self._cells = (counters or single_worker_counters()).allocate(histogram_cells(buckets))
        self.pending: list[float] = []
        self.observe = self.pending.append
        self.observe_many = self.pending.extend

    def flush_if_full(self) -> None:
        """Flushes once PENDING_MAX values are pending."""
        if len(self.pending) >= PENDING_MAX:
            self.flush()

    def flush(self) -> None:
        values = np.array(self.pending)
        self.pending.clear()
        # "le" buckets: a value equal to a bound belongs to that bucket.
        positions = np.searchsorted(self._bounds, values, side="left")
        own = self._cells.own
        own[:-1] += np.bincount(positions, minlength=own.size - 1)
        own[-1] += values.sum()

    def samples(self) -> HistogramSamples:
        """Returns the samples over all workers."""
        self.flush()
        return histogram_samples(self.buckets, self._cells.total())


def histogram_cells(buckets: Sequence[float]) -> int:
    return len(buckets) + 2


def histogram_samples(buckets: Sequence[float], cells: Cells) -> HistogramSamples:
    """Returns the samples of a histogram in ``cells``."""
    bounds = [*map(str, buckets), "+Inf"]
    return list(zip(bounds, np.cumsum(cells[:-1]).tolist(), strict=True)), float(cells[-1])
