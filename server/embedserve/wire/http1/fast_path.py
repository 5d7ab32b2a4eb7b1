"""Fast path for plain embed requests over HTTP/1.

A request whose headers match a template is submitted when its last bytes arrive, and its response
is written when its batch ends. The connection itself is the response writer: a stream and a handler
for each request would cost a tenth of its time. Http1Connection parses all other requests.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from embedserve.errors import EmbedServeError
from embedserve.lookup_types import ResponseChunks
from embedserve.pipeline import UPLOAD_S_MAX, RequestContext, ResponseWriter, late_request
from embedserve.tracing.request_id import ExtraHeaders
from embedserve.wire.byte_queue import ByteQueue
from embedserve.wire.connections import READ_BYTES, yield_to_others
from embedserve.wire.http1.connection import Http1Connection
from embedserve.wire.http1.header_templates import HeaderTemplate
from embedserve.wire.http1.request_parser import BLANKS
from embedserve.wire.http1.stream import CLOSE, STATUS_LINES, lines_of
from embedserve.wire.rest.headers import content_headers, encode_error_response
from embedserve.wire.route_table import RouteTable

if TYPE_CHECKING:
    from embedserve.wire.wire_server import WireServer


class FastPathConnection(Http1Connection, ResponseWriter):
    """HTTP/1 connection with the fast path, which answers one request at a time.

    Attributes:
        is_last: whether the next response is the last on the connection.
    """

    def __init__(self, routes: RouteTable, server: WireServer) -> None:
        super().__init__(routes, server)
        self._templates = routes.templates
        self._context: RequestContext | None = None  # request being read or answered
        self._template: HeaderTemplate | None = None  # of the headers of the last request
        self._head = b""  # these headers
        self._body = ByteQueue()
        self._missing_bytes = 0
        self.is_last = False

    def data_received(self, data: bytes) -> None:
        if self._missing_bytes:
            self._read_more(data)
        elif self._context is not None or self._held:
            self.hold(data)
        elif self._parser.message_since_s or self._streams or self.is_write_paused:
            super().data_received(data)
        else:
            end = data.find(b"\r\n\r\n") + 4
            found = self._templates.match_or_learn(data, end) if end > 4 else None
            if found is None or found[1] > found[0].body_bytes_max:
                self.parse(data)  # also rejects a body that is too large
            else:
                self._start(*found, data, end)

    def _start(self, template: HeaderTemplate, length: int, data: bytes, body_start: int) -> None:
        start_s = perf_counter()
        try:
            options = template.options_of(data)
        except EmbedServeError:
            self.parse(data)  # rejects it
            return
        self._template, self._head = template, data[:body_start]
        context = self._context = RequestContext(options, start_s, self.pipeline, self)
        end = body_start + length
        missing = end - len(data)
        if missing < 0:
            self.hold(data[end:])
            if self._context is not context:
                return  # the connection was aborted, because it holds most memory
        authenticator = self.pipeline.authenticator
        if authenticator is not None:
            gap = template.authorization
            authorization = None if gap is None else data[gap].strip(BLANKS)
            self.is_last = missing > 0  # if rejected: its body would not be read
            if not authenticator.admit(context, authorization):
                return
            self.is_last = False
        if missing > 0:
            # Not rejected while a queue is full: the connection would have to end.
            self._missing_bytes = missing
            self._body.append(data[body_start:])
            self._server.record_growth(len(data))
        else:
            self.pipeline.submit(context, data[body_start:end])

    def _read_more(self, data: bytes) -> None:
        if len(data) > self._missing_bytes:
            self.hold(data[self._missing_bytes :])
            data = data[: self._missing_bytes]
        self._missing_bytes -= len(data)
        self._body.append(data)
        self._server.record_growth(len(data))
        if self.transport.is_closing():
            return
        if not self._missing_bytes:
            assert self._context is not None
            self.pipeline.submit(self._context, self._body.take_all())
        elif len(data) >= READ_BYTES:
            yield_to_others(self.transport)

    # The response

    @property
    def source(self) -> object:
        return self

    @property
    def can_delay_rejection(self) -> bool:
        return not self.is_last  # a rejection before the body arrives must not wait

    def header(self, name: bytes) -> bytes | None:
        return None if self._template is None else self._template.header(self._head, name)

    def write_response(
        self, chunks: ResponseChunks, nbytes: int, headers: ExtraHeaders | None = None
    ) -> None:
        assert self._context is not None
        codec = self._context.options.response_codec
        content_type, more = codec.content_type, b"" if headers is None else lines_of(headers)
        if codec.json_bytes is not None:
            (_, content_type), *others = content_headers(codec, chunks)
            more += lines_of(others)
        self._write(STATUS_LINES[200], content_type, more, chunks, nbytes)

    def write_error(self, error: EmbedServeError, headers: ExtraHeaders) -> None:
        assert self._context is not None
        encode = self._context.options.response_codec.encode_error
        ((_, content_type), *more), body = encode_error_response(error, headers, encode)
        line = STATUS_LINES[error.http_status]
        self._write(line, content_type, lines_of(more), (body,), len(body))

    def _write(
        self, line: bytes, content_type: bytes, more: bytes, chunks: ResponseChunks, nbytes: int
    ) -> None:
        """Writes the response to the current request, with ``more`` header lines, then continues
        with the next."""
        is_last = self.is_last or (self._is_draining and not self._held)
        if is_last:
            more += CLOSE
        head = b"%b%bcontent-type: %b\r\ncontent-length: %d\r\n%b\r\n" % (
            line,
            self.date.line,
            content_type,
            nbytes,
            more,
        )
        self._context = None
        if self.transport.is_closing():
            return
        self.write(head, chunks, nbytes)
        self._idle_since_s = perf_counter()
        if is_last:
            self.linger()
        elif self._held:
            self.take_held_soon()

    @property
    def held_bytes(self) -> int:
        return super().held_bytes + self._body.nbytes

    def may_take(self) -> bool:
        return self._context is None and super().may_take()

    def is_busy(self) -> bool:
        return self._context is not None or super().is_busy()

    def check_time(self, now_s: float) -> None:
        context = self._context
        if self._missing_bytes and context is not None:
            if now_s - context.start_s > UPLOAD_S_MAX:
                self._missing_bytes = 0
                self._body = ByteQueue()
                self.is_last = True
                context.reject(late_request())
        else:
            super().check_time(now_s)

    def abort(self) -> None:
        self._body = ByteQueue()
        self._cancel()
        super().abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        super().connection_lost(exc)

    def _cancel(self) -> None:
        if self._context is not None:
            self._context.cancel()
            self._context = None
