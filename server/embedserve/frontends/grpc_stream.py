"""One EmbedStream call: its requests are read ahead, and answered in order.

Reading goes on while answers are awaited, until a window of requests or bytes is full. An
answer is encoded as soon as it is there, so that none keeps the values of its whole batch.
Never ends a request that was accepted, unless its client went away.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from time import perf_counter

from embedserve.codec import protobuf_codec
from embedserve.errors import INTERNAL, EmbedServeError, EngineError
from embedserve.metrics import ProtocolMetrics
from embedserve.service import Service
from embedserve.types import LookupResult

logger = logging.getLogger(__name__)

WINDOW_REQUESTS_MAX = 256
"""Requests of one stream that wait for their answers or to be sent; more are left unread."""
WINDOW_BYTES_MAX = 64 << 20
"""Values of their answers, likewise; one request past it is still taken."""


class Window:
    """The answers of one stream that are not sent yet, in the order of the requests.

    Attributes:
        is_closed: no request is taken any more.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._answers: deque[tuple[int, asyncio.Future[bytes]]] = deque()
        self._bytes = 0
        self._changed = asyncio.Event()

    async def add(self, nbytes: int, answer: asyncio.Future[bytes]) -> None:
        """Takes ``answer``, and returns when there is room for another."""
        self._answers.append((nbytes, answer))
        self._bytes += nbytes
        self._changed.set()
        await self._until(lambda: self.is_closed or self._has_room())

    def _has_room(self) -> bool:
        return len(self._answers) < WINDOW_REQUESTS_MAX and self._bytes < WINDOW_BYTES_MAX

    async def first(self) -> asyncio.Future[bytes] | None:
        """The answer that is sent next; None once the window is closed and empty."""
        await self._until(lambda: self.is_closed or self._answers)
        return self._answers[0][1] if self._answers else None

    def first_done(self) -> bytes | None:
        """The answer that is sent next, if it is there already."""
        if self._answers and self._answers[0][1].done():
            return self._answers[0][1].result()
        return None

    def remove_first(self) -> None:
        self._bytes -= self._answers.popleft()[0]
        self._changed.set()

    def close(self) -> None:
        self.is_closed = True
        self._changed.set()

    def cancel(self) -> None:
        """Closes the window and takes requests out of the queue before they cost a lookup."""
        self.close()
        for _, answer in self._answers:
            answer.cancel()

    async def _until(self, is_true: Callable[[], object]) -> None:
        while not is_true():
            self._changed.clear()
            await self._changed.wait()


class StreamReader:
    """Reads the requests of one stream into its window and has them answered."""

    def __init__(self, service: Service, metrics: ProtocolMetrics, window: Window) -> None:
        self._service = service
        self._metrics = metrics
        self._window = window

    async def read(
        self, bodies: AsyncIterator[bytes], time_remaining: Callable[[], float | None]
    ) -> bool:
        """Whether all was taken that the client sent: False after a request that came too late."""
        async for body in bodies:
            if self._window.is_closed:
                return False
            await self._window.add(*self._ask(body, time_remaining()))
        return True

    def _ask(self, body: bytes, timeout_s: float | None) -> tuple[int, asyncio.Future[bytes]]:
        """(bytes of its values, the future encoded answer); refusals are answers, too."""
        start = perf_counter()
        encoded: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        try:
            request = protobuf_codec.decode_request(body)
            answer = self._service.submit(request, timeout_s)
            nbytes = self._service.answer_bytes(request)
        except Exception as error:
            encoded.set_result(self._refusal(start, error))
            return 0, encoded
        answer.add_done_callback(lambda _: self._finish(start, answer, encoded))
        encoded.add_done_callback(lambda _: answer.cancel())
        return nbytes, encoded

    def _finish(
        self,
        start: float,
        answer: asyncio.Future[LookupResult],
        encoded: asyncio.Future[bytes],
    ) -> None:
        if answer.cancelled() or encoded.cancelled():
            self._metrics.failed("CANCELLED", perf_counter() - start)
            return
        try:
            body = protobuf_codec.encode_result(answer.result())
        except Exception as error:
            encoded.set_result(self._refusal(start, error))
            return
        self._metrics.answered(perf_counter() - start, len(body))
        encoded.set_result(body)

    def _refusal(self, start: float, error: Exception) -> bytes:
        if not isinstance(error, EmbedServeError):
            logger.error("a request of EmbedStream failed", exc_info=error)
            error = EngineError(INTERNAL)
        self._metrics.failed(error.code, perf_counter() - start)
        return protobuf_codec.encode_error(error)
