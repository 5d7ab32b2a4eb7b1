"""HTTP/1 connection: requests are answered one at a time, in order.

Malformed requests are answered with the JSON error format. Pipelined requests are not parsed ahead
of the request being answered, except for those in the same chunk of CHUNK_BYTES, which are queued.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, cast

from embedserve.access.authenticator import CERTIFICATE, ClientCertificate
from embedserve.access.client_address import peer_address
from embedserve.errors import EmbedServeError
from embedserve.wire.connections import (
    DRAIN_IDLE_S,
    READ_BYTES,
    Connection,
    LingeringClose,
    ReadProgress,
)
from embedserve.wire.http1.request_parser import RequestParser
from embedserve.wire.http1.stream import Http1Stream
from embedserve.wire.http_stream import HttpRequest
from embedserve.wire.rest.calls import rejection_factory
from embedserve.wire.route_table import RouteTable
from embedserve.wire.unsent_memory import UnsentMemory

if TYPE_CHECKING:
    from embedserve.wire.wire_server import WireServer

KEEP_ALIVE_S = 75.0
"""Seconds until an idle connection is closed; longer than the idle timeout of usual proxies."""
HEAD_S_MAX = 10.0
"""Seconds the headers of a request may take to arrive."""
CHUNK_BYTES = 4 << 10
"""Bytes parsed before the parser checks for a pipelined request and stops. Bounds the event-loop
time of the shortest requests sent in one segment."""
BODY_PIECES_MAX = 1024
"""Pieces of a body, such as the chunks of a chunked one, after which a connection yields to others:
about a millisecond of work."""
COPY_BYTES_MAX = 64 << 10
"""Bytes of a response body up to which it is copied behind its headers, for a single write."""


class Http1Connection(Connection):
    """An HTTP/1 connection over an asyncio transport.

    Attributes:
        pipeline: pipeline of embed requests.
        date: Date header of responses.
        transport: transport of the connection.
        loop: event loop of the connection.
        certificate: client certificate that TLS has verified; None if there is none.
        peer: address of the client.
        is_read_paused: whether the transport is paused from reading.
        is_write_paused: whether the client reads slower than responses are written.
    """

    certificate: ClientCertificate | None = None
    peer: str = ""

    def __init__(self, routes: RouteTable, server: WireServer) -> None:
        self.transport: asyncio.Transport
        self.pipeline = routes.pipeline
        self.date = server.date
        self.loop = asyncio.get_running_loop()
        self._routes = routes
        self._server = server
        self.is_read_paused = self.is_write_paused = False
        self._held: list[bytes] = []  # pipelined: received behind the request being answered
        self._streams: deque[Http1Stream] = deque()  # being answered, then those queued
        self._is_advancing = self._has_responded = self._is_take_due = False
        self._is_draining = self._has_ended = False
        self._body_pieces = 0  # parsed in this call of `parse`
        self._idle_since_s = 0.0
        self._unsent: UnsentMemory | None = None
        self._progress = ReadProgress()
        self._parser: RequestParser

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are not of that class
        self.certificate = transport.get_extra_info(CERTIFICATE)
        self.peer = peer_address(transport)
        scheme = b"https" if transport.get_extra_info("sslcontext") else b"http"
        self._parser = RequestParser(self, scheme)
        self._server.add(self)
        self._idle_since_s = perf_counter()

    # Reading

    def data_received(self, data: bytes) -> None:
        if self._held or not self._may_parse():
            self.hold(data)
        else:
            self.parse(data)

    def _may_parse(self) -> bool:
        """Returns whether received data may be parsed now, not only after a response."""
        if self._streams:
            return not self._streams[0].is_received
        return bool(self._parser.message_since_s) or not self.is_write_paused

    def parse(self, data: bytes) -> None:
        """Parses requests until one must wait for an earlier response; holds the rest.

        It yields to other connections after a chunk with requests that were answered immediately,
        after READ_BYTES, and after BODY_PIECES_MAX.
        """
        self._body_pieces = 0
        for start in range(0, len(data), CHUNK_BYTES):
            if self._has_ended:
                return
            is_turn_over = start >= READ_BYTES or self._body_pieces >= BODY_PIECES_MAX
            if start and (self._has_responded or is_turn_over):
                self.hold(data[start:])
                self.take_held_soon()
                return
            if not self._may_parse():
                self.hold(data[start:])
                return
            self._has_responded = False
            try:
                self._parser.feed(data[start : start + CHUNK_BYTES])
            except EmbedServeError as error:
                self.reject(error)
                return
            if self._streams:
                self._advance()

    def hold(self, data: bytes) -> None:
        """Holds data received before the current response is written, and pauses reading."""
        self._held.append(data)
        self._server.record_growth(len(data))
        self._pause_reading()

    def take_held_soon(self) -> None:
        """Calls `take_held` in the next event-loop iteration, once."""
        if not self._is_take_due:
            self._is_take_due = True
            self.loop.call_soon(self.take_held)

    def take_held(self) -> None:
        """Processes the held data, then resumes reading.

        Reading stays paused until this call runs, because uvloop may read before a scheduled call.
        """
        self._is_take_due = False
        if not self._held or not self.may_take() or self.transport.is_closing():
            return
        data = b"".join(self._held)
        self._held.clear()
        self.is_read_paused = False
        self.transport.resume_reading()
        try:
            self.data_received(data)
        except Exception:
            self.transport.abort()  # as the transport does if data_received raises
            raise

    def may_take(self) -> bool:
        """Returns whether held data may be processed now."""
        return not self.is_write_paused and self._may_parse()

    def _pause_reading(self) -> None:
        if not self.is_read_paused:
            self.is_read_paused = True
            self.transport.pause_reading()

    def pause_writing(self) -> None:
        self.is_write_paused = True

    def resume_writing(self) -> None:
        self.is_write_paused = False
        if self._streams:
            self._streams[0].handler.resume()
        self._advance()

    # Requests, in order

    def begin_request(self, request: HttpRequest, *, is_1_0: bool, is_last: bool) -> None:
        if self._routes.allowed_hosts is not None:
            self._routes.allowed_hosts.check(request.headers)
        make_handler = self._routes.resolve(request)
        self._streams.append(
            Http1Stream(self, make_handler, request, is_1_0=is_1_0, is_last=is_last)
        )

    def receive_body(self, data: bytes) -> None:
        self._body_pieces += 1
        self._streams[-1].append(data)
        self._server.record_growth(len(data))  # may abort this connection

    def end_request(self) -> None:
        self._streams[-1].is_received = True

    def _advance(self) -> None:
        """Passes what was received to the first request's handler, and continues with the next
        request once it is answered, unless the client must read the responses first."""
        if self._is_advancing or self._has_ended:
            return
        self._is_advancing = True
        while self._streams:
            stream = self._streams[0]
            if self.is_write_paused and not stream.is_opened:
                break
            stream.pass_on()
            if not stream.is_sent:
                break
        self._is_advancing = False
        if self._held:
            self.take_held_soon()

    def ends_with(self, stream: Http1Stream) -> bool:
        """Returns whether a draining connection ends with the response to ``stream``."""
        return self._is_draining and not self._held and stream is self._streams[-1]

    def response_sent(self, stream: Http1Stream) -> None:
        """Continues after the response to ``stream``, the first request, is written."""
        self._streams.popleft()
        self._has_responded = True
        self._idle_since_s = perf_counter()
        if stream.is_last:
            self._drop_streams()
            if not self.transport.is_closing():
                self.linger()
        else:
            self._advance()

    def write(self, head: bytes, chunks: Sequence[bytes | memoryview], nbytes: int) -> None:
        """Writes ``head``, then the chunks of a body, ``nbytes`` in total."""
        transport = self.transport
        if nbytes <= COPY_BYTES_MAX:
            transport.write(b"".join((head, *chunks)))
        else:
            # The transport fails at the empty view of an array, such as a key without vectors.
            transport.writelines([head, *filter(len, chunks)])
            # uvloop keeps all chunks alive until the last is sent.
            self._unsent = UnsentMemory(chunks) if transport.get_write_buffer_size() else None

    # Ends

    def is_busy(self) -> bool:
        """Returns whether the connection is not idle."""
        return bool(
            self._held or self.is_write_paused or self._parser.message_since_s or self._streams
        )

    def reject(self, error: EmbedServeError) -> None:
        """Answers the message being parsed with ``error``, after the requests before it, and ends
        the connection."""
        request, since_s = self._parser.incomplete_request(), self._parser.message_since_s
        self._pause_reading()
        if self._parser.is_in_body:  # which is malformed
            stream = self._streams[-1]
            stream.handler.reject(error)
            if stream.is_sent:
                return
            self._streams.pop().reset()
        respond = rejection_factory(error, request, self.pipeline, perf_counter() - since_s)
        self._streams.append(Http1Stream(self, respond, request, is_1_0=False, is_last=True))
        self._advance()

    def linger(self) -> None:
        """Starts a lingering close: ends the connection after the client has read the output."""
        self._held.clear()
        self._parser.body_bytes = 0
        self._has_ended = True
        LingeringClose(self.transport, self, self._server)

    @property
    def unsent_bytes(self) -> int:
        """Bytes of responses in the transport's write buffer."""
        return self.transport.get_write_buffer_size()

    @property
    def held_bytes(self) -> int:
        nbytes = self.unsent_bytes + self._parser.held_bytes + sum(map(len, self._held))
        if self._unsent is not None and self.unsent_bytes:
            nbytes += self._unsent.own_bytes - self.unsent_bytes
        return nbytes

    def unsent_memory(self) -> dict[int, int]:
        if not self.unsent_bytes:
            self._unsent = None
        return {} if self._unsent is None else self._unsent.batches()

    def check_time(self, now_s: float) -> None:
        """Closes a connection that is idle, sends or reads for too long; called every CHECK_S."""
        if self.is_write_paused or self.transport.is_closing():
            if self._progress.has_stalled(self.unsent_bytes, now_s):
                self.transport.abort()
            return
        self._progress.restart()
        if self._streams:
            self._streams[0].handler.check_time(now_s)
        elif self._parser.message_since_s:
            if now_s - self._parser.message_since_s > HEAD_S_MAX:
                self.transport.close()
        elif not self.is_busy() and now_s - self._idle_since_s >= KEEP_ALIVE_S:
            self.transport.close()

    def retire(self) -> None:
        """Makes the next response the last. An idle connection stays open, because a request may
        be in flight."""
        self._is_draining = True

    def drain(self) -> None:
        """Answers requests received or in flight, then closes the connection."""
        self.retire()
        self.loop.call_later(DRAIN_IDLE_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self._has_ended or self.transport.is_closing():
            return
        has_request = self._streams or self._held
        if not self.is_busy() or (self._parser.is_in_head and not has_request):
            self.linger()
        else:
            # Checked again, because the last response may have been written without
            # `Connection: close`, such as one that the client began to read before the drain.
            self.loop.call_later(DRAIN_IDLE_S, self._close_if_idle)

    def abort(self) -> None:
        self._has_ended = True
        self._held.clear()
        for stream in self._streams:  # kept, as the parser may be calling back
            stream.reset()
        self._parser.body_bytes = 0
        self.transport.abort()

    def _drop_streams(self) -> None:
        while self._streams:
            self._streams.popleft().reset()

    def connection_lost(self, exc: Exception | None) -> None:
        self._held.clear()
        self._server.discard(self)
        self._drop_streams()
