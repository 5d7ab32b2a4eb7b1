"""One EmbedStream call on grpcio's threads: its requests are read ahead, and answered in order.

One thread reads, until a window of requests or bytes is full; the call's own thread sends. Never
ends a request that was accepted, unless its client went away.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator

from embedserve.codec import protobuf_codec
from embedserve.errors import EmbedServeError
from embedserve.models.models import Service
from embedserve.types import LookupRequest
from embedserve.wire.grpc_asks import Ask, LoopDoor

logger = logging.getLogger(__name__)

WINDOW_REQUESTS_MAX = 256
"""Requests of one stream that wait for their answers or to be sent; more are left unread."""
WINDOW_BYTES_MAX = 64 << 20
"""Values of their answers, likewise; one request past it is still taken."""


class ThreadWindow:
    """The asks of one stream that are not sent yet, in the order of the requests.

    Attributes:
        is_closed: no request is taken any more.
        is_complete: all was taken that the client sent.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self.is_complete = False
        self._asks: deque[tuple[int, Ask]] = deque()
        self._bytes = 0
        self._changed = threading.Condition()

    def add(self, nbytes: int, ask: Ask) -> None:
        """Takes ``ask``, and returns when there is room for another."""
        with self._changed:
            self._asks.append((nbytes, ask))
            self._bytes += nbytes
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.is_closed or self._has_room())

    def _has_room(self) -> bool:
        return len(self._asks) < WINDOW_REQUESTS_MAX and self._bytes < WINDOW_BYTES_MAX

    def first(self) -> Ask | None:
        """The ask that is sent next; None once the window is closed and empty."""
        with self._changed:
            if not self._asks:
                self._changed.wait_for(lambda: self.is_closed or self._asks)
            return self._asks[0][1] if self._asks else None

    def remove_first(self) -> None:
        with self._changed:
            self._bytes -= self._asks.popleft()[0]
            self._changed.notify_all()

    def close(self, *, is_complete: bool = False) -> None:
        with self._changed:
            self.is_closed = True
            self.is_complete = self.is_complete or is_complete
            self._changed.notify_all()

    def waiting(self) -> list[Ask]:
        with self._changed:
            return [ask for _, ask in self._asks]


class ThreadStreamReader:
    """Reads the requests of one stream into its window and has them answered."""

    def __init__(self, service: Service, door: LoopDoor, window: ThreadWindow) -> None:
        self._service = service
        self._door = door
        self._window = window

    def read(self, bodies: Iterator[bytes], timeout_s: Callable[[], float | None]) -> None:
        """Closes the window: as complete unless a request came too late or the call was ended."""
        try:
            for body in bodies:
                if self._window.is_closed:
                    return
                self._add(body, timeout_s())
        except Exception as error:  # grpcio raises a bare one to end the reading of an ended call
            logger.debug("reading a stream ended: %r", error)
            self._window.close()
        else:
            self._window.close(is_complete=True)

    def _add(self, body: bytes, timeout_s: float | None) -> None:
        nbytes, message = self._decode(body)
        ask = self._door.new_ask(message, timeout_s)
        self._door.hand(ask)
        self._window.add(nbytes, ask)

    def _decode(self, body: bytes) -> tuple[int, bytes | LookupRequest]:
        """(bytes of its values, the request); a body that is refused says so when it is asked."""
        try:
            request = protobuf_codec.decode_request(body)
            return self._service.answer_bytes(request), request
        except EmbedServeError:
            return 0, body
