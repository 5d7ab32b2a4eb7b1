"""Exports the spans of sampled requests to an OpenTelemetry collector, over HTTP (OTLP).

This module is imported only if tracing is enabled. The event loop appends to a bounded queue. A
dedicated thread builds and sends the spans, a few requests at a time. A collector that hangs or is
absent blocks only that thread. The traces are then dropped, and the log has one line about it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from random import getrandbits, random
from time import perf_counter
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.resources import (
    SERVICE_NAME,
    SERVICE_VERSION,
    OTELResourceDetector,
    Resource,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from embedserve import __version__
from embedserve.call_trace import TracedCall
from embedserve.metrics.rate_limited_logger import PERIOD_S, SHOWN_CHARACTERS_MAX, RateLimitedLogger
from embedserve.tracing.bounded_session import BoundedSession
from embedserve.tracing.record import RequestRecord
from embedserve.tracing.trace_context import TraceContext, read_traceparent

logger = logging.getLogger(__name__)

QUEUE_MAX = 2048
"""Requests queued for export; the traces of further requests are dropped."""
SENT_AT_ONCE = 8
"""Requests per export. Encoding the spans of 8 requests holds the GIL for 2 to 3 ms."""
SPANS_AT_ONCE = 48
"""Spans after which an export takes no further request: those of 8 requests without calls."""
GATHER_S = 0.5
"""Seconds between two polls of an empty queue."""
PAUSE_S = 0.05
"""Seconds of pause after each export. With SENT_AT_ONCE it limits tracing to 160 requests per
second and a twentieth of a core, however many requests callers mark as sampled."""
SEND_S_MAX = 5.0
"""Timeout of one export in seconds, including retries and the waits between them."""
STOP_S_MAX = 2.0
"""Seconds for sending queued requests when the server stops."""
SERVER_FAULTS = frozenset({"INTERNAL", "UNAVAILABLE", "DEADLINE_EXCEEDED"})
"""Outcomes that set the status of a span to ERROR."""
NO_FAULTS = frozenset({"OK", "CANCELLED", ""})
"""Outcomes of calls of other servers that do not set the status of their span to ERROR."""
IN_FLIGHT = "IN_FLIGHT"
"""Outcome of a call that has not ended when its span is built, as its caller has gone."""
SCOPE = InstrumentationScope("embedserve", __version__)


class OtlpTraces:
    """OTLP trace exporter of one process."""

    def __init__(self, endpoint: str, share_percent: float) -> None:
        """
        Args:
            endpoint: base URL of the collector, to which /v1/traces is added.
            share_percent: sampling rate, in percent, for requests without a usable traceparent.
        """
        self._endpoint = endpoint.rstrip("/") + "/v1/traces"
        url = urlsplit(self._endpoint)
        # Without a user and password, which the exporter sends.
        self._logged_url = url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()
        self._share = share_percent / 100
        self._log = RateLimitedLogger(logger)
        self._waiting: deque[tuple[RequestRecord, int]] = deque()  # with epoch_ns of `spans_of`
        self._stopping = threading.Event()
        self._is_over = False  # once set, queued requests are no longer sent
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._is_failing = False  # whether the last line in the log says so
        self._warned_s = -math.inf  # monotonic seconds of the last such line
        self._reason = _Reason()
        self._exporters_log = logging.getLogger(trace_exporter.__name__)
        self._exporters_log.addFilter(self._reason)
        # Created here, because its slow imports must finish before the first request.
        self._exporter = trace_exporter.OTLPSpanExporter(
            self._endpoint, timeout=SEND_S_MAX, session=BoundedSession()
        )
        attributes = {SERVICE_NAME: "embedserve", SERVICE_VERSION: __version__}
        self._resource = Resource.create(
            {**attributes, **OTELResourceDetector().detect().attributes}
        )

    def sample(self, traceparent: bytes | None) -> TraceContext | None:
        """Decides whether to sample a request. Returns its trace context if so, else None."""
        if traceparent is not None:
            context = read_traceparent(traceparent)
            if context is not None:
                return context if context.is_sampled else None
            given = traceparent.decode("latin-1")
            self._log.log(logging.WARNING, "traceparent is not used", given)
        if self._share and random() < self._share:
            return TraceContext(f"{getrandbits(128) or 1:032x}", "", True)
        return None

    def add(self, record: RequestRecord) -> None:
        """Enqueues a request whose ``trace`` is set for export. Never blocks and never raises."""
        if len(self._waiting) >= QUEUE_MAX:
            self._log.log(logging.WARNING, "traces are left out", f"{QUEUE_MAX} requests wait")
            return
        epoch_ns = time.time_ns() - int(perf_counter() * 1e9)
        self._waiting.append((record, epoch_ns))

    def start(self) -> None:
        """Starts the export thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stops the export thread; waits up to STOP_S_MAX for it to send queued requests."""
        self._stopping.set()
        self._thread.join(STOP_S_MAX)
        self._is_over = True

    def _run(self) -> None:
        while not self._is_over and (self._waiting or not self._stopping.is_set()):
            if self._waiting:
                self._send()
                self._stopping.wait(PAUSE_S)
            else:
                self._stopping.wait(GATHER_S)
        self._exporters_log.removeFilter(self._reason)
        self._exporter.shutdown()  # type: ignore[no-untyped-call]  # from the SDK

    def _send(self) -> None:
        self._reason.line, self._reason.thread = "", threading.get_ident()
        spans: list[ReadableSpan] = []
        try:
            for _ in range(min(len(self._waiting), SENT_AT_ONCE)):
                spans += spans_of(*self._waiting.popleft(), self._resource)
                if len(spans) >= SPANS_AT_ONCE:
                    break
            is_sent = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception as error:  # from the library; later exports may succeed
            is_sent, self._reason.line = False, repr(error)
        if is_sent == self._is_failing:
            self._log_change(is_sent)

    def _log_change(self, is_sent: bool) -> None:
        """Logs that exports succeed again or fail; failures at most once in PERIOD_S, as those of a
        collector may come and go with every export."""
        if is_sent:
            self._is_failing = False
            logger.info("traces reach %s again", self._logged_url)
        elif time.monotonic() - self._warned_s >= PERIOD_S:
            self._is_failing, self._warned_s = True, time.monotonic()
            reason = self._reason.line[:SHOWN_CHARACTERS_MAX] or "the exporter gives no reason"
            logger.warning("traces do not reach %s, and are left out: %s", self._logged_url, reason)


class _Reason(logging.Filter):
    """Log filter that drops the exporter's line about each failure and keeps its text, so that
    OtlpTraces logs one line per outage.

    Attributes:
        line: first message since the last reset, which is the most informative; "" if none.
        thread: identifier of the thread that exports; lines of other exporters pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.line, self.thread = "", 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self.thread:
            return True
        self.line = self.line or ascii(record.getMessage())
        return False


def spans_of(record: RequestRecord, epoch_ns: int, resource: Resource) -> list[ReadableSpan]:
    """Returns a span for the request, followed by a child span for each stage that it reached, and
    for each call of another server for its batch.

    Args:
        epoch_ns: epoch of perf_counter, in Unix nanoseconds.
    """
    trace = record.trace
    assert trace is not None  # only requests with a trace are added
    trace_id = int(trace.trace_id, 16)
    parent = None
    if trace.parent_id:
        parent = _context(trace_id, int(trace.parent_id, 16), is_remote=True)
    fields = {
        name: value
        for name, value in record.fields().items()
        if name != "trace_id" and not name.endswith("_ms")  # spans already have these
    }
    own = _context(trace_id)
    is_fault = record.outcome in SERVER_FAULTS
    root = ReadableSpan(
        # Only served models: each unknown name in a URL would otherwise be a new span name.
        f"embed {record.model}" if record.version else "embed",
        own,
        parent,
        resource,
        attributes={
            f"embedserve.{name}": value if isinstance(value, int) else str(value)
            for name, value in fields.items()
        },
        kind=SpanKind.SERVER,
        status=Status(StatusCode.ERROR, record.outcome) if is_fault else Status(),
        start_time=epoch_ns + int(record.timings.begins[0] * 1e9),
        end_time=epoch_ns + int(record.timings.end_s * 1e9),
        instrumentation_scope=SCOPE,
    )
    stages = [
        ReadableSpan(
            name,
            _context(trace_id),
            own,
            resource,
            attributes={},
            start_time=epoch_ns + int(begin_s * 1e9),
            end_time=epoch_ns + int(end_s * 1e9),
            instrumentation_scope=SCOPE,
        )
        for name, begin_s, end_s in record.timings.stages()
    ]
    return [root, *stages, *_call_spans(record, own, epoch_ns, resource)]


def _call_spans(
    record: RequestRecord, parent: SpanContext, epoch_ns: int, resource: Resource
) -> list[ReadableSpan]:
    """Returns a span below ``parent`` for each call for the batch of the request.

    The called servers continue the trace of one request of the batch. Spans of another request have
    a link to those of that request.
    """
    calls = record.calls
    if calls is None:
        return []
    is_own = calls.trace is record.trace
    trace_id = int(calls.trace.trace_id, 16)
    spans = []
    for call in list(calls.calls):
        context = _context(trace_id, int(call.span_id, 16))
        links = () if is_own else (Link(context),)
        context = context if is_own else _context(parent.trace_id)
        end_s = call.end_s or max(record.timings.end_s, call.start_s)
        spans.append(
            ReadableSpan(
                f"call part {call.part}",
                context,
                parent,
                resource,
                attributes={
                    "embedserve.part": call.part,
                    "embedserve.replica": call.replica,
                    "embedserve.reason": call.reason,
                    "embedserve.outcome": call.outcome or IN_FLIGHT,
                },
                links=links,
                kind=SpanKind.CLIENT,
                status=_call_status(call),
                start_time=epoch_ns + int(call.start_s * 1e9),
                end_time=epoch_ns + int(end_s * 1e9),
                instrumentation_scope=SCOPE,
            )
        )
    return spans


def _call_status(call: TracedCall) -> Status:
    if call.outcome in NO_FAULTS:
        return Status()
    return Status(StatusCode.ERROR, call.message or call.outcome)


def _context(trace_id: int, span_id: int = 0, *, is_remote: bool = False) -> SpanContext:
    """Returns a sampled span context; generates a span id if ``span_id`` is 0."""
    flags = TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(trace_id, span_id or getrandbits(64) or 1, is_remote, flags)
