"""One HTTP connection: plain embed requests are answered here, everything else by uvicorn.

A request that is a known head and its body is decoded as its last bytes come and put in the
queue, and its answer is written as its batch ends: no task, no future and no ASGI message, which
together cost more than the lookup. Requests of one connection are answered one at a time.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from time import perf_counter
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from embedserve.codec import json_codec, protobuf_codec
from embedserve.errors import INTERNAL, EmbedServeError, EngineError
from embedserve.models.models import Service
from embedserve.types import LookupResult
from embedserve.wire.heads import Head, RequestHeads
from embedserve.wire.rest import JSON, PROTOBUF, error_headers

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75.0
"""An idle connection is closed after so long; longer than what stands before a server waits."""
COPY_BYTES_MAX = 64 << 10
"""A shorter answer is copied behind its head, to be written as one."""


class EmbedConnection(HttpToolsProtocol):
    """uvicorn's protocol with a short way for embed requests; the Caller of each of them."""

    def __init__(self, service: Service, heads: RequestHeads, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._service = service
        self._metrics = service.metrics.protocols["rest"]
        self._heads = heads
        self._head: Head | None = None  # of the request that is read or answered
        self._body: list[bytes] = []
        self._missing_bytes = 0
        self._held: list[bytes] = []  # what came after that request
        self._messages_in_uvicorn = 0
        self._is_last = False  # of this connection's answers
        self._start_s = 0.0
        self._idle_since_s = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None

    @property
    def is_waiting(self) -> bool:
        return self._head is not None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_since_s = perf_counter()
        self._idle_timer = self.loop.call_later(KEEP_ALIVE_S, self._close_if_idle)

    def data_received(self, data: bytes) -> None:
        if self._missing_bytes:
            self._read_more(data)
        elif self._head is not None or self._held:
            self._hold(data)
        elif self._uvicorn_is_busy():
            super().data_received(data)
        elif self.flow.write_paused:
            self._hold(data)
        else:
            end = data.find(b"\r\n\r\n") + 4
            head = self._heads.get(data[:end]) if end > 4 else None
            if head is None or head.content_length > self._service.limits.body_bytes_max:
                super().data_received(data)
            else:
                self._start(head, data, end)

    def _uvicorn_is_busy(self) -> bool:
        cycle = self.cycle
        return bool(self._messages_in_uvicorn) or not (cycle is None or cycle.response_complete)

    def on_message_begin(self) -> None:
        self._messages_in_uvicorn += 1
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._messages_in_uvicorn -= 1
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unset_keepalive_if_required()  # ours sees to all requests, and to those under way
        self._idle_since_s = perf_counter()

    def _start(self, head: Head, data: bytes, body_start: int) -> None:
        self._start_s = perf_counter()
        self._head = head
        missing = head.content_length - (len(data) - body_start)
        if missing == 0:
            self._ask(head, data[body_start:])
        elif missing > 0:
            self._missing_bytes = missing
            self._body.append(data[body_start:])
        else:
            self._hold(data[missing:])
            self._ask(head, data[body_start:missing])

    def _read_more(self, data: bytes) -> None:
        assert self._head is not None
        if len(data) > self._missing_bytes:
            self._hold(data[self._missing_bytes :])
            data = data[: self._missing_bytes]
        self._missing_bytes -= len(data)
        self._body.append(data)
        if not self._missing_bytes:
            body = b"".join(self._body)
            self._body.clear()
            self._ask(self._head, body)

    def _hold(self, data: bytes) -> None:
        """Keeps what a client sent before its answer came, and reads no more until then."""
        self._held.append(data)
        self.flow.pause_reading()

    def _ask(self, head: Head, body: bytes) -> None:
        try:
            self._service.check_open(head.model)
            if head.call.body_is_protobuf:
                request = protobuf_codec.decode_request(body, head.model)
            else:
                request = json_codec.decode_request(body, head.model)
            self._service.enqueue(request, self, head.call.timeout_s)
        except EmbedServeError as error:
            self.refuse(error)
        except Exception:
            self._fail()

    def answer(self, result: LookupResult) -> None:
        assert self._head is not None
        try:
            if self._head.call.answer_is_protobuf:
                self._write(200, PROTOBUF, protobuf_codec.encode_parts(result))
            else:
                self._write(200, JSON, [json_codec.encode_result(result)])
        except Exception:
            self._fail()

    def refuse(self, error: EmbedServeError) -> None:
        self._write(
            error.http_status,
            JSON,
            [json_codec.encode_error(error)],
            error.code,
            error_headers(error),
        )

    def _fail(self) -> None:
        logger.exception("POST embed failed")
        self.refuse(EngineError(INTERNAL))

    def _write(
        self,
        status: int,
        content_type: bytes,
        parts: list[bytes | memoryview],
        outcome: str = "OK",
        extra: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        nbytes = sum(map(_nbytes, parts))
        head = b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b\r\n" % (
            _STATUS_LINES[status],
            content_type,
            nbytes,
            self._more_headers(extra) if extra or self._is_last else b"",
        )
        if nbytes <= COPY_BYTES_MAX:
            self.transport.write(b"".join((head, *parts)))
        else:
            self.transport.writelines([head, *parts])
        self._idle_since_s = perf_counter()
        seconds = self._idle_since_s - self._start_s
        if outcome == "OK":
            self._metrics.answered(seconds, nbytes)
        else:
            self._metrics.failed(outcome, seconds)
        self._end()

    def _more_headers(self, extra: list[tuple[bytes, bytes]] | None) -> bytes:
        headers = [*(extra or []), *([(b"connection", b"close")] if self._is_last else [])]
        return b"".join(b"%b: %b\r\n" % header for header in headers)

    def _end(self) -> None:
        """The request is answered; what came after it is next."""
        self._head = None
        if self._is_last:
            self.transport.close()
        elif self._held:
            self.loop.call_soon(self._take_held)

    def _take_held(self) -> None:
        """Until then nothing is read: uvloop may read before it makes a call that is due."""
        if not self._held or self._head is not None or self.flow.write_paused:
            return
        if self.transport.is_closing():
            return
        data = b"".join(self._held)
        self._held.clear()
        self.flow.resume_reading()
        self.data_received(data)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._held and self._head is None:
            self.loop.call_soon(self._take_held)

    def _close_if_idle(self) -> None:
        """Runs once in a while rather than being set anew by each request."""
        self._idle_timer = None
        if self.transport.is_closing():
            return
        idle_s = 0.0 if self._is_busy() else perf_counter() - self._idle_since_s
        if idle_s >= KEEP_ALIVE_S:
            self.transport.close()
        else:
            self._idle_timer = self.loop.call_later(KEEP_ALIVE_S - idle_s, self._close_if_idle)

    def _is_busy(self) -> bool:
        waits = self._head is not None or bool(self._held)
        return waits or self.flow.write_paused or self._uvicorn_is_busy()

    def shutdown(self) -> None:
        if self._head is None:
            super().shutdown()
        else:
            self._is_last = True

    def connection_lost(self, exc: Exception | None) -> None:
        if self._head is not None:
            self._head = None
            self._metrics.failed("CANCELLED", perf_counter() - self._start_s)
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._held.clear()
        super().connection_lost(exc)


def _nbytes(part: bytes | memoryview) -> int:
    return part.nbytes if isinstance(part, memoryview) else len(part)


_STATUS_LINES = {status.value: f"{status.value} {status.phrase}".encode() for status in HTTPStatus}
