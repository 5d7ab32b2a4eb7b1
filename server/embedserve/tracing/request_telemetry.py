"""Tells callers, the log and a collector of traces where the time of requests went.

Asked about a request only where it may have something to tell: one that was slow, or whose caller
named it, or every one while answers tell their times or traces are sent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from embedserve.metrics.rate_limited_logger import RateLimitedLogger
from embedserve.tracing.record import RequestRecord
from embedserve.tracing.request_id import REQUEST_ID, HeaderList, usable_id
from embedserve.tracing.slow_requests import SlowRequests
from embedserve.tracing.trace_context import TRACEPARENT, TraceContext
from embedserve.tracing.traced_request import TracedRequest

logger = logging.getLogger("embedserve.requests")

LINES_MAX = 10
"""Of slow requests, in a period of QuietLog; the next one counts the others."""
SERVER_TIMING = b"server-timing"
_NEVER = float("inf")


class Traces(Protocol):
    """Where traces go."""

    def sampled(self, traceparent: bytes | None) -> TraceContext | None:
        """Its place in a trace, of a request whose spans are kept; None of all others."""

    def add(self, record: RequestRecord) -> None:
        """Takes the spans of a request, which has its trace. Never waits, never raises."""

    def start(self) -> None:
        """Begins to send."""

    def stop(self) -> None:
        """Sends what waits, and waits some seconds for it."""


class RequestTelemetry:
    """What is told of the requests of one process.

    Attributes:
        watched_s: a request is told of if its answer took longer; 0: all of them are.
        traces: None where none are sent.
        slow: the slowest requests of the last minutes.
    """

    def __init__(
        self, slow_ms: float = 0.0, *, tells_times: bool = False, traces: Traces | None = None
    ) -> None:
        """
        Args:
            slow_ms: slower requests are logged; 0: none.
            tells_times: every answer tells its caller where its time went.
        """
        self._slow_s = slow_ms / 1000 if slow_ms else _NEVER
        self._tells_times = tells_times
        self.traces = traces
        self.watched_s = 0.0 if tells_times or traces is not None else self._slow_s
        self._log = RateLimitedLogger(logger, LINES_MAX)
        self.slow = SlowRequests()

    def response_headers(self, call: TracedRequest, encoded_s: float) -> HeaderList:
        """What the headers of an answer tell of its request: its id, if it has one or its answer
        is slow, and its times."""
        headers: HeaderList = []
        if self._has_id(call) or encoded_s - call.start_s >= self._slow_s:
            headers.append((REQUEST_ID, call.request_id))
        if self._tells_times:
            headers.append((SERVER_TIMING, call.times(encoded_s).server_timing()))
        return headers

    def request_id_headers(self, call: TracedRequest) -> HeaderList:
        """As told, of a request that gave an id and was not slow: done for each of them."""
        given = usable_id(call.header(REQUEST_ID))
        return [(REQUEST_ID, given)] if given else self.response_headers(call, call.start_s)

    def error_headers(self, call: TracedRequest, end_s: float) -> HeaderList:
        """As told, of a request that is refused: its id always."""
        self._has_id(call)
        told = [(REQUEST_ID, call.request_id)]
        if self._tells_times:
            told.append((SERVER_TIMING, call.times(end_s).server_timing()))
        return told

    def _has_id(self, call: TracedRequest) -> bool:
        """Whether the caller gave one; one that is not used is named in the log."""
        given = call.header(REQUEST_ID)
        if given is not None and not usable_id(given):
            self._log.log(logging.WARNING, "x-request-id is not used", given.decode("latin-1"))
        return given is not None

    def ended(
        self, call: TracedRequest, seconds: float, record: Callable[[], RequestRecord]
    ) -> None:
        """Logs, keeps and traces ``call``, which took so many ``seconds``, where that is wanted."""
        seen = self.traced(call, record)
        if seconds >= self._slow_s:
            self._log.log(logging.WARNING, "slow request", fields=lambda: seen().fields())
            self.slow.add(seconds, lambda: seen().fields())

    def traced(
        self, call: TracedRequest, record: Callable[[], RequestRecord]
    ) -> Callable[[], RequestRecord]:
        """``record``; where the request is sampled with its trace, which is sent."""
        if self.traces is None:
            return record
        context = self.traces.sampled(call.header(TRACEPARENT))
        if context is None:
            return record
        made = record()
        made.trace = context
        self.traces.add(made)
        return lambda: made
