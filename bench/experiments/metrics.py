"""Cost of recording the metrics of a request, including its share of the metrics of its batch.

PYTHONPATH=bench python bench/experiments/metrics.py
"""

from __future__ import annotations

from time import perf_counter

from embedserve.metrics.histogram import (
    COUNT_BUCKETS,
    LOOKUP_SECONDS_BUCKETS,
    PENDING_MAX,
    SECONDS_BUCKETS,
    Histogram,
)
from embedserve.metrics.request_metrics import ProtocolMetrics, RequestMetrics
from embedserve.metrics.shared_counters import single_worker_counters

BATCHES = 20_000
BATCH_EXAMPLES = 25
"""Examples per batch, about as many as 64 connections produce on `small`."""


def record() -> float:
    """Returns the seconds per request, including the conversion of recorded values to bucket
    counts."""
    rest, version = ProtocolMetrics(), RequestMetrics(single_worker_counters())
    waits, examples, ids = (Histogram(b) for b in (SECONDS_BUCKETS, COUNT_BUCKETS, COUNT_BUCKETS))
    lookups = Histogram(LOOKUP_SECONDS_BUCKETS)
    arrived_s = [perf_counter() for _ in range(BATCH_EXAMPLES)]
    start = perf_counter()
    for _ in range(BATCHES):
        now = perf_counter()
        waits.observe_many([now - arrived for arrived in arrived_s])
        examples.observe(BATCH_EXAMPLES)
        ids.observe(33 * BATCH_EXAMPLES)
        lookups.observe(perf_counter() - now)
        for arrived in arrived_s:
            seconds = perf_counter() - arrived
            rest.count_answered(seconds, 5_000)
            version.count_answered(seconds)
        if len(version.pending) >= PENDING_MAX:
            version.flush()
    return (perf_counter() - start) / (BATCHES * BATCH_EXAMPLES)


if __name__ == "__main__":
    record()
    print(f"{min(record() for _ in range(5)) * 1e6:.2f} microseconds a request")
