"""Counts the requests of one version by outcome, and their times, in a slot's cells.

A request counts here from when its version is chosen: what is rejected before, such as an unknown
model or a body that cannot be decoded, counts by protocol alone. No name that a client sends
creates a count.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from embedserve.errors import EmbedServeError
from embedserve.metrics.histogram import PENDING_MAX, SECONDS_BUCKETS, Histogram, histogram_cells
from embedserve.metrics.shared_counters import WorkerCounters

_ERRORS: list[type[EmbedServeError]] = [EmbedServeError, *EmbedServeError.__subclasses__()]
OUTCOMES = ("OK", "CANCELLED", *sorted({error.code for error in _ERRORS}))
"""Of a request: answered, its client went away, or the code of its error."""
NO_FAILURES = ("OK", "CANCELLED")
REQUEST_CELLS = len(OUTCOMES) + 2 + histogram_cells(SECONDS_BUCKETS)


class RequestMetrics:
    """Requests of one version, of this process; reads are of all workers.

    Attributes:
        answered: takes the seconds of a request that was answered, from its arrival to its encoded
            answer. An append to a list, as it is called for every request.
        seconds: of every request, whatever its outcome.
    """

    def __init__(self, counters: WorkerCounters) -> None:
        # A count for each outcome, and the seconds of answered and of failed requests.
        self._cells = counters.allocate(len(OUTCOMES) + 2)
        self.seconds = Histogram(SECONDS_BUCKETS, counters)
        self._answered: list[float] = []
        self.answered = self._answered.append

    def ended(self, outcome: str, seconds: float) -> None:
        """Counts a request without an answer; ``outcome`` is one of OUTCOMES."""
        own = self._cells.own
        own[OUTCOMES.index(outcome)] += 1
        if outcome not in NO_FAILURES:
            own[-1] += seconds
        self.seconds.observe(seconds)

    def bound(self) -> None:
        """Counts answered requests once PENDING_MAX wait; called for every batch."""
        if len(self._answered) >= PENDING_MAX:
            self.flush()

    def flush(self) -> None:
        own = self._cells.own
        own[0] += len(self._answered)
        own[-2] += sum(self._answered)
        self.seconds.observe_many(self._answered)
        self._answered.clear()
        self.seconds.flush()

    def leave(self) -> None:
        """Detaches from shared memory: what is counted later is not shown."""
        self._cells.detach()
        self.seconds.leave()

    def total(self, of: NDArray[np.bool_]) -> dict[str, float]:
        """Requests by outcome, of the workers ``of`` which it is True; zeros among them."""
        counts = self._cells.total(of)[: len(OUTCOMES)].tolist()
        return dict(zip(OUTCOMES, counts, strict=True))

    def total_seconds(self, of: NDArray[np.bool_]) -> tuple[float, float]:
        """(of answered, of failed) requests; those whose client went away are neither."""
        answered_s, failed_s = self._cells.total(of)[-2:].tolist()
        return answered_s, failed_s
