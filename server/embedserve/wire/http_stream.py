"""Interface between HTTP/1 or HTTP/2 and the handlers of requests.

A stream is one request with its response. It passes the body to its handler, and the handler writes
the response to the stream. HTTP/2 implements it in http2/stream.py, HTTP/1 in http1/stream.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from embedserve.access.authenticator import ClientCertificate
from embedserve.errors import EmbedServeError

Headers = list[tuple[bytes, bytes]]

LENGTH_DIGITS_MAX = 19
"""Digits of a length in a header."""
UNSENT_S_MAX = 30.0
"""Seconds a response may wait for its client to read or to open a flow-control window."""
PROGRESS_BYTES_MIN = 64 << 10
"""Bytes that a client must read within UNSENT_S_MAX, or it has stalled."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """Validated headers of a request.

    Attributes:
        method: request method.
        scheme: URI scheme.
        target: path with its query string.
        headers: headers with names in lower case, without HTTP/2's pseudo-headers; :authority is
            added as host.
        list_bytes: size of HTTP/2's header list, as SETTINGS_MAX_HEADER_LIST_SIZE counts it.
        content_length: declared length of the body; None if not declared.
    """

    method: bytes
    scheme: bytes
    target: bytes
    headers: Headers
    list_bytes: int = 0
    content_length: int | None = None


class Handler:
    """Receiver of a stream's request, which writes the response to the stream. This base class is
    the handler of a closed stream, which does nothing."""

    __slots__ = ()

    def receive(self, data: bytes, is_end: bool) -> None:
        """Takes the next chunk of the request body; ``is_end`` marks the last chunk."""

    def reset(self) -> None:
        """Handles a stream that was reset or whose connection ended; no response is possible."""

    def reject(self, error: EmbedServeError) -> None:
        """Rejects a request whose body is malformed. Handlers that count no requests need not do
        anything: the connection answers these requests."""

    def resume(self) -> None:
        """Continues writing: the response data written so far has been sent. Handlers that write a
        complete response in one call need not do anything."""

    def check_time(self, now_s: float) -> None:
        """Ends a request past its time limits; called every CHECK_S with perf_counter seconds."""

    def drain(self) -> None:
        """Answers accepted requests, then ends the stream, because the server stops. Handlers of
        one request, which is answered once it is complete, need not do anything."""


NULL_HANDLER = Handler()


class StreamConnection(Protocol):
    """Connection of a stream, as its handler sees it.

    Attributes:
        peer: address of the client.
        certificate: client certificate that TLS has verified; None if there is none.
    """

    peer: str
    certificate: ClientCertificate | None


class HttpStream(Protocol):
    """One request with its response, as its handler sees it.

    Attributes:
        http_version: "1.1" or "2", as ASGI names it.
        is_received: whether the request has ended.
        is_sent: whether the response has ended.
        held_bytes: received bytes that the handler has not consumed yet.
        missing_bytes: declared content-length, which HTTP/2 counts down to the bytes still to
            arrive; None: not declared.
        unsent_bytes: bytes of the response that wait for the client to read.
    """

    http_version: str
    is_received: bool
    is_sent: bool
    held_bytes: int
    missing_bytes: int | None

    @property
    def connection(self) -> StreamConnection: ...

    @property
    def unsent_bytes(self) -> int: ...

    @property
    def can_delay_rejection(self) -> bool:
        """Whether a rejection may be delayed, as in `ResponseWriter`."""

    def respond(
        self, status: int, headers: Headers, chunks: Sequence[bytes | memoryview], nbytes: int
    ) -> None:
        """Sends a whole response; the content-length is added to ``headers``."""

    def send_continue(self) -> None:
        """Sends 100 (Continue): the client may send the body."""

    def start_response(self, status: int, headers: Headers, *, is_end: bool = False) -> None:
        """Sends the status and the headers; with ``is_end`` they are the whole response."""

    def send_body(self, chunks: Sequence[bytes | memoryview], nbytes: int) -> None:
        """Sends chunks of the response's body, ``nbytes`` in total."""

    def end(self) -> None:
        """Ends the response after its body."""

    def abort(self) -> None:
        """Ends the stream without completing its response."""

    def consumed(self, nbytes: int) -> None:
        """Returns ``nbytes`` of received data to flow control: the handler has consumed them."""

    def expect(self, nbytes: int) -> None:
        """Announces that the handler waits for ``nbytes`` more of the body."""

    def slow_next_uploads(self) -> None:
        """Slows the client's next uploads after an overload rejection, if the protocol can."""


MakeHandler = Callable[[HttpStream], Handler]
"""Factory of the handler of a stream."""
