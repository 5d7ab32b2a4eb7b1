"""An HTTP/2 stream: a request and its response, their windows, and unsent response data."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from embedserve.wire.http2.frames import ErrorCode

if TYPE_CHECKING:
    from embedserve.wire.http2.connection import Http2Connection


class Handler(Protocol):
    """Receiver of a stream's request, which writes the response to the stream."""

    def receive(self, data: bytes, is_end: bool) -> None:
        """Takes the next chunk of the request body; ``is_end`` marks the last chunk."""

    def reset(self) -> None:
        """Handles a stream that was reset or whose connection ended; no response is possible."""

    def resume(self) -> None:
        """Continues writing: the response data written so far has been sent."""

    def check_time(self, now_s: float) -> None:
        """Ends a request past its time limits; called every CHECK_S with perf_counter seconds."""

    def drain(self) -> None:
        """Answers accepted requests, then ends the stream, because the server stops."""


class NullHandler:
    """The handler of a closed stream, which does nothing."""

    def receive(self, data: bytes, is_end: bool) -> None: ...

    def reset(self) -> None: ...

    def resume(self) -> None: ...

    def check_time(self, now_s: float) -> None: ...

    def drain(self) -> None: ...


NULL_HANDLER = NullHandler()


class Stream:
    """An open stream.

    Attributes:
        connection: connection of the stream.
        id: stream identifier.
        handler: handler of the request; NULL_HANDLER before the request opens and after it ends.
        send_window: bytes of DATA that the server may send on the stream.
        receive_window: bytes of DATA that the client may send on the stream.
        held_bytes: received bytes that the handler has not consumed yet.
        granted_bytes: bytes of the receive window granted by UploadBudget, beyond STREAM_WINDOW.
        has_asked: whether a request to UploadBudget is pending.
        is_received: whether the request has ended.
        is_sent: whether the response has ended.
        unsent: unsent chunks of the response body, in order; None until a body is queued.
        unsent_bytes: bytes in ``unsent``.
        tail: header block of the trailers. b"": the body ends the stream; None: more body may
            follow.
        parked_s: perf_counter time since when flow control blocks the stream; 0: not blocked.
        sent_since_parked: body bytes sent since ``parked_s``.
        missing_bytes: bytes of the declared content-length still to arrive; None: not declared.
    """

    __slots__ = (
        "connection",
        "granted_bytes",
        "handler",
        "has_asked",
        "held_bytes",
        "id",
        "is_received",
        "is_sent",
        "missing_bytes",
        "parked_s",
        "receive_window",
        "send_window",
        "sent_since_parked",
        "tail",
        "unsent",
        "unsent_bytes",
    )

    def __init__(
        self, connection: Http2Connection, stream_id: int, send_window: int, receive_window: int
    ) -> None:
        self.connection = connection
        self.id = stream_id
        self.send_window = send_window
        self.receive_window = receive_window
        self.handler: Handler = NULL_HANDLER
        self.is_received = self.is_sent = self.has_asked = False
        self.held_bytes = self.granted_bytes = self.unsent_bytes = self.sent_since_parked = 0
        self.missing_bytes: int | None = None
        self.unsent: deque[memoryview] | None = None
        self.tail: bytes | None = None
        self.parked_s = 0.0

    def answer(
        self, head: bytes, parts: Sequence[bytes | memoryview], nbytes: int, tail: bytes
    ) -> None:
        """Sends a complete response: header block, body, and header block of trailers (or b"")."""
        self.connection.frame_writer.write_response(self, head, parts, nbytes, tail)

    def send_head(self, block: bytes, *, is_end: bool = False) -> None:
        """Sends a header block; with ``is_end`` it ends the response."""
        self.connection.frame_writer.write_headers(self, block, is_end)

    def send_body(self, parts: Sequence[bytes | memoryview], nbytes: int) -> None:
        """Queues body chunks of ``nbytes`` in total; they are sent as the windows allow."""
        self.connection.frame_writer.write_body(self, parts, nbytes)

    def end(self, tail: bytes) -> None:
        """Ends the response after its body is sent, with the header block of trailers or b""."""
        self.connection.frame_writer.end(self, tail)

    def cancel(self, code: ErrorCode) -> None:
        """Resets the stream immediately without a response; its handler is not called."""
        self.connection.cancel(self, code)

    def consumed(self, nbytes: int) -> None:
        """Returns ``nbytes`` of received data to flow control: the handler has consumed them."""
        self.connection.flow_control.consumed(self, nbytes)

    def expect(self, nbytes: int) -> None:
        """Requests window for ``nbytes`` more of the body, granted as the upload budget allows."""
        self.connection.flow_control.want(self, nbytes)

    def keep_bodies_back(self) -> None:
        """Shrinks the initial window of the client's next streams after an overload rejection."""
        self.connection.flow_control.shrink_initial_window()
