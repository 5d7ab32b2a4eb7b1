"""Decodes large bodies and encodes large responses in threads, off the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

from embedserve.batching.split import copy_if_view
from embedserve.errors import DeadlineExceededError, EmbedServeError, OverloadedError
from embedserve.lookup_types import EncodedResponse, LookupRequest, LookupResult

if TYPE_CHECKING:
    from embedserve.pipeline.request_pipeline import RequestContext

T = TypeVar("T")
WaitingCalls = dict[object, deque[Callable[[], None]]]
"""Calls that wait for their turn, by source."""
WAITING_BYTES_MAX = 256 << 20
"""Maximum bytes of large request bodies and responses that wait for the codec thread, in total. It
bounds the memory that they hold. A single call is accepted at any size while no other waits."""
SOURCE_SHARE = 1 / 2
"""Fraction of WAITING_BYTES_MAX that one source may hold."""
CHUNK_YIELD_S = 0.0001
"""Seconds of sleep while a large response is encoded, so that the event loop can take the GIL.
Without it the loop waits a full 5 ms switch interval each time."""
CHUNK_YIELD_BYTES = 64 << 10
"""Bytes of chunks that are encoded between two such sleeps, at least. A response may have thousands
of small chunks, such as one for each key."""


class CodecExecutor:
    """A single codec thread with a byte budget for queued work, which executors may share.

    Sources (`PendingRequest.source`) take turns, one call each, and each has at most its share of
    the budget. While other calls wait, calls that decompress get at most every second turn: many
    connections could otherwise keep the thread busy with a few bytes each. The thread competes
    with the event loop for the interpreter lock. All methods are called on the event loop.
    """

    def __init__(self, waiting_bytes: Counter[object]) -> None:
        """
        Args:
            waiting_bytes: bytes by source of work that is not done, which the executor counts.
                Executors with the same counter share one budget.
        """
        self._thread = _new_thread()
        self._bytes = waiting_bytes
        # By whether they decompress; each in the order of its sources' turns.
        self._waiting: tuple[WaitingCalls, WaitingCalls] = ({}, {})
        self._is_compressed_next = self._is_busy = False

    def submit(
        self,
        context: RequestContext,
        what: str,
        nbytes: int,
        work: Callable[[], T],
        then: Callable[[T], None],
        *,
        is_compressed: bool = False,
    ) -> None:
        """Runs ``work`` in the codec thread, then calls ``then`` with its result on the event
        loop.

        Once ``context`` is no longer waiting, ``work`` is skipped or its result is dropped. Once
        its deadline has passed, ``work`` is skipped and ``context`` is rejected. An error from
        ``work`` or ``then`` rejects or fails ``context``.

        Args:
            what: name of the data in error messages, "body" or "answer".
            nbytes: bytes of that data, which count against the budget until the work is done.
            is_compressed: whether ``work`` decompresses the data first.

        Raises:
            OverloadedError: the budget is exhausted, or the share of its source.
        """
        source = context.source
        self._check_room(source, what, nbytes)
        self._bytes[source] += nbytes

        def work_if_waiting() -> T | None:
            if not context.is_waiting:
                return None
            if perf_counter() >= context.deadline_s:
                raise DeadlineExceededError(f"the deadline passed while the {what} waited")
            return work()

        def done(future: asyncio.Future[T | None]) -> None:
            self._bytes[source] -= nbytes
            if not self._bytes[source]:
                del self._bytes[source]
            self._is_busy = False
            self._start_next()
            if not context.is_waiting:
                future.exception()  # retrieved, or asyncio would log it
                return
            try:
                result = future.result()
                assert result is not None  # context was waiting throughout, so work ran
                then(result)
            except EmbedServeError as error:
                context.reject(error)
            except Exception:
                context.fail()

        def start() -> None:
            loop = asyncio.get_running_loop()
            try:
                future = loop.run_in_executor(self._thread, work_if_waiting)
            except RuntimeError as error:
                # The first call starts the thread, which fails at a limit of threads. The pool
                # keeps such a call and would run it later, so a new pool takes its place.
                self._thread = _new_thread()
                future = loop.create_future()
                future.set_exception(error)
            future.add_done_callback(done)

        self._waiting[is_compressed].setdefault(source, deque()).append(start)
        self._start_next()

    def _check_room(self, source: object, what: str, nbytes: int) -> None:
        """Raises OverloadedError as ``submit`` does."""
        held, share = self._bytes[source], int(SOURCE_SHARE * WAITING_BYTES_MAX)
        if held and held + nbytes > share:
            raise OverloadedError(
                f"{what} has {nbytes} bytes, and {held} of other large requests and answers of "
                f"this caller wait to be read and written; its share is {share}"
            )
        total = self._bytes.total()
        if total and total + nbytes > WAITING_BYTES_MAX:
            raise OverloadedError(
                f"{what} has {nbytes} bytes, and {total} of other large requests and "
                "answers wait to be read and written"
            )

    def _start_next(self) -> None:
        """Starts the call whose turn it is, if the thread is idle."""
        plain, compressed = self._waiting
        is_compressed = bool(compressed) and (self._is_compressed_next or not plain)
        waiting = compressed if is_compressed else plain
        if self._is_busy or not waiting:
            return
        self._is_compressed_next = not is_compressed
        source = next(iter(waiting))
        calls = waiting.pop(source)
        start = calls.popleft()
        if calls:
            waiting[source] = calls
        self._is_busy = True
        start()


def _new_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="codec")


def check_deadline(context: RequestContext) -> None:
    """Raises DeadlineExceededError if the deadline of a request that was read has passed."""
    now_s = perf_counter()
    if now_s >= context.deadline_s:
        waited_ms = (now_s - context.start_s) * 1000
        raise DeadlineExceededError(
            f"the deadline had passed when the request was read, {waited_ms:.1f} ms after its start"
        )


def decode_later(
    context: RequestContext,
    nbytes: int,
    read_body: Callable[[], bytes],
    *,
    is_compressed: bool = False,
) -> None:
    """Decodes a body in the codec thread, and then enqueues its request. Never raises.

    Args:
        nbytes: bytes held until the body is read.
        read_body: returns the body, or raises EmbedServeError.
        is_compressed: whether ``read_body`` decompresses it.
    """
    options, models, limits = context.options, context.pipeline.models, context.pipeline.limits

    def decode() -> LookupRequest:
        body = read_body()
        if models.has_full_queue:  # The queue may have filled while the body waited.
            models.check_queue_for_body(options.model, body, options.codec)
        return decoder(body, options.model, limits)

    def enqueue(request: LookupRequest) -> None:
        if context.quota is not None:
            context.quota.check_model(request.model, models.default_model)
        models.enqueue(request, context)
        context.writer.on_enqueued()

    try:
        check_deadline(context)
        decoder = context.pipeline.decoder(context)
        context.pipeline.codec_executor.submit(
            context, "body", nbytes, decode, enqueue, is_compressed=is_compressed
        )
    except EmbedServeError as error:
        context.reject(error)
    except Exception:
        context.fail()


def encode_later(context: RequestContext, result: LookupResult) -> None:
    """Encodes ``result`` in the codec thread, then writes it to ``context``. Responses that may
    block are encoded in another thread, of ``shared_memory_executor``.

    Copies ``result`` out of its batch first, so that it does not keep the batch alive.

    Raises:
        OverloadedError: too many bytes wait for the codec thread already.
    """
    result.values = copy_if_view(result.values)
    result.extra_chunks = [copy_if_view(chunk) for chunk in result.extra_chunks]
    nbytes = result.values.nbytes + sum(chunk.nbytes for chunk in result.extra_chunks)
    encode = partial(_encode, context, result)
    may_block = result.output is not None and result.output.may_block
    pipeline = context.pipeline
    executor = pipeline.shared_memory_executor if may_block else pipeline.codec_executor
    executor.submit(
        context, "answer", nbytes, encode, lambda encoded: context.write(result, *encoded)
    )


def _encode(context: RequestContext, result: LookupResult) -> EncodedResponse:
    """Encodes ``result`` in the codec thread. Stops early once ``context`` no longer waits."""
    chunks: list[bytes | memoryview] = []
    nbytes = slept_at = 0
    for chunk in context.options.response_codec.encode(result):
        if nbytes - slept_at >= CHUNK_YIELD_BYTES:
            time.sleep(CHUNK_YIELD_S)
            slept_at = nbytes
        nbytes += memoryview(chunk).nbytes
        chunks.append(chunk)
        if not context.is_waiting:
            break
    return chunks, nbytes
