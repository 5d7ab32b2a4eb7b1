"""The request pipeline: the only path from bytes to a batch and back.

The context of a request is the same for every protocol, from its headers until its response. What
telemetry reports of a request (its id, stage timings and trace context) is computed only when it is
reported. A request that is not reported pays nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from embedserve.access.authenticator import Authenticator, ClientCertificate
from embedserve.access.caller_quota import CallerQuota
from embedserve.access.client_address import ClientAddresses
from embedserve.batching.pending_request import NO_REQUEST, PendingRequest
from embedserve.codec.codec import Codec, Codecs, Decode
from embedserve.errors import INTERNAL, EmbedServeError, EngineError
from embedserve.lookup_types import LookupResult, ResponseChunks, WouldBlockError
from embedserve.metrics.metrics import Metrics
from embedserve.metrics.rate_limited_logger import RateLimitedLogger
from embedserve.metrics.request_metrics import ProtocolMetrics
from embedserve.model_info import ModelInfo
from embedserve.models.model_registry import ModelRegistry
from embedserve.pipeline.codec_executor import (
    CodecExecutor,
    check_deadline,
    decode_later,
    encode_later,
)
from embedserve.pipeline.response_writer import ResponseWriter
from embedserve.pipeline.telemetry import RequestTelemetry
from embedserve.shared_memory.region_registry import EVERYBODY, NONE, RegionRegistry
from embedserve.tracing.request_id import ExtraHeaders
from embedserve.tracing.trace_context import TRACEPARENT, TraceContext

logger = logging.getLogger(__name__)

NEVER = float("inf")
LARGE_RESPONSE_BYTES = 64 << 10
"""Bytes of an encoded response above which `on_large_response` callbacks are called. They bound the
memory pinned by unsent responses. Responses up to 64 KiB fit in a socket's send buffer."""
ROUTING_KEY = b"x-routing-key"
"""Header whose value pins requests to one version where several versions share a model's
traffic."""
_UNDECIDED = TraceContext("", "", False)
"""Trace of a request before it is decided whether it is sampled."""
ORIGIN_HEADER = b"origin"
"""Header that browsers add to the requests of a page to another site."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestOptions:
    """Options parsed from the request headers, shared by requests with identical headers.

    Attributes:
        model: model in the URL; "" selects the model that the body names, or the default model.
        codec: codec of the request body.
        response_codec: codec of the response.
        timeout_s: seconds from the end of the request's headers until its deadline; None for no
            deadline.
        metrics: metrics of the protocol.
        has_id: whether the request has an X-Request-Id header, which the response repeats.
    """

    model: str
    codec: Codec
    response_codec: Codec
    timeout_s: float | None
    metrics: ProtocolMetrics
    has_id: bool = False


class RequestContext(PendingRequest):
    """Context of one request. Times are perf_counter seconds.

    A request ends once: in `write`, `reject` or `cancel`. That method counts its outcome by
    protocol (``options.metrics``) and by caller (``quota``). It counts it by version, too, if one
    was chosen: `write` by the ticket, the others by ``pipeline.metrics``.

    Attributes:
        options: options parsed from its headers.
        start_s: time when its headers, or in a stream its message, had arrived. A request that is
            pipelined over HTTP/1 starts once the response before it is written.
        pipeline: pipeline that it is submitted to.
        writer: writer of its response.
        quota: limits and counters of its caller, from its admission until its end; None without
            authentication.
    """

    __slots__ = ("_request_id", "_trace", "options", "pipeline", "quota", "start_s", "writer")

    def __init__(
        self,
        options: RequestOptions,
        start_s: float,
        pipeline: RequestPipeline,
        writer: ResponseWriter,
    ) -> None:
        self.options = options
        self.start_s = start_s
        self.pipeline = pipeline
        self.writer = writer
        self.quota: CallerQuota | None = None
        self._request_id = b""
        self._trace: TraceContext | None = _UNDECIDED
        timeout_s = options.timeout_s
        self.deadline_s = NEVER if timeout_s is None else start_s + timeout_s
        self.is_waiting = True
        self.queued_s = 0.0
        self.queue = None
        self.request = NO_REQUEST
        self.ticket = None

    # The caller

    @property
    def source(self) -> object:
        return self.quota or self.writer.source

    @property
    def caller(self) -> str:
        """Name of the admitted caller until the request ends; "" without authentication."""
        return "" if self.quota is None else self.quota.grant.name

    @property
    def owner(self) -> str:
        """Name of the owner of the caller's shared-memory regions."""
        return self.caller or EVERYBODY

    @property
    def certificate(self) -> ClientCertificate | None:
        return self.writer.certificate

    @property
    def can_delay_rejection(self) -> bool:
        return self.writer.can_delay_rejection

    @property
    def routing_key(self) -> bytes:
        return self.writer.header(ROUTING_KEY) or b""

    # Its end

    def complete(self, result: LookupResult) -> None:
        try:
            encoded = self.options.response_codec.try_encode_inline(result)
            if encoded is None:
                encode_later(self, result)
            else:
                self.write(result, *encoded)
        except EmbedServeError as error:
            self.reject(error)
        except Exception:
            self.fail()

    def write(self, result: LookupResult, chunks: ResponseChunks, nbytes: int) -> None:
        """Writes the response that ``result`` was encoded to, and counts the request as
        answered."""
        self.is_waiting = False
        encoded_s = perf_counter()
        seconds = encoded_s - self.start_s
        options, telemetry = self.options, self.pipeline.telemetry
        headers_of = options.response_codec.response_headers
        headers = None if headers_of is None else headers_of(result)
        if seconds >= telemetry.watched_s or nbytes > LARGE_RESPONSE_BYTES:
            self._write_observed(chunks, nbytes, encoded_s, headers or [])
        else:
            quota = self.quota
            if quota is not None:  # as in `_leave`, which would cost each request a call
                quota.active -= 1
                quota.answered_count += 1
                self.quota = None
            if options.has_id:
                headers = [*(headers or ()), *telemetry.request_id_headers(self)]
            self.writer.write_response(chunks, nbytes, headers)
        options.metrics.count_answered(seconds, nbytes)
        assert self.ticket is not None
        self.ticket.observe_latency(seconds)

    def _write_observed(
        self, chunks: ResponseChunks, nbytes: int, encoded_s: float, headers: ExtraHeaders
    ) -> None:
        """Writes a response that is large, or whose request may have to be logged or traced, or
        needs timing headers. Slow path of `write`."""
        telemetry, caller = self.pipeline.telemetry, self.caller
        self._leave("OK")
        headers = [*headers, *telemetry.response_headers(self, encoded_s)]
        self.writer.write_response(chunks, nbytes, headers)
        if nbytes > LARGE_RESPONSE_BYTES:
            self.pipeline.record_large_response(nbytes)
        telemetry.report(self, "OK", caller, perf_counter(), encoded_s)

    def reject(self, error: EmbedServeError) -> None:
        self.is_waiting = False
        end_s, code = perf_counter(), error.code
        seconds, telemetry = end_s - self.start_s, self.pipeline.telemetry
        try:
            self.pipeline.metrics.count_outcome(self.version or error.model, code, seconds)
            fields = telemetry.report(self, code, self.caller or error.caller, end_s)
            self._leave(code)
            self.options.metrics.count_rejected(code, error.message, seconds, fields)
            self.writer.write_error(error, telemetry.response_headers(self, end_s, is_error=True))
        except Exception:  # the other requests of its batch are answered nevertheless
            log = self.options.metrics.log
            log.log(logging.ERROR, "an error could not be written", with_traceback=True)
            self.writer.abort()

    def reject_after(self, error: EmbedServeError, wait_s: float) -> None:
        """Rejects a request before it is submitted, after ``wait_s`` seconds; 0: immediately."""
        if wait_s:
            asyncio.get_running_loop().call_later(wait_s, self._reject_if_waiting, error)
        else:
            self.reject(error)

    def _reject_if_waiting(self, error: EmbedServeError) -> None:
        if self.is_waiting:
            self.reject(error)

    def fail(self) -> None:
        """Logs the unexpected exception that is being handled, and rejects the request with an
        internal error."""
        log, fields = self.options.metrics.log, lambda: {"request_id": self.request_id.decode()}
        log.log(logging.ERROR, "a request failed", with_traceback=True, fields=fields)
        self.reject(EngineError(INTERNAL))

    def cancel(self) -> None:
        """Cancels the request because its client went away. It leaves the queue, and nothing is
        written. Does nothing once the request has ended."""
        if self.is_waiting:
            end_s = perf_counter()
            seconds = end_s - self.start_s
            self.pipeline.telemetry.report(self, "CANCELLED", self.caller, end_s)
            self.pipeline.metrics.count_outcome(self.version, "CANCELLED", seconds)
            self.abandon()
            self._leave("CANCELLED")
            self.options.metrics.count_cancelled(seconds)

    def _leave(self, outcome: str) -> None:
        """Ends the request with ``outcome``: its caller no longer counts it as in flight."""
        if self.quota is not None:
            self.quota.leave(outcome)
            self.quota = None

    # Reported by telemetry

    @property
    def request_id(self) -> bytes:
        """Request id sent by the caller, or else an id generated on first use."""
        if not self._request_id:
            self._request_id = self.writer.request_id()
        return self._request_id

    @property
    def trace(self) -> TraceContext | None:
        """Trace context of a sampled request, None for another; decided once."""
        if self._trace is _UNDECIDED:
            traces = self.pipeline.telemetry.traces
            given = self.writer.header(TRACEPARENT)
            self._trace = None if traces is None else traces.sample(given)
        return self._trace

    @property
    def version(self) -> ModelInfo | None:
        """Version that serves the request: that of its batch or else of its queue. None before it
        is enqueued."""
        if self.ticket is not None:
            return self.ticket.model
        return None if self.queue is None else self.queue.model


class RequestPipeline:
    """Request pipeline of a process: the only path from bytes to a batch and back.

    Attributes:
        models: registry of the served models.
        codecs: codecs of the process.
        metrics: metrics of the process; those of each protocol are in ``metrics.protocols``.
        authenticator: authenticator of callers; None: no authentication.
        telemetry: telemetry that logs, traces and times requests.
        codec_executor, shared_memory_executor: executors for large bodies and responses, and for
            responses in shared memory.
        shared_memory: regions of shared memory where tensors may be located; None: disabled.
        addresses: resolver of client addresses behind proxies.
        limits: limits on the work that the server accepts.
    """

    def __init__(
        self,
        models: ModelRegistry,
        metrics: Metrics,
        authenticator: Authenticator | None = None,
        telemetry: RequestTelemetry | None = None,
        shared_memory: RegionRegistry | None = None,
        addresses: ClientAddresses | None = None,
    ) -> None:
        self.addresses = addresses or ClientAddresses()
        self.models = models
        self.codecs = Codecs()
        self.authenticator = authenticator
        self.shared_memory = shared_memory
        self.metrics = metrics
        self.telemetry = telemetry or RequestTelemetry()
        self._large_response_callbacks: list[Callable[[int], None]] = []
        self.limits = models.limits
        waiting_bytes: Counter[object] = Counter()
        self.codec_executor = CodecExecutor(waiting_bytes)
        self.shared_memory_executor = CodecExecutor(waiting_bytes)
        self._log = RateLimitedLogger(logger)
        self._unflushed: list[Callable[[], None]] = []
        self._queue_reopened_callbacks: list[Callable[[], None]] = []
        models.set_callbacks(self.flush, self._notify_queue_reopened)

    def submit(self, context: RequestContext, body: bytes) -> None:
        """Submits a request with its whole body. Never raises.

        ``context`` is completed, rejected or failed, either immediately or when its batch ends.
        """
        options = context.options
        try:
            if self.models.has_full_queue:
                self.models.check_queue_for_body(options.model, body, options.codec, is_quick=True)
            if context.deadline_s != NEVER:
                check_deadline(context)
            decode = options.codec.decode if self.shared_memory is None else self.decoder(context)
            request = decode(body, options.model, self.limits, is_inline=True)
            quota = context.quota
            if quota is not None and quota.models is not None:
                quota.check_model(request.model, self.models.default_model)
            self.models.enqueue(request, context)
        except WouldBlockError:
            decode_later(context, len(body), lambda: body)
        except EmbedServeError as error:
            context.reject(error)
        except Exception:
            context.fail()

    def decoder(self, context: RequestContext) -> Decode:
        """Returns the decoder for the body, bound to the caller's shared-memory regions. Requests
        from a browser page, which have an Origin header, get no regions."""
        codec, shared = context.options.codec, self.shared_memory
        if shared is None or codec.bind_regions is None:
            return codec.decode
        is_page = context.writer.header(ORIGIN_HEADER) is not None
        return codec.bind_regions(NONE if is_page else shared.of(context.owner))

    def reject_if_overloaded(self, context: RequestContext) -> None:
        """Rejects ``context`` before its body arrives if its queue is full.

        Called only while `models.has_full_unsized_queue`.
        """
        try:
            self.models.check_unsized_queue(context.options.model)
        except EmbedServeError as error:
            context.reject(error)

    def flush_later(self, flush: Callable[[], None]) -> None:
        """Calls ``flush``, which writes a connection's buffered responses, when the current batch
        has been completed, or in the next event-loop iteration at the latest."""
        if not self._unflushed:
            asyncio.get_running_loop().call_soon(self.flush)
        self._unflushed.append(flush)

    def flush(self) -> None:
        """Calls all functions that wait in `flush_later`."""
        unflushed, self._unflushed = self._unflushed, []
        for flush in unflushed:
            try:
                flush()
            except Exception:
                # The other connections are flushed nevertheless.
                self._log.log(logging.ERROR, "an answer could not be written", with_traceback=True)

    def on_queue_reopened(self, callback: Callable[[], None]) -> None:
        """Registers ``callback``, called whenever a queue that was full accepts requests again."""
        self._queue_reopened_callbacks.append(callback)

    def on_large_response(self, callback: Callable[[int], None]) -> None:
        """Registers ``callback``, called with the size in bytes of each response that was written
        and exceeds LARGE_RESPONSE_BYTES."""
        self._large_response_callbacks.append(callback)

    def record_large_response(self, nbytes: int) -> None:
        for callback in self._large_response_callbacks:
            callback(nbytes)

    def _notify_queue_reopened(self) -> None:
        for callback in self._queue_reopened_callbacks:
            callback()
