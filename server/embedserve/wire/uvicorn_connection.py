"""An HTTP/1 connection as uvicorn has it, within bounds.

Heads are limited and checked as RFC 9112 wants them, Upgrade is ignored, what is wrong is answered
in the JSON of every error, and of a pipeline no more is parsed than what is being answered.
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
"""An idle connection is closed after so long; longer than what stands before a server waits."""
HEAD_S_MAX = 10.0
"""How long the head of a request may take to come."""
URL_BYTES_SAID = 200
"""Of one that cannot be read."""
HEAD_COPIES = 3
"""Of a head that has not ended: its lines as they came, as headers, and what both take more."""
PIECE_BYTES = 4 << 10
"""Parsed at once, after which requests that have come are answered: what the shortest ones, sent
all at once, may cost the event loop."""


class Flow(FlowControl):
    """uvicorn's, but that a task of its own does not resume reading while something is held.

    Attributes:
        is_held: whether it is.
    """

    is_held = False

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()


class UvicornConnection(HttpToolsProtocol):
    """uvicorn's protocol, which parses requests and runs the ASGI application for each."""

    flow: Flow
    certificate: Certificate | None
    peer: str

    def __init__(
        self,
        pipeline: RequestPipeline,
        registry: ConnectionManager,
        allowed_hosts: AllowedHosts | None = None,
        **uvicorns: Any,
    ) -> None:
        """
        Args:
            allowed_hosts: that requests may name; None: any.
        """
        super().__init__(**uvicorns)
        self._allowed_hosts = allowed_hosts
        self.request_pipeline = pipeline
        self._limits = pipeline.limits
        self._registry = registry
        self._held: list[bytes] = []  # what came after what is being answered
        self._cycles: deque[RequestResponseCycle] = deque()  # those that are or will be answered
        self._is_draining = False
        self._idle_since_s = 0.0
        self._message_since_s = 0.0  # that is parsed; 0: none
        self._is_in_head = self._is_in_body = False
        self._head_bytes = 0  # of a head that has not ended, in pieces that held nothing else
        self._body_bytes = 0  # of the message that is parsed, so far
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
        """Parses requests, as far as they are answered at once; holds the rest."""
        self._unset_keepalive_if_required()  # ours sees to all requests, and to those under way
        for start in range(0, len(data), PIECE_BYTES):
            if self.pipeline:
                self.hold(data[start:])
                return
            if not self._parse_piece(data[start : start + PIECE_BYTES]):
                return

    def _parse_piece(self, piece: bytes) -> bool:
        """False where the connection ends."""
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
        """What is wrong with what llhttp, or one of its callbacks below, does not take."""
        if isinstance(error.__context__, EmbedServeError):
            return error.__context__
        reason: object = error
        if isinstance(error, httptools.HttpParserCallbackError):  # which reads nothing else
            reason = f"its URL is {self.url[:URL_BYTES_SAID].decode('latin-1')!r}"
        return InvalidRequestError(f"not a request of HTTP/1.1: {reason}")

    def _parse_without_upgrade(self, rest: bytes) -> bool:
        """As RFC 9110 lets a server do: nothing is upgraded to. ``rest`` follows the head."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            self.reject(InvalidRequestError("method is CONNECT: this is no proxy"))
            return False
        lines = [b"%b %b HTTP/%b\r\n" % (method, self.url, version)]
        lines += [b"%b: %b\r\n" % one for one in self.headers if one[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        return self._parse_piece(b"".join((*lines, b"\r\n", rest)))

    def hold(self, data: bytes) -> None:
        """Keeps what a client sent before its answer came, and reads no more until then."""
        self._held.append(data)
        self._registry.has_grown(len(data))
        self.flow.is_held = True
        self.flow.pause_reading()

    def take_held(self) -> None:
        """Goes on with it. Until then nothing is read: uvloop may read before it makes a call that
        is due."""
        if not self._held or not self.may_take() or self.transport.is_closing():
            return
        data = b"".join(self._held)
        self._held.clear()
        self.flow.is_held = False
        self.flow.resume_reading()
        self.data_received(data)

    def may_take(self) -> bool:
        """Whether what is held is to be read now."""
        return not (self.flow.write_paused or self.pipeline)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._held:
            self.loop.call_soon(self.take_held)

    # What llhttp finds

    def on_message_begin(self) -> None:
        self._message_since_s = perf_counter()
        self._is_in_head = True
        self._head_bytes = self._body_bytes = 0
        super().on_message_begin()
        scope = cast(dict[str, Any], self.scope)
        scope[CERTIFICATE], scope[PEER] = self.certificate, self.peer

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value.rstrip(BLANKS))  # llhttp takes off what stands before it

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._is_in_head = False
        check_headers(self.parser.get_http_version(), self.url, self.headers, self._limits)
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
        cycle = self.cycle
        return bool(self._message_since_s) or not (cycle is None or cycle.response_complete)

    def is_busy(self) -> bool:
        return bool(self._held) or self.flow.write_paused or self.uvicorn_is_busy()

    def reject(self, error: EmbedServeError) -> None:
        """Answers what is parsed with ``error``, and no more."""
        cycle = self.cycle
        is_pending = cycle is not None and not cycle.response_complete
        if is_pending and not self._is_in_body:
            cycle.keep_alive = False  # what was asked before is answered, and ends the connection
            self.flow.pause_reading()
            return
        seconds = perf_counter() - self._message_since_s
        headers = getattr(self, "headers", [])
        told = record_early_rejection(self.request_pipeline, error, headers, seconds, self.peer)
        if is_pending:
            cycle.disconnected = True
            cycle.waiting_for_100_continue = False  # which would be said after our last answer
            cycle.message_event.set()
        if self.pipeline or (self._is_in_body and cycle.response_started):
            self.transport.close()
            return
        path = getattr(self, "url", b"").partition(b"?")[0].decode("latin-1")
        headers, body = error_answer(error, told, error_encoder(path))
        headers = [*headers, (b"connection", b"close"), (b"content-length", b"%d" % len(body))]
        head = STATUS_LINES[error.http_status] + lines_of(headers)
        self.transport.write(head + b"\r\n" + body)
        self.linger()

    def linger(self) -> None:
        """Ends the connection once its client has read what was written."""
        self._held.clear()
        LingeringClose(self.transport, self, self._registry)

    @property
    def unread_bytes(self) -> int:
        """Of answers that the client has not taken."""
        return self.transport.get_write_buffer_size()

    @property
    def held_bytes(self) -> int:
        head_bytes = HEAD_COPIES * self._head_bytes if self._is_in_head else 0
        return self.unread_bytes + head_bytes + self._body_bytes + sum(map(len, self._held))

    def unread(self) -> dict[int, int]:
        return {}

    def check_time(self, now_s: float) -> None:
        """Closes a connection that idles, sends or reads for too long; called now and then."""
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
        """Has the next answer be the last. One that idles is not closed for it: a request may be
        on its way."""
        self._is_draining = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False

    def drain(self) -> None:
        """Answers what was asked and what is on its way, and tells the client to ask no more."""
        self.retire()
        self.loop.call_later(DRAIN_IDLE_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self.transport.is_closing() or self._cycles:
            return  # what was asked before the head that is on its way is answered, then it ends
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
        for cycle in self._cycles:  # uvicorn tells but the newest
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)


def lines_of(headers: Headers) -> bytes:
    return b"".join([b"%b: %b\r\n" % header for header in headers])


STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
