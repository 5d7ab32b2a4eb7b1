"""REST embed requests as stream handlers that submit to the pipeline, over HTTP/1 and HTTP/2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter

from embedserve.access.authenticator import headers_by_name
from embedserve.codec import json_codec
from embedserve.errors import EmbedServeError, RequestTooLargeError
from embedserve.lookup_types import ResponseChunks
from embedserve.metrics.request_metrics import ProtocolMetrics
from embedserve.pipeline import RequestContext, RequestOptions, RequestPipeline
from embedserve.tracing.request_id import ExtraHeaders
from embedserve.wire.byte_queue import ByteQueue
from embedserve.wire.early_rejection import EarlyRejection
from embedserve.wire.embed_call_handler import EmbedCallHandler
from embedserve.wire.http_stream import NULL_HANDLER, Handler, HttpRequest, HttpStream, MakeHandler
from embedserve.wire.rest.headers import (
    EmbedRoute,
    check_method,
    content_headers,
    encode_error_response,
    error_encoder,
    read_headers,
)


class RestCall(EmbedCallHandler[HttpStream]):
    """A REST embed request, from its headers to its response."""

    __slots__ = ("_body", "_options")

    def __init__(
        self,
        options: RequestOptions,
        pipeline: RequestPipeline,
        headers: Mapping[bytes, bytes],
        stream: HttpStream,
    ) -> None:
        self._options = options
        self._headers = headers
        self._stream = stream
        self._is_rejected = False
        self._body = ByteQueue()
        context = self._context = RequestContext(options, perf_counter(), pipeline, self)
        if pipeline.authenticator is not None and not self.admit(context, pipeline.authenticator):
            return
        size = stream.missing_bytes
        is_allowed = size is None or self._check_size(context, size, is_whole=True)
        if is_allowed and pipeline.models.has_full_unsized_queue:
            pipeline.reject_if_overloaded(context)

    def receive(self, data: bytes, is_end: bool) -> None:
        context, body = self._context, self._body
        if context is None or self._is_rejected:
            return
        if not self._check_size(context, body.nbytes + len(data), is_whole=False):
            return
        if not is_end:
            body.append(data)
            self._expect_more(context)
            return
        if body.nbytes:
            body.append(data)
            data = body.take_all()
            self._stream.consumed(self._stream.held_bytes)
        context.pipeline.submit(context, data)

    def reject(self, error: EmbedServeError) -> None:
        if self._context is not None:
            self._context.reject(error)

    def _check_size(self, context: RequestContext, nbytes: int, *, is_whole: bool) -> bool:
        """Returns whether a body of ``nbytes`` is allowed; rejects the request if it is not."""
        try:
            context.options.codec.check_size(nbytes, context.pipeline.limits, is_whole=is_whole)
        except RequestTooLargeError as error:
            context.reject(error)
            return False
        return True

    def _expect_more(self, context: RequestContext) -> None:
        stream = self._stream
        left = context.options.codec.bytes_max(context.pipeline.limits) - self._body.nbytes
        stream.expect(left if stream.missing_bytes is None else stream.missing_bytes)

    def write_response(
        self, chunks: ResponseChunks, nbytes: int, headers: ExtraHeaders | None = None
    ) -> None:
        self._context = None
        fixed = content_headers(self._options.response_codec, chunks)
        self._stream.respond(200, [*fixed, *(headers or ())], chunks, nbytes)

    def end_with_error(self, error: EmbedServeError, headers: ExtraHeaders) -> None:
        encode = self._options.response_codec.encode_error
        write_error(self._stream, error, headers, encode_error=encode)


def write_error(
    stream: HttpStream,
    error: EmbedServeError,
    headers: ExtraHeaders,
    method: bytes = b"POST",
    encode_error: Callable[[EmbedServeError], bytes] = json_codec.encode_error,
) -> None:
    """Writes the response to ``error`` in the JSON format of its route; to HEAD without a body.

    ``headers`` are extra headers, such as the request id.
    """
    headers, body = encode_error_response(error, headers, encode_error)
    if method == b"HEAD":
        length = (b"content-length", b"%d" % len(body))
        stream.start_response(error.http_status, [*headers, length], is_end=True)
    else:
        stream.respond(error.http_status, headers, (body,), len(body))


def resolve_embed(
    route: EmbedRoute, request: HttpRequest, pipeline: RequestPipeline, metrics: ProtocolMetrics
) -> MakeHandler:
    """Returns the handler factory for embed requests to ``route`` with these headers."""
    try:
        check_method(request.method.decode("latin-1"))
        options = read_headers(route, request.headers, metrics, pipeline.codecs)
        by_name = headers_by_name(request.headers)
    except EmbedServeError as error:
        return rejection_factory(error, request, pipeline)
    return partial(RestCall, options, pipeline, by_name)


def rejection_factory(
    error: EmbedServeError, request: HttpRequest, pipeline: RequestPipeline, seconds: float = 0.0
) -> MakeHandler:
    """Returns a handler factory that answers each stream with ``error``.

    ``seconds`` is how long the request took until it was rejected.
    """

    error.__traceback__ = None  # HTTP/2 caches this: frames would keep the bytes being read
    metrics, method = pipeline.metrics.protocols["rest"], request.method
    rejection = EarlyRejection(pipeline, metrics, error.code, error.message, request.headers)
    encode = error_encoder(request.target)

    def reject_request(stream: HttpStream) -> Handler:
        extra_headers = rejection.record(stream.connection.peer, seconds)
        write_error(stream, error, extra_headers, method, encode)
        return NULL_HANDLER

    return reject_request
