"""The request pipeline: the only path from bytes to a batch and back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from time import perf_counter

from embedserve.access.authenticator import Authenticator
from embedserve.access.client_address import ClientAddresses
from embedserve.batching.split import copy_if_view
from embedserve.codec.codec import Codecs, Decode, TryDecodeInline
from embedserve.errors import DeadlineExceededError, EmbedServeError
from embedserve.lookup_types import EncodedResponse, LookupRequest, LookupResult, with_size
from embedserve.metrics.metrics import Metrics
from embedserve.metrics.rate_limited_logger import RateLimitedLogger
from embedserve.models.model_registry import ModelRegistry
from embedserve.pipeline.codec_executor import CodecExecutor
from embedserve.pipeline.request_context import NEVER, RequestContext
from embedserve.pipeline.telemetry import RequestTelemetry
from embedserve.shared_memory.region_registry import NONE, RegionRegistry

logger = logging.getLogger(__name__)

UPLOAD_S_MAX = 30.0
"""Seconds that the body of one request may take to arrive. Slower requests are rejected with
DEADLINE_EXCEEDED."""
ORIGIN = b"origin"
"""Header that browsers add to the requests of a page to another site."""
CHUNK_YIELD_S = 0.0001
"""Seconds of sleep between two chunks of a large response, so that the event loop can take the GIL.
Without it the loop waits a full 5 ms switch interval each time."""


class RequestPipeline:
    """Request pipeline of a process: the only path from bytes to a batch and back.

    Attributes:
        models: registry of the served models.
        codecs: codecs of the process.
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
        self.codecs = Codecs()
        self.authenticator = authenticator
        self.shared_memory = shared_memory
        self.metrics = metrics
        self.telemetry = telemetry or RequestTelemetry()
        self._large_response_callbacks: list[Callable[[int], None]] = []
        self.limits = models.limits
        waiting_bytes: Counter[object] = Counter()
        self._codec_executor = CodecExecutor(waiting_bytes)
        self._shared_memory_executor = CodecExecutor(waiting_bytes)
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
                _check_deadline(context)
            if self.shared_memory is None:
                request = options.codec.try_decode_inline(body, options.model, self.limits)
            else:
                request = self._decoders(context)[0](body, options.model, self.limits)
            if request is None:
                self._decode_later(context, len(body), lambda: body)
            else:
                quota = context.quota
                if quota is not None and quota.models is not None:
                    quota.check_model(request.model, self.models.default_model)
                self.models.enqueue(request, context)
        except EmbedServeError as error:
            context.reject(error)
        except Exception:
            context.fail()

    def submit_compressed(
        self, context: RequestContext, nbytes: int, decompress: Callable[[], bytes]
    ) -> None:
        """Submits a request whose body is decompressed in the codec thread first. Never raises.

        Args:
            nbytes: bytes held until the body is decompressed.
            decompress: returns the body, or raises EmbedServeError.
        """
        try:
            if context.deadline_s != NEVER:
                _check_deadline(context)
            self._decode_later(context, nbytes, decompress, is_compressed=True)
        except EmbedServeError as error:
            context.reject(error)
        except Exception:
            context.fail()

    def _decode_later(
        self,
        context: RequestContext,
        nbytes: int,
        read_body: Callable[[], bytes],
        *,
        is_compressed: bool = False,
    ) -> None:
        options = context.options
        _, decode_whole = self._decoders(context)

        def decode() -> LookupRequest:
            body = read_body()
            if self.models.has_full_queue:  # The queue may have filled while the body waited.
                self.models.check_queue_for_body(options.model, body, options.codec)
            return decode_whole(body, options.model, self.limits)

        def enqueue(request: LookupRequest) -> None:
            if context.quota is not None:
                context.quota.check_model(request.model, self.models.default_model)
            self.models.enqueue(request, context)
            context.writer.on_enqueued()

        self._codec_executor.submit(
            context, "body", nbytes, decode, enqueue, is_compressed=is_compressed
        )

    def _decoders(self, context: RequestContext) -> tuple[TryDecodeInline, Decode]:
        """Returns (inline decoder, full decoder) for the body.

        They are bound to the caller's shared-memory regions. Requests from a browser page, which
        have an Origin header, get no regions.
        """
        codec, shared = context.options.codec, self.shared_memory
        if shared is None or codec.in_regions is None:
            return codec.try_decode_inline, codec.decode
        is_page = context.writer.header(ORIGIN) is not None
        return codec.in_regions(NONE if is_page else shared.of(context.owner))

    def encode_later(self, context: RequestContext, result: LookupResult) -> None:
        """Encodes ``result`` in the codec thread, then writes it to ``context``. A thread of its
        own encodes a response that may block.

        Copies ``result`` out of its batch first, so that it does not keep the batch alive.

        Raises:
            OverloadedError: too many bytes wait for the codec thread already.
        """
        result.values = copy_if_view(result.values)
        result.extra_chunks = [copy_if_view(chunk) for chunk in result.extra_chunks]
        nbytes = result.values.nbytes + sum(chunk.nbytes for chunk in result.extra_chunks)
        encode = partial(_encode, context, result)
        may_block = result.output is not None and result.output.may_block
        executor = self._shared_memory_executor if may_block else self._codec_executor
        executor.submit(
            context, "answer", nbytes, encode, lambda encoded: context.write(result, *encoded)
        )

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


def late_request() -> DeadlineExceededError:
    """Returns the error for a request whose body did not arrive within UPLOAD_S_MAX."""
    return DeadlineExceededError(f"the request was incomplete after {UPLOAD_S_MAX:g} s")


def _check_deadline(context: RequestContext) -> None:
    now_s = perf_counter()
    if now_s >= context.deadline_s:
        waited_ms = (now_s - context.start_s) * 1000
        raise DeadlineExceededError(
            f"the deadline had passed when the request was read, {waited_ms:.1f} ms after its start"
        )


def _encode(context: RequestContext, result: LookupResult) -> EncodedResponse:
    """Encodes ``result`` in the codec thread. Stops early once ``context`` no longer waits."""
    chunks: list[bytes | memoryview] = []
    for chunk in context.options.response_codec.encode(result):
        if chunks:
            time.sleep(CHUNK_YIELD_S)
        chunks.append(chunk)
        if not context.is_waiting:
            break
    return with_size(chunks)
