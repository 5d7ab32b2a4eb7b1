"""Reports where the time of requests went: to callers, the log and a trace collector.

The pipeline consults it only for requests that are slow, large, rejected or cancelled, or whose
caller sent a request id. While responses carry their timings or traces are sent, the pipeline
consults it for every request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from embedserve.metrics.rate_limited_logger import RateLimitedLogger
from embedserve.metrics.request_metrics import LINES_MAX, NO_FAILURES
from embedserve.tracing.record import RequestRecord, StageTimings
from embedserve.tracing.request_id import REQUEST_ID, ExtraHeaders, usable_id
from embedserve.tracing.slow_requests import LogFields, SlowRequests
from embedserve.tracing.trace_context import TRACEPARENT, read_traceparent

if TYPE_CHECKING:
    from embedserve.pipeline.request_pipeline import RequestContext
    from embedserve.tracing.otlp import OtlpTraces  # imports OpenTelemetry, only with an endpoint

logger = logging.getLogger("embedserve.requests")

SERVER_TIMING = b"server-timing"
_NEVER = float("inf")


class RequestTelemetry:
    """Telemetry of the requests of one process.

    Attributes:
        watched_s: latency, in seconds, from which a request is reported; 0: every request.
        traces: trace exporter; None if no traces are sent.
        slow: slowest requests of the last minutes.
    """

    def __init__(
        self, slow_ms: float = 0.0, *, sends_timing: bool = False, traces: OtlpTraces | None = None
    ) -> None:
        """
        Args:
            slow_ms: latency, in milliseconds, from which requests are logged; 0: none are.
            sends_timing: whether every response has a Server-Timing header.
            traces: trace exporter; None if no traces are sent.
        """
        self._slow_s = slow_ms / 1000 if slow_ms else _NEVER
        self._sends_timing = sends_timing
        self.traces = traces
        self.watched_s = 0.0 if sends_timing or traces is not None else self._slow_s
        self._log = RateLimitedLogger(logger, LINES_MAX)
        self.slow = SlowRequests()

    def response_headers(
        self, context: RequestContext, end_s: float, *, is_error: bool = False
    ) -> ExtraHeaders:
        """Returns the telemetry headers of a response that was encoded, or of an error that came,
        at ``end_s``.

        The request id is sent if the caller sent an id, or the response is slow or an error. The
        stage timings are sent if ``sends_timing`` is set.
        """
        headers: ExtraHeaders = []
        if self._has_id(context) or is_error or end_s - context.start_s >= self._slow_s:
            headers.append((REQUEST_ID, context.request_id))
        if self._sends_timing:
            headers.append((SERVER_TIMING, _timings(context, end_s).server_timing()))
        return headers

    def request_id_headers(self, context: RequestContext) -> ExtraHeaders:
        """Returns the telemetry headers for a fast request whose caller sent an id. It is on the
        hot path of these requests."""
        given = usable_id(context.writer.header(REQUEST_ID))
        return [(REQUEST_ID, given)] if given else self.response_headers(context, context.start_s)

    def _has_id(self, context: RequestContext) -> bool:
        """Returns whether the caller sent a request id; logs an unusable id."""
        given = context.writer.header(REQUEST_ID)
        if given is not None and not usable_id(given):
            self._log.log(logging.WARNING, "x-request-id is not used", given.decode("latin-1"))
        return given is not None

    def report(
        self,
        context: RequestContext,
        outcome: str,
        caller: str,
        end_s: float,
        encoded_s: float | None = None,
    ) -> Callable[[], LogFields]:
        """Traces a request that has ended, if it is sampled. If it was slow, adds it to ``slow``,
        and unless it was rejected logs it.

        Args:
            outcome: OK, CANCELLED, or the code of its error.
            caller: name of its caller; "" without authentication.
            end_s: time of its end.
            encoded_s: time when the response was encoded; None if there is no response.

        Returns:
            Function for the fields of its log line, which ProtocolMetrics writes: every rejection
                has one, slow or not.
        """
        traced = None
        if self.traces is not None and (trace := context.trace) is not None:
            traced = _record(context, outcome, caller, end_s, encoded_s)
            traced.trace = trace
            self.traces.add(traced)

        def fields() -> LogFields:
            return (traced or _record(context, outcome, caller, end_s, encoded_s)).fields()

        seconds = end_s - context.start_s
        if seconds >= self._slow_s:
            self.slow.add(seconds, fields)
            if outcome in NO_FAILURES:
                self._log.log(logging.WARNING, "slow request", fields=fields)
        return fields


def _timings(context: RequestContext, end_s: float, encoded_s: float | None = None) -> StageTimings:
    """Returns the stage timings of a request up to ``end_s``."""
    begins = [context.start_s]
    if context.queued_s:
        begins.append(context.queued_s)
    if context.ticket is not None:
        begins.append(context.ticket.taken_s)
        if context.ticket.looked_up_s is not None:
            begins.append(context.ticket.looked_up_s)
    if encoded_s is not None:
        begins.append(encoded_s)
    return StageTimings(tuple(begins), end_s)


def _record(
    context: RequestContext, outcome: str, caller: str, end_s: float, encoded_s: float | None
) -> RequestRecord:
    model, request, writer = context.version, context.request, context.writer
    return RequestRecord(
        request_id=context.request_id.decode("ascii"),
        protocol=context.options.metrics.protocol,
        outcome=outcome,
        timings=_timings(context, end_s, encoded_s),
        model=context.options.model if model is None else model.served_as,
        version=0 if model is None else model.version,
        examples=request.batch_size,
        ids=request.ids.size,
        caller=caller,
        address=context.pipeline.addresses.find(writer.peer, writer.header),
        trace=read_traceparent(writer.header(TRACEPARENT)),
        calls=None if context.ticket is None else context.ticket.calls,
    )
