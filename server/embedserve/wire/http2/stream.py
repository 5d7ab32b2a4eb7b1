"""One stream: a request and its answer, their windows, and what is not sent yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from embedserve.wire.http2.frames import ErrorCode

if TYPE_CHECKING:
    from embedserve.wire.http2.connection import Http2Connection


class Handler(Protocol):
    """What a request is for; told of it by its stream, to which it answers."""

    def receive(self, data: bytes, is_end: bool) -> None:
        """Takes the next piece of the request's body; ``is_end``: there is no more."""

    def reset(self) -> None:
        """The client ended the stream, or its connection: nobody is there to be answered."""

    def resume(self) -> None:
        """What was written has been sent: there is room for more."""

    def check_time(self, now_s: float) -> None:
        """Ends what takes too long (perf_counter seconds); called now and then."""

    def drain(self) -> None:
        """The server stops: answers what it accepted, and ends."""


class NullHandler:
    """The handler of a stream that has ended."""

    def receive(self, data: bytes, is_end: bool) -> None: ...

    def reset(self) -> None: ...

    def resume(self) -> None: ...

    def check_time(self, now_s: float) -> None: ...

    def drain(self) -> None: ...


NULL_HANDLER = NullHandler()


class Stream:
    """A stream that is open.

    Attributes:
        handler: of its request; ENDED before and after it.
        send_window, receive_window: bytes of DATA that we, and the client, may send on it.
        held_bytes: received and not consumed by the handler yet.
        granted_bytes: of the receive window, more than every stream has.
        has_asked: whether it waits for such a grant.
        is_received, is_sent: whether the request, the answer has ended.
        unsent: of the answer's body, in order.
        tail: the header block that follows it; b"": none, the body ends the stream.
        parked_s: since when its client has had no window for it, perf_counter; 0: it has.
        missing_bytes: of the body that content-length declares; None where it is not declared.
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
        """Sends a whole answer: its header block, its body, the block of its trailers or b""."""
        self.connection.frame_writer.write_response(self, head, parts, nbytes, tail)

    def send_head(self, block: bytes, *, is_end: bool = False) -> None:
        """Sends a header block; ``is_end``: it is all of the answer, or its trailers."""
        self.connection.frame_writer.write_headers(self, block, is_end)

    def send_body(self, parts: Sequence[bytes | memoryview], nbytes: int) -> None:
        """Sends more of the body, ``nbytes`` in all, now or as the client has room."""
        self.connection.frame_writer.write_body(self, parts, nbytes)

    def end(self, tail: bytes) -> None:
        """Ends the answer when its body is sent, with the block of its trailers, or b""."""
        self.connection.frame_writer.end(self, tail)

    def cancel(self, code: ErrorCode) -> None:
        """Ends the stream at once, unanswered; its handler is not told."""
        self.connection.cancel(self, code)

    def consumed(self, nbytes: int) -> None:
        """The handler needs the room of so many received bytes no more."""
        self.connection.flow_control.consumed(self, nbytes)

    def expect(self, nbytes: int) -> None:
        """The handler waits for so many more bytes; gives the client room for them as there is."""
        self.connection.flow_control.want(self, nbytes)

    def keep_bodies_back(self) -> None:
        """Has the client begin its next requests with little, since one had no room."""
        self.connection.flow_control.shrink_initial_window()
