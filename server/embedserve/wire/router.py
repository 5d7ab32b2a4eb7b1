"""Router of HTTP/2 requests to their handlers: gRPC, an embed route, or management."""

from __future__ import annotations

import re
from collections.abc import Callable
from urllib.parse import unquote

from embedserve.errors import EmbedServeError, InvalidRequestError
from embedserve.pipeline import RequestPipeline
from embedserve.wire.allowed_hosts import AllowedHosts
from embedserve.wire.asgi import ASGIApp, AsgiStream
from embedserve.wire.grpc.grpc_framing import WireError
from embedserve.wire.grpc.service import GrpcService
from embedserve.wire.grpc.service import refused as refused_call
from embedserve.wire.http2.control import HEADER_LIST_BYTES_MAX
from embedserve.wire.http2.header_blocks import Headers, encode
from embedserve.wire.http2.route_resolver import Http2Request, ResolvedRoute, read_request
from embedserve.wire.http2.stream import Handler, Stream
from embedserve.wire.rest import embed_route, headers_too_large
from embedserve.wire.rest_streams import open_embed, refused

TARGET_BYTES_SHOWN = 100
_NO_TARGET = re.compile(rb"[^!-~]")
CONTINUE = encode([(b":status", b"100")])


class Router:
    """Resolves request headers to a route, which is reused for all requests with equal headers."""

    def __init__(
        self,
        pipeline: RequestPipeline,
        management: ASGIApp,
        service: GrpcService,
        allowed_hosts: AllowedHosts | None = None,
    ) -> None:
        """
        Args:
            pipeline: request pipeline.
            management: ASGI application for management requests.
            service: gRPC service.
            allowed_hosts: allowed Host names; None: any.
        """
        self._allowed_hosts = allowed_hosts
        self._pipeline = pipeline
        self._management = management
        self._metrics = pipeline.metrics.protocols["rest"]
        self._grpc = service

    def open_request(self, headers: Headers) -> ResolvedRoute | str:
        """Returns the route for ``headers``, or an error message if they are malformed."""
        request = read_request(headers)
        if isinstance(request, str):
            return request
        open_stream = self._find(request)
        if (b"expect", b"100-continue") in request.headers:
            open_stream = _after_continue(open_stream)
        return ResolvedRoute(open_stream, request.content_length)

    def _find(self, request: Http2Request) -> Callable[[Stream], Handler]:
        content_type = next((v for name, v in request.headers if name == b"content-type"), b"")
        is_grpc = _is_grpc(content_type) and request.method == b"POST"
        try:
            if request.list_bytes > HEADER_LIST_BYTES_MAX:
                raise headers_too_large(request.list_bytes, "bytes", HEADER_LIST_BYTES_MAX)
            if self._allowed_hosts is not None:
                self._allowed_hosts.check(request.headers)
        except EmbedServeError as error:
            if is_grpc:
                return refused_call(WireError(error.code, error.message))
            return refused(error, request, self._pipeline)
        if is_grpc:
            return self._grpc.open(request)
        if wrong := wrong_target(request.target):
            return refused(wrong, request, self._pipeline)
        path = unquote(request.target.partition(b"?")[0].decode("ascii"))
        route = embed_route(path)
        if route is not None:
            return open_embed(route, request, self._pipeline, self._metrics)
        return lambda stream: AsgiStream(self._management, request, stream)


def wrong_target(target: bytes) -> InvalidRequestError | None:
    """Returns the error for a target that is not printable ASCII; None if it is.

    Other characters must be percent-encoded (RFC 3986, section 2). HTTP/1 rejects such targets,
    too.
    """
    found = _NO_TARGET.search(target)
    if found is None:
        return None
    start = max(0, found.start() - TARGET_BYTES_SHOWN)
    shown = target[start : found.end()].decode("latin-1")
    said = f"the path and query have the byte 0x{found[0].hex()} after {shown[:-1]!a}"
    return InvalidRequestError(f"{said}: percent-encode it", "path")


def _after_continue(open_stream: Callable[[Stream], Handler]) -> Callable[[Stream], Handler]:
    """Wraps a handler factory so that it sends 100 (Continue) first, if the body is incomplete."""

    def tell(stream: Stream) -> Handler:
        if not stream.is_received:
            stream.send_head(CONTINUE)
        return open_stream(stream)

    return tell


def _is_grpc(content_type: bytes) -> bool:
    return content_type == b"application/grpc" or content_type.startswith(
        (b"application/grpc+", b"application/grpc;")
    )
