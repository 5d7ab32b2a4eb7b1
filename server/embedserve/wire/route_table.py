"""Finds the handlers of requests: for gRPC, for an embed route, or for management."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from urllib.parse import unquote

from embedserve.errors import EmbedServeError, InvalidRequestError
from embedserve.pipeline import RequestPipeline
from embedserve.wire.allowed_hosts import AllowedHosts
from embedserve.wire.asgi import ASGIApp, AsgiHandler
from embedserve.wire.grpc.service import GrpcService
from embedserve.wire.http1.header_templates import HeaderTemplateCache
from embedserve.wire.http2.control import HEADER_LIST_BYTES_MAX
from embedserve.wire.http2.request_headers import ResolvedRoute, read_request
from embedserve.wire.http2.stream import Stream
from embedserve.wire.http_stream import Handler, Headers, HttpRequest, HttpStream, MakeHandler
from embedserve.wire.management_turns import ManagementTurns
from embedserve.wire.rest.calls import rejection_factory, resolve_embed
from embedserve.wire.rest.headers import embed_route, headers_too_large

TARGET_BYTES_SHOWN = 100
REQUESTS_PER_ITERATION = 1
"""Management requests begun in an event-loop iteration. One takes up to some ten milliseconds: for
/metrics or /models with a thousand features."""
PROBE_PATHS = frozenset({"/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"})
"""Paths of probes, which never wait for other management requests: an orchestrator restarts a
server that does not respond for some seconds."""
PROBES_PER_ITERATION = 8
"""Probes begun in an event-loop iteration. One takes less than half a millisecond."""
_INVALID_TARGET_BYTE = re.compile(rb"[^!-~]|#")


class RouteTable:
    """Finds the factory that makes the handler of a request.

    HTTP/2 caches factories by header block, so that requests with equal headers share one. Each
    request gets a handler of its own.

    Attributes:
        pipeline: request pipeline.
        allowed_hosts: allowed Host names; None: any.
        templates: header templates of plain embed requests, which need no handler over HTTP/1.
    """

    def __init__(
        self,
        pipeline: RequestPipeline,
        management: ASGIApp,
        service: GrpcService,
        allowed_hosts: AllowedHosts | None = None,
    ) -> None:
        self.allowed_hosts = allowed_hosts
        self.pipeline = pipeline
        self._management = management
        self._turns = ManagementTurns(REQUESTS_PER_ITERATION)
        self._probe_turns = ManagementTurns(PROBES_PER_ITERATION)
        self._metrics = pipeline.metrics.protocols["rest"]
        self.templates = HeaderTemplateCache(
            self._metrics, pipeline.limits, pipeline.codecs, allowed_hosts
        )
        self._grpc = service

    def resolve_http2(self, headers: Headers) -> ResolvedRoute | str:
        """Returns the route for headers of HTTP/2, or an error message if they are malformed."""
        request = read_request(headers)
        if isinstance(request, str):
            return request
        return ResolvedRoute(self._resolve_http2(request), request.content_length)

    def _resolve_http2(self, request: HttpRequest) -> Callable[[Stream], Handler]:
        content_type = next((v for name, v in request.headers if name == b"content-type"), b"")
        is_grpc = _is_grpc(content_type) and request.method == b"POST"
        try:
            if request.list_bytes > HEADER_LIST_BYTES_MAX:
                raise headers_too_large(request.list_bytes, "bytes", HEADER_LIST_BYTES_MAX)
            if self.allowed_hosts is not None:
                self.allowed_hosts.check(request.headers)
        except EmbedServeError as error:
            if is_grpc:
                return self._grpc.rejection_factory(error, request.headers)
            return rejection_factory(error, request, self.pipeline)
        return self._grpc.resolve(request) if is_grpc else self.resolve(request)

    def resolve(self, request: HttpRequest) -> MakeHandler:
        """Returns the handler factory of a request that is not gRPC, from an allowed host."""
        if error := target_error(request.target):
            return rejection_factory(error, request, self.pipeline)
        path = unquote(request.target.partition(b"?")[0].decode("ascii"))
        route = embed_route(path)
        if route is None:
            turns = self._probe_turns if path in PROBE_PATHS else self._turns
            make: MakeHandler = partial(AsgiHandler, self._management, turns, request)
        else:
            make = resolve_embed(route, request, self.pipeline, self._metrics)
        expects_continue = any(
            name == b"expect" and value.lower() == b"100-continue"
            for name, value in request.headers
        )
        return _with_continue(make) if expects_continue else make


def target_error(target: bytes) -> InvalidRequestError | None:
    """Returns the error for a target with a byte that must be percent-encoded: all but printable
    ASCII, and "#", because a target has no fragment (RFC 9112, section 3.2). None if it has none.
    """
    found = _INVALID_TARGET_BYTE.search(target)
    if found is None:
        return None
    start = max(0, found.start() - TARGET_BYTES_SHOWN)
    shown = target[start : found.end()].decode("latin-1")
    problem = f"the path and query have the byte 0x{found[0].hex()} after {shown[:-1]!a}"
    return InvalidRequestError(f"{problem}: percent-encode it", "path")


def _with_continue(make: MakeHandler) -> MakeHandler:
    """Wraps a handler factory so that it sends 100 (Continue), unless the request is complete or
    rejected."""

    def make_and_continue(stream: HttpStream) -> Handler:
        handler = make(stream)
        if not (stream.is_received or stream.is_sent):
            stream.send_continue()
        return handler

    return make_and_continue


def _is_grpc(content_type: bytes) -> bool:
    return content_type == b"application/grpc" or content_type.startswith(
        (b"application/grpc+", b"application/grpc;")
    )
