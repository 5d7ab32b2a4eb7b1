"""POST /embed as an ASGI application under plain uvicorn, to compare with our HTTP/1."""

import asyncio
from time import perf_counter

from embedserve.access.authenticator import ClientCertificate, one_header
from embedserve.access.client_address import PEER
from embedserve.codec.codec import Codec
from embedserve.errors import EmbedServeError
from embedserve.lookup_types import ResponseChunks
from embedserve.pipeline import RequestContext, RequestPipeline, ResponseWriter
from embedserve.tracing.request_id import ExtraHeaders
from embedserve.wire.asgi import ASGIApp, Receive, Scope, Send
from embedserve.wire.early_rejection import EarlyRejection
from embedserve.wire.http_stream import Headers
from embedserve.wire.rest.headers import (
    EmbedRoute,
    check_method,
    content_headers,
    embed_route,
    encode_error_response,
    error_encoder,
    read_headers,
)


class AsgiWriter(ResponseWriter):
    """Response writer that keeps the response.

    Attributes:
        response: future of (status, headers, body).
    """

    def __init__(self, codec: Codec, scope: Scope) -> None:
        self._codec = codec
        self._scope = scope
        loop = asyncio.get_running_loop()
        self.response: asyncio.Future[tuple[int, Headers, bytes]] = loop.create_future()

    @property
    def can_delay_rejection(self) -> bool:
        return False

    def header(self, name: bytes) -> bytes | None:
        return one_header(self._scope["headers"], name)

    @property
    def certificate(self) -> ClientCertificate | None:
        return None

    @property
    def peer(self) -> str:
        return ""

    def write_response(
        self, parts: ResponseChunks, nbytes: int, headers: ExtraHeaders | None = None
    ) -> None:
        headers = [*content_headers(self._codec, parts), *(headers or ())]
        self._end(200, headers, b"".join(parts))

    def write_error(self, error: EmbedServeError, headers: ExtraHeaders) -> None:
        self._end(
            error.http_status, *encode_error_response(error, headers, self._codec.encode_error)
        )

    def _end(self, status: int, headers: Headers, body: bytes) -> None:
        if not self.response.done():
            self.response.set_result((status, headers, body))


class EmbedEndpoint:
    """Handles the embed routes, and passes all other requests to ``management``."""

    def __init__(self, pipeline: RequestPipeline, management: ASGIApp) -> None:
        self._pipeline = pipeline
        self._management = management
        self._metrics = pipeline.metrics.protocols["rest"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = embed_route(scope["path"]) if scope["type"] == "http" else None
        if route is None:
            return await self._management(scope, receive, send)
        return await self._embed(route, scope, receive, send)

    async def _embed(self, route: EmbedRoute, scope: Scope, receive: Receive, send: Send) -> None:
        start_s = perf_counter()
        try:
            check_method(scope["method"])
            options = read_headers(route, scope["headers"], self._metrics, self._pipeline.codecs)
        except EmbedServeError as error:
            seconds, peer = perf_counter() - start_s, scope.get(PEER, "")
            rejection = EarlyRejection(
                self._pipeline, self._metrics, error.code, error.message, scope["headers"]
            )
            extra_headers = rejection.record(peer, seconds)
            encode = error_encoder(scope["raw_path"])
            await _send(
                send, error.http_status, *encode_error_response(error, extra_headers, encode)
            )
            return
        writer = AsgiWriter(options.response_codec, scope)
        call = RequestContext(options, start_s, self._pipeline, writer)
        body, more = b"", True
        try:
            while more:
                message = await receive()
                body += message.get("body", b"")
                more = message.get("more_body", False)
                options.codec.check_size(len(body), self._pipeline.limits, is_whole=not more)
            self._pipeline.submit(call, body)
        except EmbedServeError as error:
            call.reject(error)
        await _send(send, *await writer.response)


async def _send(send: Send, status: int, headers: Headers, body: bytes) -> None:
    headers = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
