"""The pipeline: what happens between a protocol's bytes and its bytes, once for all of them.

Admits a request, has a codec decode it, queues it with its model, and when its vectors come has
them encoded, counts, and hands the bytes to whoever asked. A protocol is a small adapter: it makes
a Call of its own kind for each request and writes what the call is given. It never sees ids.
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
"""How long the body of one request may take to come."""
_NEVER = float("inf")
LARGE_RESPONSE_BYTES = 64 << 10
"""Told to who looks after what is not read; smaller ones find room in a socket."""
ROUTING_KEY = b"x-routing-key"
"""The header of who is to be answered by the same version each time, where several share."""
ORIGIN = b"origin"
"""The header that browsers send with what a page asks of another site."""
CHUNK_YIELD_S = 0.0001
"""Left to the event loop between two pieces of a large answer: it would wait for the interpreter's
lock for five milliseconds each time it needs it."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestOptions:
    """What the head of a request asks for; requests with the same head share it.

    Attributes:
        model: of the URL; "" for what the body names, or the default model.
        codec: of the body.
        response_codec: of the answer.
        timeout_s: how long the answer is wanted, from the request's first byte; None: for ever.
        metrics: of the protocol.
        has_id: it has an X-Request-Id, which its answer repeats.
    """

    model: str
    codec: Codec
    response_codec: Codec
    timeout_s: float | None
    metrics: ProtocolMetrics
    has_id: bool = False

    def with_codec(self, codec: Codec) -> RequestOptions:
        """The same in another form."""
        return replace(self, codec=codec, response_codec=codec)


class RequestContext(TracedRequest):
    """One request, from its first byte until its answer is written; counted once.

    A protocol's adapter says how an answer and a refusal are written.

    Attributes:
        asked: what its head says.
        pipeline: that it is asked of.
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
        """Where it comes from, such as its connection, which tells callers apart that have no
        names."""
        return self

    @property
    def owner(self) -> str:
        """The name that it asks by, of whom its regions of shared memory are."""
        quota = self.quota
        return EVERYBODY if quota is None else quota.grant.name

    @property
    def certificate(self) -> Certificate | None:
        """That the client has shown."""
        return None

    @property
    def peer(self) -> str:
        """The address of the other end of its connection."""
        return ""

    @property
    def address(self) -> str:
        return self.pipeline.addresses.find(self.peer, self.header)

    @property
    def can_delay_rejection(self) -> bool:
        """Whether its refusal may wait, and keep nobody but its client waiting."""
        return True

    @abstractmethod
    def write_response(
        self, parts: ResponseChunks, nbytes: int, headers: HeaderList | None = None
    ) -> None:
        """Writes the encoded answer, ``nbytes`` in all, and what is ``told`` of its request."""

    @abstractmethod
    def write_error(self, error: EmbedServeError, headers: HeaderList) -> None:
        """Writes why there is no answer, in the protocol's form."""

    def on_enqueued(self) -> None:
        """Told of a request that took long to decode, once it waits in its queue; of any other that
        is so when it was asked."""

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
        """Writes the encoded answer, and counts it."""
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
        """As write, of a request of which there may be something to tell."""
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
        """Ends as ``outcome``, which ``write`` tells the client; ``model`` rejected the request."""
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
        """Refuses what has not been asked, now or in ``wait_s``."""
        if wait_s:
            asyncio.get_running_loop().call_later(wait_s, self._reject_if_waiting, error)
        else:
            self.reject(error)

    def _reject_if_waiting(self, error: EmbedServeError) -> None:
        if self.is_waiting:
            self.reject(error)

    def fail(self) -> None:
        """Refuses for the error that is being handled, which nobody foresaw."""
        log, named = self.options.metrics.log, lambda: {"request_id": self.request_id.decode()}
        log.log(logging.ERROR, "a request failed", with_traceback=True, fields=named)
        self.reject(EngineError(INTERNAL))

    def cancel(self) -> None:
        """The client went away: its request leaves the queue, and nothing is written."""
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
    """What collects answers, to write them out together."""

    def flush(self) -> None: ...


class RequestPipeline:
    """The one way from bytes to a batch and back, of a whole process.

    Attributes:
        models: what is served.
        metrics: of the process; by protocol in ``metrics.protocols``.
        access: who may ask; None: everybody.
        observer: tells where the time of requests went.
        shared_memory: in which tensors may lie; None: there is none.
        addresses: finds the addresses of clients.
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
        """Has ``call`` answered, refused or failed; now or when its batch ends. Never raises."""
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
            if self.models.is_full:  # since it waits
                self.models.check_open(options.model, body, options.codec)
            return decode_whole(body, options.model, self.limits)

        def enqueue(request: LookupRequest) -> None:
            if call.quota is not None:
                call.quota.check_model(request.model, self.models.default_model)
            self.models.enqueue(request, call)
            call.on_enqueued()

        self._codec_executor.submit(call, "body", len(body), decode, enqueue)

    def _decoders(self, call: RequestContext) -> tuple[TryDecodeInline, Decode]:
        """Of its body. What it says to lie in shared memory is looked for in its owner's regions; a
        page of any site, which a browser shows, has none."""
        codec, shared = call.options.codec, self.shared_memory
        if shared is None or codec.in_regions is None:
            return codec.try_decode_inline, codec.decode
        is_page = call.header(ORIGIN) is not None
        return codec.in_regions(NONE if is_page else shared.of(call.owner))

    def encode_later(self, call: RequestContext, result: LookupResult) -> None:
        """Has ``call`` told the encoded ``result``, which takes long to encode.

        Raises:
            OverloadedError: too much waits for that already.
        """
        result.values = copy_if_view(result.values)
        result.extra_chunks = [copy_if_view(piece) for piece in result.extra_chunks]
        nbytes = result.values.nbytes + sum(piece.nbytes for piece in result.extra_chunks)
        encode = partial(_encode, call, result)
        self._codec_executor.submit(
            call, "answer", nbytes, encode, lambda encoded: call.write(*encoded)
        )

    def reject_if_overloaded(self, call: RequestContext) -> None:
        """Refuses ``call`` before its body has come if its queue is full; for while one is."""
        try:
            self.models.check_any_open(call.options.model)
        except EmbedServeError as error:
            call.reject(error)

    def flush_later(self, writer: ResponseWriter) -> None:
        """Has ``writer`` flushed once the batch that is being answered has ended, or soon."""
        if not self._unflushed:
            asyncio.get_running_loop().call_soon(self.flush)
        self._unflushed.append(writer)

    def flush(self) -> None:
        """Writes out what was answered."""
        writers, self._unflushed = self._unflushed, []
        for writer in writers:
            try:
                writer.flush()
            except Exception:
                # The others' answers go out all the same.
                self._log.log(logging.ERROR, "an answer could not be written", with_traceback=True)

    def on_queue_reopened(self, callback: Callable[[], None]) -> None:
        """Has ``callback`` called whenever a queue that was full takes requests again."""
        self._queue_reopened_callbacks.append(callback)

    def on_large_response(self, callback: Callable[[int], None]) -> None:
        """Has ``callback`` told the bytes of each large answer that was written."""
        self._large_response_callbacks.append(callback)

    def record_large_response(self, nbytes: int) -> None:
        for callback in self._large_response_callbacks:
            callback(nbytes)

    def _notify_queue_reopened(self) -> None:
        for callback in self._queue_reopened_callbacks:
            callback()


def late_request() -> DeadlineExceededError:
    """What is said of a request whose body did not come."""
    return DeadlineExceededError(f"the request had not come whole after {REQUEST_S_MAX:g} s")


def _check_deadline(call: RequestContext) -> None:
    now_s = perf_counter()
    if now_s >= call.deadline_s:
        waited_ms = (now_s - call.start_s) * 1000
        raise DeadlineExceededError(
            f"the deadline had passed when the request was read, {waited_ms:.1f} ms after its start"
        )


def _encode(call: RequestContext, result: LookupResult) -> EncodedResponse:
    """In a thread; not to its end where the client went away."""
    parts: list[bytes | memoryview] = []
    for part in call.options.response_codec.encode(result):
        if parts:
            time.sleep(CHUNK_YIELD_S)
        parts.append(part)
        if not call.is_waiting:
            break
    return with_size(parts)
