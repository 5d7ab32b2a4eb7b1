"""Request pipeline of a process, shared by all protocols.

The pipeline admits a request, decodes its body, and enqueues it with its model. When the vectors
are available it encodes them, counts the request, and passes the bytes to the request's context.
A protocol is a small adapter: it subclasses RequestContext, creates a context for each request, and
writes the response that the context receives. It never sees ids.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Protocol

from embedserve.access.authenticator import Authenticator, Certificate
from embedserve.access.client_address import ClientAddresses
from embedserve.batching.split import copy_if_view
from embedserve.codec.codec import Codec, Decode, TryDecodeInline
from embedserve.codec_executor import CodecExecutor
from embedserve.errors import (
    INTERNAL,
    DeadlineExceededError,
    EmbedServeError,
    EngineError,
    ServedVersion,
)
from embedserve.lookup import (
    EncodedResponse,
    LookupRequest,
    LookupResult,
    ResponseChunks,
    with_size,
)
from embedserve.metrics.metrics import Metrics, ProtocolMetrics
from embedserve.metrics.rate_limited_logger import RateLimitedLogger
from embedserve.models.model_registry import ModelRegistry
from embedserve.shared_memory.region_registry import EVERYBODY, NONE, RegionRegistry
from embedserve.tracing.request_id import HeaderList
from embedserve.tracing.request_telemetry import RequestTelemetry
from embedserve.tracing.traced_request import TracedRequest

logger = logging.getLogger(__name__)

REQUEST_S_MAX = 30.0
"""Seconds that the body of one request may take to arrive. Slower requests are rejected with
DEADLINE_EXCEEDED."""
_NEVER = float("inf")
LARGE_RESPONSE_BYTES = 64 << 10
"""Bytes of an encoded response above which `on_large_response` callbacks are called. They bound the
memory pinned by unsent responses. Responses up to 64 KiB fit in a socket's send buffer."""
ROUTING_KEY = b"x-routing-key"
"""Header whose value pins requests to one version where several versions share a model's
traffic."""
ORIGIN = b"origin"
"""Header that browsers add to the requests of a page to another site."""
CHUNK_YIELD_S = 0.0001
"""Seconds of sleep between two chunks of a large response, so that the event loop can take the GIL.
Without it the loop waits a full 5 ms switch interval each time."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestOptions:
    """Options parsed from the request headers, shared by requests with identical headers.

    Attributes:
        model: model in the URL; "" selects the model that the body names, or the default model.
        codec: codec of the request body.
        response_codec: codec of the response.
        timeout_s: seconds from the request's first byte until its deadline; None for no deadline.
        metrics: metrics of the protocol.
        has_id: whether the request has an X-Request-Id header, which the response repeats.
    """

    model: str
    codec: Codec
    response_codec: Codec
    timeout_s: float | None
    metrics: ProtocolMetrics
    has_id: bool = False

    def with_codec(self, codec: Codec) -> RequestOptions:
        """Returns a copy that uses ``codec`` for both the body and the response."""
        return replace(self, codec=codec, response_codec=codec)


class RequestContext(TracedRequest):
    """Context of one request, from its first byte until its response is written; counted once.

    The adapter of each protocol implements how responses and errors are written.

    Attributes:
        options: options parsed from its headers.
        pipeline: pipeline that the request is submitted to.
    """

    __slots__ = ("options", "pipeline")
    options: RequestOptions

    def __init__(self, options: RequestOptions, start_s: float, pipeline: RequestPipeline) -> None:
        self.options = options
        self.pipeline = pipeline
        self.start_s = start_s
        self.quota = None
        self.is_waiting = True
        self.queue = None
        timeout_s = options.timeout_s
        self.deadline_s = _NEVER if timeout_s is None else start_s + timeout_s

    @property
    def source(self) -> object:
        return self.quota or self.origin

    @property
    def origin(self) -> object:
        """Origin of the request, such as its connection, that stands for an unauthenticated client
        in fair sharing. By default each request is its own origin."""
        return self

    @property
    def owner(self) -> str:
        """Name of the authenticated caller, who owns its shared-memory regions; EVERYBODY without
        authentication."""
        quota = self.quota
        return EVERYBODY if quota is None else quota.grant.name

    @property
    def certificate(self) -> Certificate | None:
        """Client certificate from the TLS handshake; None if there was none."""
        return None

    @property
    def peer(self) -> str:
        """Address of the peer of its connection; "" if unknown."""
        return ""

    @property
    def address(self) -> str:
        return self.pipeline.addresses.find(self.peer, self.header)

    @property
    def can_delay_rejection(self) -> bool:
        """Whether a rejection may be delayed without holding up requests of other clients."""
        return True

    @abstractmethod
    def write_response(
        self, parts: ResponseChunks, nbytes: int, headers: HeaderList | None = None
    ) -> None:
        """Writes the encoded response of ``nbytes`` bytes, and the telemetry ``headers`` if any."""

    @abstractmethod
    def write_error(self, error: EmbedServeError, headers: HeaderList) -> None:
        """Writes ``error`` in the protocol's format, with the telemetry ``headers``."""

    def on_enqueued(self) -> None:
        """Called when a request that was decoded off the event loop has been enqueued. A request
        decoded inline is already enqueued when `submit` returns."""

    @property
    def routing_key(self) -> bytes:
        return self.header(ROUTING_KEY) or b""

    def complete(self, result: LookupResult) -> None:
        try:
            encoded = self.options.response_codec.try_encode_inline(result)
            if encoded is None:
                self.pipeline.encode_later(self, result)
            else:
                self.write(*encoded)
        except EmbedServeError as error:
            self.reject(error)
        except Exception:
            self.fail()

    def write(self, parts: ResponseChunks, nbytes: int) -> None:
        """Writes the encoded response and counts the request as answered."""
        self.is_waiting = False
        encoded_s = perf_counter()
        seconds = encoded_s - self.start_s
        options, telemetry = self.options, self.pipeline.telemetry
        if seconds >= telemetry.watched_s or nbytes > LARGE_RESPONSE_BYTES:
            self._write_observed(parts, nbytes, encoded_s)
        else:
            quota = self.quota
            if quota is not None:
                quota.active -= 1
                quota.answered += 1
                self.quota = None
            self.write_response(
                parts, nbytes, telemetry.request_id_headers(self) if options.has_id else None
            )
        options.metrics.answered(seconds, nbytes)
        self.ticket.answered(seconds)

    def _write_observed(self, parts: ResponseChunks, nbytes: int, encoded_s: float) -> None:
        """Writes a response that is large, or whose request may have to be logged or traced, or
        needs timing headers. Slow path of `write`."""
        telemetry, seen = self.pipeline.telemetry, self.seen("OK", encoded_s)
        self.leave("OK")
        self.write_response(parts, nbytes, telemetry.response_headers(self, encoded_s))
        if nbytes > LARGE_RESPONSE_BYTES:
            self.pipeline.record_large_response(nbytes)
        end_s = perf_counter()
        telemetry.ended(self, end_s - self.start_s, partial(seen, end_s))

    def reject(self, error: EmbedServeError) -> None:
        write = partial(self.write_error, error)
        self.reject_with(error.code, error.message, write, error.model)

    def reject_with(
        self,
        outcome: str,
        message: str,
        write: Callable[[HeaderList], None],
        model: ServedVersion | None = None,
    ) -> None:
        """Ends and counts the request as rejected.

        Args:
            outcome: name of the gRPC code that the request is counted under.
            message: message for the log.
            write: function that writes the error to the client, given the telemetry headers.
            model: version that rejected the request, if it had not reached a queue.
        """
        self.is_waiting = False
        end_s = perf_counter()
        self.pipeline.metrics.ended(self.version or model, outcome, end_s - self.start_s)
        telemetry = self.pipeline.telemetry
        seen = telemetry.traced(self, partial(self.seen(outcome), end_s))
        self.leave(outcome)
        self.options.metrics.refused(
            outcome, message, end_s - self.start_s, lambda: seen().fields()
        )
        write(telemetry.error_headers(self, end_s))

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
        log, named = self.options.metrics.log, lambda: {"request_id": self.request_id.decode()}
        log.log(logging.ERROR, "a request failed", with_traceback=True, fields=named)
        self.reject(EngineError(INTERNAL))

    def cancel(self) -> None:
        """Cancels the request because its client went away. It leaves the queue, and nothing is
        written. Does nothing once the request has ended."""
        if self.is_waiting:
            end_s = perf_counter()
            seconds = end_s - self.start_s
            seen = partial(self.seen("CANCELLED"), end_s)
            self.pipeline.telemetry.ended(self, seconds, seen)
            self.pipeline.metrics.ended(self.version, "CANCELLED", seconds)
            self.abandon()
            self.leave("CANCELLED")
            self.options.metrics.cancelled(seconds)


class ResponseWriter(Protocol):
    """Writer that buffers responses and writes them together."""

    def flush(self) -> None: ...


class RequestPipeline:
    """Request pipeline of a process: the only path from bytes to a batch and back.

    Attributes:
        models: registry of the served models.
        metrics: metrics of the process; those of each protocol are in ``metrics.protocols``.
        authenticator: authenticator of callers; None: no authentication.
        telemetry: telemetry that logs, traces and times requests.
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
        self.authenticator = authenticator
        self.shared_memory = shared_memory
        self.metrics = metrics
        self.telemetry = telemetry or RequestTelemetry()
        self._large_response_callbacks: list[Callable[[int], None]] = []
        self.limits = models.limits
        self._codec_executor = CodecExecutor()
        self._log = RateLimitedLogger(logger)
        self._unflushed: list[ResponseWriter] = []
        self._queue_reopened_callbacks: list[Callable[[], None]] = []
        models.call_back(self.flush, self._notify_queue_reopened)

    def submit(self, call: RequestContext, body: bytes) -> None:
        """Submits a request with its whole body. Never raises.

        ``call`` is completed, rejected or failed, either immediately or when its batch ends.
        """
        options = call.options
        try:
            if self.models.is_full:
                self.models.check_open(options.model, body, options.codec, is_quick=True)
            if call.deadline_s != _NEVER:
                _check_deadline(call)
            if self.shared_memory is None:
                request = options.codec.try_decode_inline(body, options.model, self.limits)
            else:
                request = self._decoders(call)[0](body, options.model, self.limits)
            if request is None:
                self._decode_later(call, body)
            else:
                quota = call.quota
                if quota is not None and quota.models is not None:
                    quota.check_model(request.model, self.models.default_model)
                self.models.enqueue(request, call)
        except EmbedServeError as error:
            call.reject(error)
        except Exception:
            call.fail()

    def _decode_later(self, call: RequestContext, body: bytes) -> None:
        options = call.options
        _, decode_whole = self._decoders(call)

        def decode() -> LookupRequest:
            if self.models.is_full:  # The queue may have filled while the body waited.
                self.models.check_open(options.model, body, options.codec)
            return decode_whole(body, options.model, self.limits)

        def enqueue(request: LookupRequest) -> None:
            if call.quota is not None:
                call.quota.check_model(request.model, self.models.default_model)
            self.models.enqueue(request, call)
            call.on_enqueued()

        self._codec_executor.submit(call, "body", len(body), decode, enqueue)

    def _decoders(self, call: RequestContext) -> tuple[TryDecodeInline, Decode]:
        """Returns (inline decoder, full decoder) for the body.

        They are bound to the caller's shared-memory regions. Requests from a browser page, which
        have an Origin header, get no regions.
        """
        codec, shared = call.options.codec, self.shared_memory
        if shared is None or codec.in_regions is None:
            return codec.try_decode_inline, codec.decode
        is_page = call.header(ORIGIN) is not None
        return codec.in_regions(NONE if is_page else shared.of(call.owner))

    def encode_later(self, call: RequestContext, result: LookupResult) -> None:
        """Encodes ``result`` in the codec thread, then writes it to ``call``.

        Copies ``result`` out of its batch first, so that it does not keep the batch alive.

        Raises:
            OverloadedError: too many bytes wait for the codec thread already.
        """
        result.values = copy_if_view(result.values)
        result.extra_chunks = [copy_if_view(piece) for piece in result.extra_chunks]
        nbytes = result.values.nbytes + sum(piece.nbytes for piece in result.extra_chunks)
        encode = partial(_encode, call, result)
        self._codec_executor.submit(
            call, "answer", nbytes, encode, lambda encoded: call.write(*encoded)
        )

    def reject_if_overloaded(self, call: RequestContext) -> None:
        """Rejects ``call`` before its body arrives if its queue is full.

        Called only while `models.is_closed`.
        """
        try:
            self.models.check_any_open(call.options.model)
        except EmbedServeError as error:
            call.reject(error)

    def flush_later(self, writer: ResponseWriter) -> None:
        """Flushes ``writer`` when the current batch has been completed, or in the next event-loop
        iteration at the latest."""
        if not self._unflushed:
            asyncio.get_running_loop().call_soon(self.flush)
        self._unflushed.append(writer)

    def flush(self) -> None:
        """Flushes all writers that wait in `flush_later`."""
        writers, self._unflushed = self._unflushed, []
        for writer in writers:
            try:
                writer.flush()
            except Exception:
                # The other writers are flushed nevertheless.
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


def late_request() -> DeadlineExceededError:
    """Returns the error for a request whose body did not arrive within REQUEST_S_MAX."""
    return DeadlineExceededError(f"the request had not come whole after {REQUEST_S_MAX:g} s")


def _check_deadline(call: RequestContext) -> None:
    now_s = perf_counter()
    if now_s >= call.deadline_s:
        waited_ms = (now_s - call.start_s) * 1000
        raise DeadlineExceededError(
            f"the deadline had passed when the request was read, {waited_ms:.1f} ms after its start"
        )


def _encode(call: RequestContext, result: LookupResult) -> EncodedResponse:
    """Encodes ``result`` in the codec thread. Stops early once ``call`` no longer waits."""
    parts: list[bytes | memoryview] = []
    for part in call.options.response_codec.encode(result):
        if parts:
            time.sleep(CHUNK_YIELD_S)
        parts.append(part)
        if not call.is_waiting:
            break
    return with_size(parts)
