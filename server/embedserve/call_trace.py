"""Calls of other servers that look one batch up, recorded for the traces of its requests.

Only batches with a traced request have such a record. tracing/otlp.py makes spans of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import getrandbits
from time import perf_counter
from typing import Protocol

CALLS_MAX = 64
"""Calls recorded of one batch; further calls have no span. It bounds the spans that a thread builds
for a request to about ten times those of a request without calls."""


class SampledTrace(Protocol):
    """Trace that a request is recorded in; tracing/trace_context.py has the implementation."""

    @property
    def trace_id(self) -> str:
        """Id of the trace, 32 hex digits."""


@dataclass(slots=True, eq=False)
class TracedCall:
    """A call of one replica. Times are perf_counter seconds.

    Attributes:
        part: number of the part that is looked up.
        replica: address of the replica, as HOST:PORT.
        reason: first, hedge, retry or hung: why the replica was called.
        span_id: id of the span of the call, 16 hex digits.
        start_s: when the call began.
        end_s: when it ended; 0 while it is in flight.
        outcome: name of its gRPC status; "" while it is in flight.
        message: status message, for a call that failed.
    """

    part: int
    replica: str
    reason: str
    span_id: str
    start_s: float
    end_s: float = 0.0
    outcome: str = ""
    message: str = ""

    def end(self, outcome: str, message: str = "") -> None:
        """Ends the call. Does nothing after its end."""
        if not self.end_s:
            self.outcome, self.message = outcome, message
            self.end_s = perf_counter()  # last: another thread reads the others after it


class CallTrace:
    """The calls of one batch.

    Attributes:
        trace: trace of the first traced request of the batch. The called servers continue it.
        calls: the calls in the order in which they began.
    """

    __slots__ = ("calls", "trace")

    def __init__(self, trace: SampledTrace) -> None:
        self.trace = trace
        self.calls: list[TracedCall] = []

    def begin(self, part: int, replica: str, reason: str) -> TracedCall | None:
        """Records a call that begins; returns None if there are CALLS_MAX."""
        if len(self.calls) >= CALLS_MAX:
            return None
        span_id = f"{getrandbits(64) or 1:016x}"
        call = TracedCall(part, replica, reason, span_id, perf_counter())
        self.calls.append(call)
        return call
