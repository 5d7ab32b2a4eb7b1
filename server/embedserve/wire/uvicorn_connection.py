"""uvicorn's HTTP/1 connection with limits on headers, time and pipelining.

Headers are limited and validated as RFC 9112 requires, and Upgrade is ignored. Malformed requests
are answered with the JSON error format. Pipelined requests are not parsed ahead of the request
being answered.
"""

from __future__ import annotations

from collections import deque
from http import HTTPStatus
from time import perf_counter
from typing import Any, cast

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from embedserve.access.authenticator import CERTIFICATE, Certificate
from embedserve.access.client_address import PEER, peer_address
from embedserve.errors import EmbedServeError, InvalidRequestError
from embedserve.pipeline import REQUEST_S_MAX, RequestPipeline, late_request
from embedserve.wire.allowed_hosts import AllowedHosts
from embedserve.wire.connections import DRAIN_IDLE_S, ConnectionManager, LingeringClose
from embedserve.wire.header_validation import BLANKS, HEAD_BYTES_MAX, check_headers
from embedserve.wire.http2.connection import UNREAD_S_MAX
from embedserve.wire.http2.frame_writer import READ_BYTES_MIN
from embedserve.wire.rest import (
    Headers,
    error_answer,
    error_encoder,
    headers_too_large,
    record_early_rejection,
)

KEEP_ALIVE_S = 75.0
"""Seconds until an idle connection is closed; longer than the idle timeout of usual proxies."""
HEAD_S_MAX = 10.0
"""Seconds the headers of a request may take to arrive."""
URL_BYTES_SAID = 200
"""Bytes of an invalid URL that the error message quotes."""
HEAD_COPIES = 3
"""Memory of incomplete headers, as a multiple of their bytes: raw lines, parsed headers, and the
overhead of both."""
PIECE_BYTES = 4 << 10
"""Bytes parsed before the parser checks for a pipelined request and stops. Bounds the event-loop
time of the shortest requests sent in one segment."""


class Flow(FlowControl):
    """uvicorn's flow control, which does not resume reading while received data is held.

    Attributes:
        is_held: whether received data is held; uvicorn's tasks then cannot resume reading.
    """

    is_held = False

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()


class UvicornConnection(HttpToolsProtocol):
    """uvicorn's protocol with limits: parses requests and runs the ASGI application for each."""

    flow: Flow
    certificate: Certificate | None = None
    peer: str = ""

    def __init__(
        self,
        pipeline: RequestPipeline,
        registry: ConnectionManager,
        allowed_hosts: AllowedHosts | None = None,
        **uvicorns: Any,
    ) -> None:
        """
        Args:
            pipeline: request pipeline.
            registry: registry of the server's connections.
            allowed_hosts: allowed Host names; None: any.
            uvicorns: arguments of uvicorn's protocol.
        """
        super().__init__(**uvicorns)
        self._allowed_hosts = allowed_hosts
        self.request_pipeline = pipeline
        self._limits = pipeline.limits
        self._registry = registry
        self._held: list[bytes] = []  # received behind the request being answered
        self._cycles: deque[RequestResponseCycle] = deque()  # requests being answered or queued
        self._is_draining = False
        self._idle_since_s = 0.0
        self._message_since_s = 0.0  # perf_counter start of the message being parsed; 0: none
        self._is_in_head = self._is_in_body = False
        self._head_bytes = 0  # of incomplete headers, in chunks with nothing else
        self._body_bytes = 0  # received of the message being parsed
        self._unread_bytes_seen = 0
        self._unread_since_s = 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = Flow(transport)
        self.certificate = transport.get_extra_info(CERTIFICATE)
        self.peer = peer_address(transport)
        self._registry.add(self)
        self._idle_since_s = perf_counter()

    # Reading

    def parse(self, data: bytes) -> None:
        """Parses requests until one must wait for an earlier response; holds the rest."""
        self._unset_keepalive_if_required()  # check_time enforces keep-alive, for all requests
        for start in range(0, len(data), PIECE_BYTES):
            if self.pipeline:
                self.hold(data[start:])
                return
            if not self._parse_piece(data[start : start + PIECE_BYTES]):
                return

    def _parse_piece(self, piece: bytes) -> bool:
        """Parses one chunk. Returns False if the request was rejected."""
        was_in_head = self._is_in_head
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            return self._parse_without_upgrade(piece[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self.reject(self._problem(error))
            return False
        if was_in_head and self._is_in_head:
            self._head_bytes += len(piece)
            if self._head_bytes > HEAD_BYTES_MAX:
                self.reject(headers_too_large(self._head_bytes, "bytes", HEAD_BYTES_MAX))
                return False
        return True

    def _problem(self, error: httptools.HttpParserError) -> EmbedServeError:
        """Returns the error for data that llhttp or one of the callbacks below has rejected."""
        if isinstance(error.__context__, EmbedServeError):
            return error.__context__
        reason: object = error
        if isinstance(error, httptools.HttpParserCallbackError):  # uvicorn parses the URL
            reason = f"its URL is {self.url[:URL_BYTES_SAID].decode('latin-1')!r}"
        return InvalidRequestError(f"not a request of HTTP/1.1: {reason}")

    def _parse_without_upgrade(self, rest: bytes) -> bool:
        """Parses a request again without its Upgrade header, which RFC 9110 lets a server ignore.

        ``rest`` is the data behind the headers. Returns False if the request was rejected.
        """
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            self.reject(InvalidRequestError("method is CONNECT: this is no proxy"))
            return False
        lines = [b"%b %b HTTP/%b\r\n" % (method, self.url, version)]
        lines += [b"%b: %b\r\n" % one for one in self.headers if one[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        return self._parse_piece(b"".join((*lines, b"\r\n", rest)))

    def hold(self, data: bytes) -> None:
        """Holds data received before the current response is written, and pauses reading."""
        self._held.append(data)
        self._registry.has_grown(len(data))
        self.flow.is_held = True
        self.flow.pause_reading()

    def take_held(self) -> None:
        """Processes the held data, then resumes reading.

        Reading stays paused until this call runs, because uvloop may read before a scheduled call.
        """
        if not self._held or not self.may_take() or self.transport.is_closing():
            return
        data = b"".join(self._held)
        self._held.clear()
        self.flow.is_held = False
        self.flow.resume_reading()
        self.data_received(data)

    def may_take(self) -> bool:
        """Returns whether held data may be processed now."""
        return not (self.flow.write_paused or self.pipeline)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._held:
            self.loop.call_soon(self.take_held)

    # Callbacks of llhttp

    def on_message_begin(self) -> None:
        self._message_since_s = perf_counter()
        self._is_in_head = True
        self._head_bytes = self._body_bytes = 0
        super().on_message_begin()
        scope = cast(dict[str, Any], self.scope)
        scope[CERTIFICATE], scope[PEER] = self.certificate, self.peer

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value.rstrip(BLANKS))  # llhttp strips leading blanks

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._is_in_head = False
        version, codecs = self.parser.get_http_version(), self.request_pipeline.codecs
        check_headers(version, self.url, self.headers, self._limits, codecs)
        if self._allowed_hosts is not None:
            self._allowed_hosts.check(self.headers)
        super().on_headers_complete()
        self._cycles.append(self.cycle)
        self._is_in_body = True
        if self._is_draining:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)
        self._registry.has_grown(len(body))

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._is_in_body = False
        self._body_bytes = 0
        self._message_since_s = 0.0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._cycles.popleft()
        super().on_response_complete()
        self._unset_keepalive_if_required()
        self._idle_since_s = perf_counter()
        if self._held:
            self.loop.call_soon(self.take_held)

    # Ends

    def uvicorn_is_busy(self) -> bool:
        """Returns whether uvicorn is parsing or answering a request."""
        cycle = self.cycle
        return bool(self._message_since_s) or not (cycle is None or cycle.response_complete)

    def is_busy(self) -> bool:
        """Returns whether the connection is not idle."""
        return bool(self._held) or self.flow.write_paused or self.uvicorn_is_busy()

    def reject(self, error: EmbedServeError) -> None:
        """Answers the message being parsed with ``error`` and closes the connection.

        If an earlier request is still pending, its response is the last, and ``error`` is dropped.
        """
        cycle = self.cycle
        is_pending = cycle is not None and not cycle.response_complete
        if is_pending and not self._is_in_body:
            cycle.keep_alive = False  # the earlier request is answered, then the connection ends
            self.flow.pause_reading()
            return
        seconds = perf_counter() - self._message_since_s
        headers = getattr(self, "headers", [])
        extra_headers = record_early_rejection(
            self.request_pipeline, error, headers, seconds, self.peer
        )
        if is_pending:
            cycle.disconnected = True
            cycle.waiting_for_100_continue = False  # 100 would follow the final response
            cycle.message_event.set()
        if self.pipeline or (self._is_in_body and cycle.response_started):
            self.transport.close()
            return
        path = getattr(self, "url", b"").partition(b"?")[0].decode("latin-1")
        headers, body = error_answer(error, extra_headers, error_encoder(path))
        headers = [*headers, (b"connection", b"close"), (b"content-length", b"%d" % len(body))]
        head = STATUS_LINES[error.http_status] + lines_of(headers)
        self.transport.write(head + b"\r\n" + body)
        self.linger()

    def linger(self) -> None:
        """Starts a lingering close: ends the connection after the client has read the output."""
        self._held.clear()
        LingeringClose(self.transport, self, self._registry)

    @property
    def unread_bytes(self) -> int:
        """Bytes of responses in the transport's write buffer."""
        return self.transport.get_write_buffer_size()

    @property
    def held_bytes(self) -> int:
        head_bytes = HEAD_COPIES * self._head_bytes if self._is_in_head else 0
        return self.unread_bytes + head_bytes + self._body_bytes + sum(map(len, self._held))

    def unread(self) -> dict[int, int]:
        return {}

    def check_time(self, now_s: float) -> None:
        """Closes a connection that is idle, sends or reads for too long; called every CHECK_S."""
        if self.flow.write_paused or self.transport.is_closing():
            unread_bytes = self.unread_bytes
            if not 0 < self._unread_bytes_seen < unread_bytes + READ_BYTES_MIN:
                self._unread_bytes_seen = unread_bytes
                self._unread_since_s = now_s
            elif now_s - self._unread_since_s > UNREAD_S_MAX:
                self.transport.abort()
            return
        self._unread_bytes_seen = 0
        if self._message_since_s:
            taken_s = now_s - self._message_since_s
            if self._is_in_head and taken_s > HEAD_S_MAX:
                self.transport.close()
            elif self._is_in_body and taken_s > REQUEST_S_MAX:
                self.reject(late_request())
        elif not self.is_busy() and now_s - self._idle_since_s >= KEEP_ALIVE_S:
            self.transport.close()

    def retire(self) -> None:
        """Makes the next response the last. An idle connection stays open, because a request may
        be in flight."""
        self._is_draining = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False

    def drain(self) -> None:
        """Answers requests received or in flight, then closes the connection."""
        self.retire()
        self.loop.call_later(DRAIN_IDLE_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self.transport.is_closing() or self._cycles:
            return  # the pending requests are answered first; the last response ends it
        if self._is_in_head or not self.is_busy():
            self.linger()

    def abort(self) -> None:
        self._held.clear()
        if self._is_in_body:
            self.cycle.body = bytearray()
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._held.clear()
        self._registry.discard(self)
        for cycle in self._cycles:  # uvicorn notifies only the newest
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)


def lines_of(headers: Headers) -> bytes:
    """Returns ``headers`` as HTTP/1 header lines."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])


STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
