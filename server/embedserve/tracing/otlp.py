"""Sends the spans of sampled requests to an OpenTelemetry collector, over HTTP (OTLP).

Imported only where traces are wanted. The event loop appends to a bounded queue; a thread of its
own makes spans of what waits, a few requests at a time, and sends them. A collector that hangs or
is not there costs that thread its time, requests their traces, and the log one line.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from random import getrandbits, random
from time import perf_counter

from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from embedserve import __version__
from embedserve.metrics.rate_limited_logger import RateLimitedLogger
from embedserve.tracing.record import RequestRecord
from embedserve.tracing.trace_context import TraceContext, read_traceparent

logger = logging.getLogger(__name__)

QUEUE_MAX = 2048
"""Requests whose spans wait; those of others are left out."""
SENT_AT_ONCE = 8
"""Requests: encoding their spans holds the interpreter for two or three milliseconds."""
GATHER_S = 0.5
"""Between two looks at an empty queue."""
PAUSE_S = 0.05
"""After each request to the collector: with SENT_AT_ONCE it bounds what traces cost, whatever
callers ask for, to 160 requests in a second and a twentieth of a core."""
SEND_S_MAX = 5.0
"""What one request to the collector may take, tries and waits between them included."""
STOP_S_MAX = 2.0
"""For what waits when the server stops."""
SERVER_FAULTS = frozenset({"INTERNAL", "UNAVAILABLE", "DEADLINE_EXCEEDED"})
SCOPE = InstrumentationScope("embedserve", __version__)


class OtlpTraces:
    """The traces of one process."""

    def __init__(self, endpoint: str, share_percent: float) -> None:
        """
        Args:
            endpoint: of the collector, to which /v1/traces is added.
            share_percent: of requests without a traceparent, that are traced.
        """
        self._endpoint = endpoint.rstrip("/") + "/v1/traces"
        self._share = share_percent / 100
        self._log = RateLimitedLogger(logger)
        self._waiting: deque[tuple[RequestRecord, int]] = deque()
        self._stopping = threading.Event()
        self._is_over = False  # what waits is sent no more
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._is_failing = False
        self._reason = _Reason()
        self._exporters_log = logging.getLogger(trace_exporter.__name__)
        self._exporters_log.addFilter(self._reason)
        # All that takes long to import is, before there are requests.
        self._exporter = trace_exporter.OTLPSpanExporter(self._endpoint, timeout=SEND_S_MAX)
        service = os.environ.get("OTEL_SERVICE_NAME") or "embedserve"
        self._resource = Resource.create({SERVICE_NAME: service, SERVICE_VERSION: __version__})

    def sampled(self, traceparent: bytes | None) -> TraceContext | None:
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
        if len(self._waiting) >= QUEUE_MAX:
            self._log.log(logging.WARNING, "traces are left out", f"{QUEUE_MAX} requests wait")
            return
        # What perf_counter counts from, in nanoseconds of Unix time.
        start_ns = time.time_ns() - int(perf_counter() * 1e9)
        self._waiting.append((record, start_ns))

    def start(self) -> None:
        """Begins to send."""
        self._thread.start()

    def stop(self) -> None:
        """Sends what waits, for STOP_S_MAX at most. Waits for it."""
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
        self._exporter.shutdown()  # type: ignore[no-untyped-call]  # theirs

    def _send(self) -> None:
        count = min(len(self._waiting), SENT_AT_ONCE)
        self._reason.line = ""
        try:
            taken = [self._waiting.popleft() for _ in range(count)]
            spans = [span for one in taken for span in spans_of(*one, self._resource)]
            is_sent = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception as error:  # of the library: later ones may go
            is_sent, self._reason.line = False, repr(error)
        if is_sent == self._is_failing:
            self._say(is_sent)

    def _say(self, is_sent: bool) -> None:
        self._is_failing = not is_sent
        if is_sent:
            logger.info("traces reach %s again", self._endpoint)
        else:
            said = self._reason.line
            logger.warning("traces do not reach %s, and are left out: %s", self._endpoint, said)


class _Reason(logging.Filter):
    """Keeps what a library would log of every failure from the log, which is told once.

    Attributes:
        line: the first since it was emptied, which says most.
    """

    def __init__(self) -> None:
        super().__init__()
        self.line = ""

    def filter(self, record: logging.LogRecord) -> bool:
        self.line = self.line or ascii(record.getMessage())
        return False


def spans_of(record: RequestRecord, start_ns: int, resource: Resource) -> list[ReadableSpan]:
    """One of the request, and below it one of each stage that it came to.

    Args:
        start_ns: Unix time from which perf_counter counts.
    """
    trace = record.trace
    assert trace is not None  # those that have none are not added
    trace_id = int(trace.trace_id, 16)
    parent = None
    if trace.parent_id:
        parent = _context(trace_id, int(trace.parent_id, 16), is_remote=True)
    fields = {
        name: value
        for name, value in record.fields().items()
        if name != "trace_id" and not name.endswith("_ms")  # spans have these by themselves
    }
    own = _context(trace_id)
    is_fault = record.outcome in SERVER_FAULTS
    root = ReadableSpan(
        # Of a model that is served: whatever else a URL says would be a name of its own.
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
        start_time=start_ns + int(record.timings.begins[0] * 1e9),
        end_time=start_ns + int(record.timings.end_s * 1e9),
        instrumentation_scope=SCOPE,
    )
    stages = [
        ReadableSpan(
            name,
            _context(trace_id),
            own,
            resource,
            attributes={},
            start_time=start_ns + int(begin_s * 1e9),
            end_time=start_ns + int(end_s * 1e9),
            instrumentation_scope=SCOPE,
        )
        for name, begin_s, end_s in record.timings.stages()
    ]
    return [root, *stages]


def _context(trace_id: int, span_id: int = 0, *, is_remote: bool = False) -> SpanContext:
    """Of a span; one without ``span_id`` is new."""
    flags = TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(trace_id, span_id or getrandbits(64) or 1, is_remote, flags)
