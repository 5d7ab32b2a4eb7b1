"""Requests and latencies of one protocol or version, by outcome, in cells of shared memory.

A request is counted for a version once that has been chosen. Requests rejected earlier, such as for
an unknown model or a body that cannot be decoded, are counted by protocol only. No name sent by a
client creates a series.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from embedserve.metrics.families import Sample
from embedserve.metrics.histogram import SECONDS_BUCKETS, Histogram, histogram_cells
from embedserve.metrics.shared_counters import WorkerCounters

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
REQUEST_CELLS = len(OUTCOMES) + 2 + histogram_cells(SECONDS_BUCKETS)


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
        self.seconds.bound()

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
