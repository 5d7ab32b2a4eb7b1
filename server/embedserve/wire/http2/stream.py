"""An HTTP/2 stream: a request and its response, their windows, and unsent response data."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from embedserve.wire.http2.frames import ErrorCode
from embedserve.wire.http2.header_blocks import encode
from embedserve.wire.http_stream import NULL_HANDLER, Handler, Headers

if TYPE_CHECKING:
    from embedserve.wire.http2.connection import Http2Connection


LATE_STREAMS_MAX = 16
"""Open streams of a connection up to which its rejections may be delayed."""
CONTINUE = encode([(b":status", b"100")])


class Stream:
    """An open stream. Implements HttpStream.

    Attributes:
        id: stream identifier.
        handler: handler of the request; NULL_HANDLER before the request opens and after it ends.
        send_window: bytes of DATA that the server may send on the stream.
        receive_window: bytes of DATA that the client may send on the stream.
        granted_bytes: bytes of the receive window granted by UploadBudget, beyond STREAM_WINDOW.
        has_pending_grant: whether a request to UploadBudget is pending.
        unsent: unsent chunks of the response body, in order; None until a body is queued.
        unsent_bytes: bytes in ``unsent``.
        tail: header block of the trailers. b"": the body ends the stream; None: more body may
            follow.
        blocked_since_s: perf_counter time when flow control blocked the stream; 0: not blocked.
        sent_while_blocked: body bytes sent since ``blocked_since_s``.
    """

    __slots__ = (
        "blocked_since_s",
        "connection",
        "granted_bytes",
        "handler",
        "has_pending_grant",
        "held_bytes",
        "id",
        "is_received",
        "is_sent",
        "missing_bytes",
        "receive_window",
        "send_window",
        "sent_while_blocked",
        "tail",
        "unsent",
        "unsent_bytes",
    )

    http_version = "2"

    def __init__(
        self, connection: Http2Connection, stream_id: int, send_window: int, receive_window: int
    ) -> None:
        self.connection = connection
        self.id = stream_id
        self.send_window = send_window
        self.receive_window = receive_window
        self.handler: Handler = NULL_HANDLER
        self.is_received = self.is_sent = self.has_pending_grant = False
        self.held_bytes = self.granted_bytes = self.unsent_bytes = self.sent_while_blocked = 0
        self.missing_bytes: int | None = None
        self.unsent: deque[memoryview] | None = None
        self.tail: bytes | None = None
        self.blocked_since_s = 0.0

    def send_response(
        self, head: bytes, chunks: Sequence[bytes | memoryview], nbytes: int, tail: bytes
    ) -> None:
        """Sends a complete response: header block, body, and header block of trailers (or b"")."""
        self.connection.frame_writer.write_response(self, head, chunks, nbytes, tail)

    def send_head(self, block: bytes, *, is_end: bool = False) -> None:
        """Sends a header block; with ``is_end`` it ends the response."""
        self.connection.frame_writer.write_headers(self, block, is_end)

    def send_body(self, chunks: Sequence[bytes | memoryview], nbytes: int) -> None:
        """Queues body chunks of ``nbytes`` in total; they are sent as the windows allow."""
        self.connection.frame_writer.write_body(self, chunks, nbytes)

    def end(self, tail: bytes = b"") -> None:
        """Ends the response after its body is sent, with the header block of trailers or b""."""
        self.connection.frame_writer.end(self, tail)

    def respond(
        self, status: int, headers: Headers, chunks: Sequence[bytes | memoryview], nbytes: int
    ) -> None:
        length = (b"content-length", b"%d" % nbytes)
        head = encode([(b":status", b"%d" % status), *headers, length])
        self.send_response(head + self.connection.date.block, chunks, nbytes, b"")

    def start_response(self, status: int, headers: Headers, *, is_end: bool = False) -> None:
        head = encode([(b":status", b"%d" % status), *headers])
        self.send_head(head + self.connection.date.block, is_end=is_end)

    def send_continue(self) -> None:
        self.send_head(CONTINUE)

    @property
    def can_delay_rejection(self) -> bool:
        """Whether a rejection may be delayed: a delayed stream counts against the stream limit,
        which other callers on the connection share."""
        return len(self.connection.streams) <= LATE_STREAMS_MAX

    def abort(self) -> None:
        if not self.is_sent and self.tail is None:
            self.cancel(ErrorCode.INTERNAL_ERROR)

    def cancel(self, code: ErrorCode) -> None:
        """Resets the stream immediately without a response; its handler is not called."""
        self.connection.cancel(self, code)

    def consumed(self, nbytes: int) -> None:
        self.connection.flow_control.consumed(self, nbytes)

    def expect(self, nbytes: int) -> None:
        """Requests window for ``nbytes`` more of the body, granted as the upload budget allows."""
        self.connection.flow_control.request_window(self, nbytes)

    def slow_next_uploads(self) -> None:
        """Shrinks the initial window of the client's next streams after an overload rejection."""
        self.connection.flow_control.shrink_initial_window()
