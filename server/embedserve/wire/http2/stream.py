"""An HTTP/2 stream: a request and its response, their windows, and unsent response data."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from embedserve.wire.http2.frames import ErrorCode
from embedserve.wire.http2.header_blocks import encode
from embedserve.wire.http_stream import NULL_HANDLER, Handler, Headers

if TYPE_CHECKING:
    from embedserve.wire.http2.connection import Http2Connection


LATE_STREAMS_MAX = 16
"""Open streams of a connection up to which its rejections may be delayed."""
CONTINUE = encode([(b":status", b"100")])


class Stream(msgspec.Struct, eq=False):
    """An open stream. Implements HttpStream.

    Attributes:
        id: stream identifier.
        send_window: bytes of DATA that the server may send on the stream.
        receive_window: bytes of DATA that the client may send on the stream.
        is_received: whether the whole request has arrived.
        handler: handler of the request; NULL_HANDLER before the request opens and after it ends.
        missing_bytes: declared bytes of the body that have not arrived; None if not declared.
        held_bytes: bytes of the body that have arrived and are not consumed yet.
        granted_bytes: bytes of the receive window granted by UploadBudget, beyond STREAM_WINDOW.
        has_pending_grant: whether a request to UploadBudget is pending.
        unsent: unsent chunks of the response body, in order; None until a body is queued.
        unsent_bytes: bytes in ``unsent``.
        tail: header block of the trailers. b"": the body ends the stream; None: more body may
            follow.
        is_sent: whether the response has ended, or the stream was reset.
        blocked_since_s: perf_counter time when flow control blocked the stream; 0: not blocked.
        sent_while_blocked: body bytes sent since ``blocked_since_s``.
    """

    connection: Http2Connection
    id: int
    send_window: int
    receive_window: int
    is_received: bool = False
    handler: Handler = NULL_HANDLER
    missing_bytes: int | None = None
    held_bytes: int = 0
    granted_bytes: int = 0
    has_pending_grant: bool = False
    unsent: deque[memoryview] | None = None
    unsent_bytes: int = 0
    tail: bytes | None = None
    is_sent: bool = False
    blocked_since_s: float = 0.0
    sent_while_blocked: int = 0

    http_version = "2"

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
