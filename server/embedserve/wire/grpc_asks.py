"""From grpcio's threads into the event loop and back: what one message asks, and its answer.

A handler's thread hands a message over and waits; the event loop takes all that came meanwhile in
one turn, so that one wake-up and warm caches serve many, and they share a batch. Decoding, encoding
and counting happen on the loop's thread. Knows nothing of calls and their status.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from time import perf_counter

from embedserve.codec import protobuf_codec
from embedserve.errors import INTERNAL, EmbedServeError, EngineError
from embedserve.metrics.metrics import ProtocolMetrics
from embedserve.models.models import Service
from embedserve.types import LookupRequest, LookupResult

logger = logging.getLogger(__name__)


class Ask:
    """One message and, once wait() has returned, its answer or error; the Caller of its request.

    Attributes:
        is_waiting: until it is answered, refused or given up.
        answer_body: the encoded EmbedResponse.
        error: why there is none; None also where it was given up.
    """

    __slots__ = (
        "_answered",
        "_metrics",
        "_start_s",
        "answer_body",
        "error",
        "is_waiting",
        "message",
        "timeout_s",
    )

    def __init__(
        self, message: bytes | LookupRequest, timeout_s: float | None, metrics: ProtocolMetrics
    ) -> None:
        self.message = message
        self.timeout_s = timeout_s
        self.is_waiting = True
        self.answer_body = b""
        self.error: EmbedServeError | None = None
        self._metrics = metrics
        self._start_s = perf_counter()
        self._answered = threading.Lock()
        self._answered.acquire()

    def wait(self) -> None:
        """Blocks until it is answered, refused or given up; once."""
        self._answered.acquire()

    def answer(self, result: LookupResult) -> None:
        try:
            # Encoded at once, so that none keeps the values of its whole batch.
            self.answer_body = protobuf_codec.encode_result(result)
        except Exception as error:
            return self.fail(error)
        self._metrics.answered(perf_counter() - self._start_s, len(self.answer_body))
        self._end()

    def refuse(self, error: EmbedServeError) -> None:
        self.error = error
        self._metrics.failed(error.code, perf_counter() - self._start_s)
        self._end()

    def fail(self, error: Exception) -> None:
        """Refuses for an error that nobody foresaw."""
        logger.error("a request failed", exc_info=error)
        self.refuse(EngineError(INTERNAL))

    def give_up(self) -> None:
        """Leaves the queue: the client went away."""
        if self.is_waiting:
            self._metrics.failed("CANCELLED", perf_counter() - self._start_s)
            self._end()

    def _end(self) -> None:
        self.is_waiting = False
        self._answered.release()


class LoopDoor:
    """Where threads hand asks to the event loop's thread."""

    def __init__(self, service: Service, loop: asyncio.AbstractEventLoop) -> None:
        self._service = service
        self._metrics = service.metrics.protocols["grpc"]
        self._loop = loop
        self._handed: deque[Ask] = deque()
        self._is_scheduled = False

    def new_ask(self, message: bytes | LookupRequest, timeout_s: float | None) -> Ask:
        """One that is not handed over yet: ``message`` is to be answered within ``timeout_s``."""
        return Ask(message, timeout_s, self._metrics)

    def hand(self, ask: Ask) -> None:
        """Has ``ask`` answered; from any thread, returns at once."""
        self._handed.append(ask)
        # The loop lowers the flag before it empties the queue: what is appended is taken.
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon_threadsafe(self._take)

    def give_up(self, ask: Ask) -> None:
        """Has ``ask`` leave the queue unless it was answered; from any thread."""
        if ask.is_waiting:
            self._loop.call_soon_threadsafe(ask.give_up)

    def _take(self) -> None:
        self._is_scheduled = False
        while self._handed:
            self._start(self._handed.popleft())

    def _start(self, ask: Ask) -> None:
        if not ask.is_waiting:
            return
        try:
            message = ask.message
            if isinstance(message, bytes):
                self._service.check_open("")
                message = protobuf_codec.decode_request(message)
            self._service.enqueue(message, ask, ask.timeout_s)
        except EmbedServeError as error:
            ask.refuse(error)
        except Exception as error:
            ask.fail(error)
