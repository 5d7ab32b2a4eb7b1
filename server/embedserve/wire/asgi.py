"""ASGI side of the server: management routes, and HTTP/1 embed requests off the fast path.

uvicorn runs ``EmbedEndpoint`` for HTTP/1. ``AsgiStream`` runs the management application for one
HTTP/2 stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from time import perf_counter
from typing import Any
from urllib.parse import unquote

from embedserve.access.authenticator import CERTIFICATE, Certificate, one_header
from embedserve.access.client_address import PEER
from embedserve.codec.codec import Codec
from embedserve.errors import INTERNAL, EmbedServeError, EngineError, RequestTooLargeError
from embedserve.lookup_types import ResponseChunks
from embedserve.metrics.rate_limited_logger import SHOWN_CHARACTERS_MAX
from embedserve.pipeline import (
    REQUEST_S_MAX,
    RequestContext,
    RequestPipeline,
    ResponseWriter,
    late_request,
)
from embedserve.tracing.request_id import REQUEST_ID, HeaderList, request_id_header
from embedserve.wire.http2.frames import ErrorCode
from embedserve.wire.http2.header_blocks import encode
from embedserve.wire.http2.route_resolver import Http2Request
from embedserve.wire.http2.stream import Stream
from embedserve.wire.rest import (
    Headers,
    Route,
    answer_headers,
    check_method,
    embed_route,
    error_answer,
    error_encoder,
    read_headers,
    record_early_rejection,
)
from embedserve.wire.rest_streams import write_error

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

MANAGEMENT_BODY_BYTES_MAX = 64 << 10
"""Bytes of the body of a management request over HTTP/2; none needs a larger one."""

JOIN_BYTES_MAX = 1 << 20
"""Bytes of a response copied in one event-loop iteration, before yielding to other connections."""


class ClientGoneError(Exception):
    """The client closed its connection, so no response is possible."""


class AsgiWriter(ResponseWriter):
    """Response writer of an embed request received through ASGI.

    Attributes:
        answered: future of the response: (status, headers, chunks of the body, bytes).
    """

    __slots__ = ("_codec", "_scope", "answered")

    def __init__(self, codec: Codec, scope: Scope) -> None:
        """
        Args:
            codec: codec of the response.
            scope: ASGI scope of the request.
        """
        self._codec = codec
        self._scope = scope
        loop = asyncio.get_running_loop()
        self.answered: asyncio.Future[tuple[int, Headers, ResponseChunks, int]] = (
            loop.create_future()
        )

    @property
    def can_delay_rejection(self) -> bool:
        return False  # during the delay the unread body would be taken for a disconnect

    def header(self, name: bytes) -> bytes | None:
        return one_header(self._scope["headers"], name)

    @property
    def certificate(self) -> Certificate | None:
        found: Certificate | None = self._scope.get(CERTIFICATE)
        return found

    @property
    def peer(self) -> str:
        return str(self._scope.get(PEER, ""))

    def write_response(
        self, parts: ResponseChunks, nbytes: int, headers: HeaderList | None = None
    ) -> None:
        self._end(200, [*answer_headers(self._codec, parts), *(headers or ())], parts, nbytes)

    def write_error(self, error: EmbedServeError, headers: HeaderList) -> None:
        headers, body = error_answer(error, headers, self._codec.encode_error)
        self._end(error.http_status, headers, (body,), len(body))

    def _end(self, status: int, headers: Headers, parts: ResponseChunks, nbytes: int) -> None:
        if not self.answered.done():
            self.answered.set_result((status, headers, parts, nbytes))


class EmbedEndpoint:
    """The ASGI application: handles the embed routes, and passes all others to ``management``."""

    def __init__(self, pipeline: RequestPipeline, management: ASGIApp) -> None:
        self._pipeline = pipeline
        self._management = management
        self._metrics = pipeline.metrics.protocols["rest"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = embed_route(scope["path"]) if scope["type"] == "http" else None
        if route is None:
            return await self._management(scope, receive, send)
        return await self._embed(route, scope, receive, send)

    async def _embed(self, route: Route, scope: Scope, receive: Receive, send: Send) -> None:
        start_s = perf_counter()
        try:
            check_method(scope["method"])
            options = read_headers(route, scope["headers"], self._metrics, self._pipeline.codecs)
        except EmbedServeError as error:
            seconds, peer = perf_counter() - start_s, scope.get(PEER, "")
            extra_headers = record_early_rejection(
                self._pipeline, error, scope["headers"], seconds, peer
            )
            encode = error_encoder(scope["path"])
            await _send(send, error.http_status, *error_answer(error, extra_headers, encode))
            return
        writer = AsgiWriter(options.response_codec, scope)
        call = RequestContext(options, start_s, self._pipeline, writer)
        try:
            authorization = writer.header(b"authorization")
            authenticator = self._pipeline.authenticator
            if authenticator is None or authenticator.admit(call, authorization):
                self._pipeline.submit(call, await self._read_body(options.codec, receive))
            await self._answer(writer, receive, send)
        except EmbedServeError as error:
            call.reject(error)
            status, headers, parts, _ = writer.answered.result()
            await _send(send, status, headers, b"".join(parts))
        except ClientGoneError:
            pass
        finally:
            call.cancel()

    async def _answer(self, writer: AsgiWriter, receive: Receive, send: Send) -> None:
        """Sends the response of ``writer``, unless its client disconnects first."""
        gone = asyncio.ensure_future(receive())
        try:
            await asyncio.wait((writer.answered, gone), return_when=asyncio.FIRST_COMPLETED)
            if writer.answered.done():
                status, headers, parts, nbytes = writer.answered.result()
                await _send(send, status, headers, await _joined(parts, nbytes))
        finally:
            gone.cancel()

    async def _read_body(self, codec: Codec, receive: Receive) -> bytes:
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            chunk: bytes = message.get("body", b"")
            size += len(chunk)
            is_whole = not message.get("more_body", False)
            codec.check_size(size, self._pipeline.limits, is_whole=is_whole)
            if is_whole:
                return b"".join([*chunks, chunk]) if chunks else chunk
            chunks.append(chunk)


async def _joined(parts: ResponseChunks, nbytes: int) -> bytes | bytearray:
    """Joins the chunks of a body, copying JOIN_BYTES_MAX in each event-loop iteration.

    The body is passed to uvicorn as a whole. uvicorn would keep chunks where held_bytes does not
    count them.
    """
    if nbytes <= JOIN_BYTES_MAX:
        return b"".join(parts)
    body = bytearray(nbytes)
    end = 0
    for part in parts:
        view = memoryview(part).cast("B")
        for start in range(0, len(view), JOIN_BYTES_MAX):
            piece = view[start : start + JOIN_BYTES_MAX]
            body[end : end + len(piece)] = piece
            end += len(piece)
            await asyncio.sleep(0)
    return body


async def _send(send: Send, status: int, headers: Headers, body: bytes | bytearray) -> None:
    headers = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class AsgiStream:
    """Stream handler that runs the management application in a task after the request is read."""

    def __init__(self, app: ASGIApp, request: Http2Request, stream: Stream) -> None:
        self._app = app
        self._request = request
        self._stream = stream
        self._start_s = perf_counter()
        self._body: list[bytes] = []
        self._size = 0
        self._has_started = False
        self._has_sent = asyncio.Event()
        self._is_gone = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def receive(self, data: bytes, is_end: bool) -> None:
        self._size += len(data)
        if self._size > MANAGEMENT_BODY_BYTES_MAX:
            said = f"body has at least {self._size} bytes, the limit is {MANAGEMENT_BODY_BYTES_MAX}"
            write_error(self._stream, RequestTooLargeError(said, "body"), self._extra_headers())
            return
        self._body.append(data)
        if is_end:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def _extra_headers(self) -> HeaderList:
        return request_id_header(one_header(self._request.headers, REQUEST_ID))

    async def _run(self) -> None:
        scope = _scope(self._request)
        scope[PEER] = self._stream.connection.peer
        scope[CERTIFICATE] = self._stream.connection.certificate
        try:
            await self._app(scope, self._receive, self._send)
        except ClientGoneError:
            return
        except Exception:
            path = self._request.target[:SHOWN_CHARACTERS_MAX].decode("latin-1")
            logger.exception("%s %a failed", scope["method"], path)
            if not self._has_started:
                write_error(self._stream, EngineError(INTERNAL), self._extra_headers())
        if not self._stream.is_sent and self._stream.tail is None:
            self._stream.cancel(ErrorCode.INTERNAL_ERROR)

    async def _receive(self) -> Message:
        if self._body:
            body = b"".join(self._body)
            self._body.clear()
            return {"type": "http.request", "body": body, "more_body": False}
        await self._is_gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._is_gone.is_set():
            raise ClientGoneError
        if message["type"] == "http.response.start":
            self._has_started = True
            status = (b":status", b"%d" % message["status"])
            headers = [(name.lower(), value) for name, value in message.get("headers", ())]
            self._stream.send_head(encode([status, *headers]))
            return
        body = message.get("body", b"")
        if body and self._request.method != b"HEAD":
            self._has_sent.clear()
            self._stream.send_body((body,), len(body))
        if not message.get("more_body", False):
            self._stream.end(b"")
        elif self._stream.unsent_bytes:
            await self._has_sent.wait()

    def reset(self) -> None:
        self._is_gone.set()
        self._has_sent.set()

    def resume(self) -> None:
        self._has_sent.set()

    def check_time(self, now_s: float) -> None:
        if self._task is None and now_s - self._start_s > REQUEST_S_MAX:
            write_error(self._stream, late_request(), self._extra_headers())

    def drain(self) -> None:
        """Does nothing: the request is answered as soon as it is complete."""


def _scope(request: Http2Request) -> Scope:
    path, _, query = request.target.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "2",
        "method": request.method.decode("latin-1"),
        "scheme": request.scheme.decode("latin-1"),
        "path": unquote(path.decode("latin-1")),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": request.headers,
        "server": None,
        "client": None,
        "state": {},
    }
