"""One HTTP/1 connection: plain embed requests are answered here, everything else by uvicorn.

A request that is a known head and its body is asked as its last bytes come, and its answer is
written as its batch ends: no task, no future and no ASGI message, which together cost more than
the lookup. Requests of one connection are answered one at a time.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from time import perf_counter
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from embedserve.errors import EmbedServeError
from embedserve.exchange import REQUEST_S_MAX, Asked, Call, Exchange, Parts, late_request
from embedserve.wire.connections import DRAIN_IDLE_S, Lingering, Registry
from embedserve.wire.heads import HeadForm, HeadForms
from embedserve.wire.pieces import Pieces
from embedserve.wire.rest import Headers, error_answer

KEEP_ALIVE_S = 75.0
"""An idle connection is closed after so long; longer than what stands before a server waits."""
HEAD_S_MAX = 10.0
"""How long the head of a request may take to come."""
COPY_BYTES_MAX = 64 << 10
"""A shorter answer is copied behind its head, to be written as one."""


class Http1Call(Call):
    """An embed request that came as a known head and its body."""

    __slots__ = ("_connection", "_form", "_head")

    def __init__(
        self, asked: Asked, start_s: float, connection: Http1Connection, form: HeadForm, head: bytes
    ) -> None:
        super().__init__(asked, start_s)
        self._connection = connection
        self._form = form
        self._head = head

    def header(self, name: bytes) -> bytes | None:
        return self._form.header(self._head, name)

    def write_answer(self, parts: Parts, nbytes: int) -> None:
        self._connection.write(_OK, self.asked.answer_codec.content_type, b"", parts, nbytes)

    def write_error(self, error: EmbedServeError) -> None:
        ((_, content_type), *more), body = error_answer(error)
        line = _STATUS_LINES[error.http_status]
        self._connection.write(line, content_type, _lines(more), (body,), len(body))


class Http1Connection(HttpToolsProtocol):
    """uvicorn's protocol with a short way for embed requests."""

    def __init__(
        self, exchange: Exchange, forms: HeadForms, registry: Registry, **uvicorns: Any
    ) -> None:
        super().__init__(**uvicorns)
        self._exchange = exchange
        self._forms = forms
        self._registry = registry
        self._body_bytes_max = exchange.limits.body_bytes_max
        self._call: Http1Call | None = None  # that is read or answered
        self._body = Pieces()
        self._missing_bytes = 0
        self._held: list[bytes] = []  # what came after that request
        self._messages_in_uvicorn = 0
        self._is_last = self._is_draining = False
        self._idle_since_s = 0.0
        self._head_since_s = 0.0  # a head that uvicorn reads and that is not whole; 0: none

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._registry.add(self)
        self._idle_since_s = perf_counter()

    def data_received(self, data: bytes) -> None:
        if self._missing_bytes:
            self._read_more(data)
        elif self._call is not None or self._held:
            self._hold(data)
        elif self._messages_in_uvicorn or self._uvicorn_is_busy():
            super().data_received(data)
        elif self.flow.write_paused:
            self._hold(data)
        else:
            end = data.find(b"\r\n\r\n") + 4
            found = self._forms.match(data, end) if end > 4 else None
            if found is None or found[1] > self._body_bytes_max:
                super().data_received(data)
            else:
                self._start(*found, data, end)

    def _uvicorn_is_busy(self) -> bool:
        cycle = self.cycle
        return bool(self._messages_in_uvicorn) or not (cycle is None or cycle.response_complete)

    def on_message_begin(self) -> None:
        self._messages_in_uvicorn += 1
        self._head_since_s = perf_counter()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_since_s = 0.0
        super().on_headers_complete()
        if self._is_draining and self.cycle is not None:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        self._messages_in_uvicorn -= 1
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unset_keepalive_if_required()  # ours sees to all requests, and to those under way
        self._idle_since_s = perf_counter()

    def _start(self, form: HeadForm, length: int, data: bytes, body_start: int) -> None:
        start_s = perf_counter()
        try:
            asked = form.asked_by(data)
        except EmbedServeError:
            super().data_received(data)  # which refuses it
            return
        call = self._call = Http1Call(asked, start_s, self, form, data[:body_start])
        missing = length - (len(data) - body_start)
        if missing == 0:
            self._exchange.ask(call, data[body_start:])
        elif missing > 0:
            self._missing_bytes = missing
            self._body.append(data[body_start:])
        else:
            self._hold(data[missing:])
            self._exchange.ask(call, data[body_start:missing])

    def _read_more(self, data: bytes) -> None:
        if len(data) > self._missing_bytes:
            self._hold(data[self._missing_bytes :])
            data = data[: self._missing_bytes]
        self._missing_bytes -= len(data)
        self._body.append(data)
        if not self._missing_bytes:
            assert self._call is not None
            self._exchange.ask(self._call, self._body.take_all())

    def _hold(self, data: bytes) -> None:
        """Keeps what a client sent before its answer came, and reads no more until then."""
        self._held.append(data)
        self.flow.pause_reading()

    def write(
        self, line: bytes, content_type: bytes, more: bytes, parts: Parts, nbytes: int
    ) -> None:
        """Writes the answer to the request that is under way, and goes on to the next.

        Args:
            line: the status line.
            more: lines of further headers.
            nbytes: of all ``parts``.
        """
        is_last = self._is_last or (self._is_draining and not self._held)
        if is_last:
            more += b"connection: close\r\n"
        head = b"%bcontent-type: %b\r\ncontent-length: %d\r\n%b\r\n" % (
            line,
            content_type,
            nbytes,
            more,
        )
        if self.transport.is_closing():
            self._call = None
            return
        if nbytes <= COPY_BYTES_MAX:
            self.transport.write(b"".join((head, *parts)))
        else:
            self.transport.writelines([head, *parts])
        self._idle_since_s = perf_counter()
        self._call = None
        if is_last:
            self._linger()
        elif self._held:
            self.loop.call_soon(self._take_held)

    def _take_held(self) -> None:
        """Until then nothing is read: uvloop may read before it makes a call that is due."""
        if not self._held or self._call is not None or self.flow.write_paused:
            return
        if self.transport.is_closing():
            return
        data = b"".join(self._held)
        self._held.clear()
        self.flow.resume_reading()
        self.data_received(data)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._held and self._call is None:
            self.loop.call_soon(self._take_held)

    def check_time(self, now_s: float) -> None:
        """Closes a connection that idles, or sends a request, for too long; called now and then."""
        if self._head_since_s and now_s - self._head_since_s > HEAD_S_MAX:
            self.transport.close()
        elif self._missing_bytes and self._call is not None:
            if now_s - self._call.start_s > REQUEST_S_MAX:
                self._missing_bytes = 0
                self._is_last = True
                self._call.refuse(late_request())
        elif not self._is_busy() and now_s - self._idle_since_s >= KEEP_ALIVE_S:
            self.transport.close()

    def _is_busy(self) -> bool:
        waits = self._call is not None or bool(self._held)
        return waits or self.flow.write_paused or self._uvicorn_is_busy()

    def drain(self) -> None:
        """Answers what was asked and what is on its way, and tells the client to ask no more."""
        self._is_draining = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False
        self.loop.call_later(DRAIN_IDLE_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if not self.transport.is_closing() and (self._head_since_s or not self._is_busy()):
            self._linger()

    def _linger(self) -> None:
        Lingering(self.transport, self, self._registry)
        self._registry.discard(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None
        self._held.clear()
        self._registry.discard(self)
        super().connection_lost(exc)

    def abort(self) -> None:
        self.transport.abort()


def _lines(headers: Headers) -> bytes:
    return b"".join([b"%b: %b\r\n" % header for header in headers])


_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
_OK = _STATUS_LINES[200]
