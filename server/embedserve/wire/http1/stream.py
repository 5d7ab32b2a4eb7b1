"""A request of HTTP/1 with its response, as a stream."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING

from embedserve.wire.http_stream import NULL_HANDLER, Handler, Headers, HttpRequest, MakeHandler

if TYPE_CHECKING:
    from embedserve.wire.http1.connection import Http1Connection

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
BODILESS_STATUSES = (204, 304)
CLOSE = b"connection: close\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"
LAST_CHUNK = b"0\r\n\r\n"


class Http1Stream:
    """A request being received or answered, or queued behind others. Implements HttpStream.

    Attributes:
        handler: handler of the request; NULL_HANDLER before it is opened and after it ends.
        is_opened: whether the handler was made. A queued request is not opened.
        is_last: whether the connection ends with the response.
    """

    __slots__ = (
        "_body",
        "_head",
        "_is_1_0",
        "_is_chunked",
        "_is_end_passed",
        "_is_head_request",
        "_make_handler",
        "connection",
        "handler",
        "held_bytes",
        "is_last",
        "is_opened",
        "is_received",
        "is_sent",
        "missing_bytes",
    )

    http_version = "1.1"

    def __init__(
        self,
        connection: Http1Connection,
        make_handler: MakeHandler,
        request: HttpRequest,
        *,
        is_1_0: bool,
        is_last: bool,
    ) -> None:
        """
        Args:
            is_1_0: whether the client speaks HTTP/1.0, which has no chunks.
            is_last: whether the client wants the connection to end with the response.
        """
        self.connection = connection
        self.handler: Handler = NULL_HANDLER
        self._make_handler = make_handler
        self._is_head_request = request.method == b"HEAD"
        self._is_1_0 = is_1_0
        self.missing_bytes = request.content_length
        self.is_last = is_last
        self.is_opened = self.is_received = self.is_sent = False
        self._is_end_passed = self._is_chunked = False
        self._body: list[bytes] = []
        self._head = b""  # of the response, until its first chunk is sent
        self.held_bytes = 0

    # The request

    def append(self, data: bytes) -> None:
        self._body.append(data)
        self.held_bytes += len(data)

    def pass_on(self) -> None:
        """Passes what was received since the last call to the handler, made by the first call."""
        if not self.is_opened:
            self.is_opened = True
            handler = self._make_handler(self)
            if self.is_sent:
                return
            self.handler = handler
        data = b"".join(self._body)
        self._drop_body()
        if data or (self.is_received and not self._is_end_passed):
            self._is_end_passed = self.is_received
            self.handler.receive(data, self.is_received)

    def _drop_body(self) -> None:
        self._body.clear()
        self.held_bytes = 0

    def reset(self) -> None:
        """Ends the stream without a response."""
        self.is_sent = True
        self._drop_body()
        handler, self.handler = self.handler, NULL_HANDLER
        handler.reset()

    # The response

    @property
    def can_delay_rejection(self) -> bool:
        """Whether a rejection may be delayed: not while the client still sends the body."""
        return self.is_received

    @property
    def unsent_bytes(self) -> int:
        return self.connection.unsent_bytes if self.connection.is_write_paused else 0

    def respond(
        self, status: int, headers: Headers, chunks: Sequence[bytes | memoryview], nbytes: int
    ) -> None:
        if self.is_sent:
            return
        close = CLOSE if self._ends_connection() else b""
        head = b"%b%b%bcontent-length: %d\r\n%b\r\n" % (
            STATUS_LINES[status],
            self.connection.date.line,
            lines_of(headers),
            nbytes,
            close,
        )
        self.connection.write(head, chunks, nbytes)
        self._finish()

    def send_continue(self) -> None:
        """Sends 100 (Continue), which a client of HTTP/1.0 would take for the response."""
        if not self._is_1_0:
            self.connection.transport.write(CONTINUE)

    def start_response(self, status: int, headers: Headers, *, is_end: bool = False) -> None:
        if self.is_sent:
            return
        has_body = not (is_end or self._is_head_request or status in BODILESS_STATUSES)
        framing = b""
        if has_body and all(name != b"content-length" for name, _ in headers):
            if self._is_1_0:
                self.is_last = True  # the body ends with the connection
            else:
                self._is_chunked = True
                framing = CHUNKED
        if self._ends_connection():
            framing += CLOSE
        first = STATUS_LINES[status] + self.connection.date.line
        self._head = b"%b%b%b\r\n" % (first, lines_of(headers), framing)
        if is_end:
            self.end()

    def send_body(self, chunks: Sequence[bytes | memoryview], nbytes: int) -> None:
        head, self._head = self._head, b""
        if self._is_chunked:
            head += b"%x\r\n" % nbytes
            chunks = (*chunks, b"\r\n")
        self.connection.write(head, chunks, nbytes)

    def end(self) -> None:
        rest = self._head + LAST_CHUNK if self._is_chunked else self._head
        if rest:
            self.connection.write(rest, (), 0)
        self._finish()

    def abort(self) -> None:
        """Closes the connection, so that the client sees that the response is incomplete."""
        if not self.is_sent:
            self.connection.transport.close()

    def _ends_connection(self) -> bool:
        """Returns whether the connection ends with this response. A body that has not arrived is
        not read any more, so that no later request can be found."""
        self.is_last = self.is_last or not self.is_received or self.connection.ends_with(self)
        return self.is_last

    def _finish(self) -> None:
        self.is_sent = True
        self.handler = NULL_HANDLER
        self.connection.response_sent(self)

    # Flow control, which HTTP/1 does not have

    def consumed(self, nbytes: int) -> None:
        """Does nothing: there is no window to return bytes to."""

    def expect(self, nbytes: int) -> None:
        """Does nothing: there is no window to open."""

    def slow_next_uploads(self) -> None:
        """Does nothing: there is no window to shrink."""


def lines_of(headers: Headers) -> bytes:
    """Returns ``headers`` as HTTP/1 header lines."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])
