"""REST embed requests over HTTP/2: stream handlers that submit directly to the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from embedserve.access.authenticator import headers_by_name
from embedserve.codec.codec import JSON
from embedserve.errors import EmbedServeError, RequestTooLargeError
from embedserve.lookup import ResponseChunks
from embedserve.metrics.metrics import ProtocolMetrics
from embedserve.pipeline import RequestOptions, RequestPipeline
from embedserve.tracing.request_id import HeaderList
from embedserve.wire.byte_queue import ByteQueue
from embedserve.wire.http2.header_blocks import encode
from embedserve.wire.http2.route_resolver import Http2Request
from embedserve.wire.http2.stream import NULL_HANDLER, Handler, Stream
from embedserve.wire.http2_request import Http2RequestContext
from embedserve.wire.rest import (
    Route,
    answer_headers,
    check_method,
    error_answer,
    error_encoder,
    read_headers,
    record_early_rejection,
)


class Http2RestContext(Http2RequestContext):
    """A REST embed request over HTTP/2, from its header block to its response.

    Attributes:
        is_refused: whether the request is rejected, perhaps after a delay; its body is discarded.
    """

    __slots__ = ("_body", "is_refused")

    def __init__(
        self,
        options: RequestOptions,
        pipeline: RequestPipeline,
        headers: Mapping[bytes, bytes],
        stream: Stream,
    ) -> None:
        super().__init__(options, pipeline, headers, stream)
        self._body = ByteQueue()
        self.is_refused = False

    def receive(self, data: bytes, is_end: bool) -> None:
        if self.is_refused:
            return
        body = self._body
        if not self.has_size(body.nbytes + len(data), is_whole=False):
            return
        if not is_end:
            body.append(data)
            self._want_more()
            return
        if body.nbytes:
            body.append(data)
            data = body.take_all()
            self._stream.consumed(self._stream.held_bytes)
        self.pipeline.submit(self, data)

    def has_size(self, nbytes: int, *, is_whole: bool) -> bool:
        """Returns whether a body of ``nbytes`` is allowed; rejects the request if it is not."""
        try:
            self.options.codec.check_size(nbytes, self.pipeline.limits, is_whole=is_whole)
        except RequestTooLargeError as error:
            self.reject(error)
            return False
        return True

    def _want_more(self) -> None:
        stream = self._stream
        left = self.options.codec.bytes_max(self.pipeline.limits) - self._body.nbytes
        stream.expect(left if stream.missing_bytes is None else stream.missing_bytes)

    def write_response(
        self, parts: ResponseChunks, nbytes: int, headers: HeaderList | None = None
    ) -> None:
        head = encode(
            [
                (b":status", b"200"),
                *answer_headers(self.options.response_codec, parts),
                (b"content-length", b"%d" % nbytes),
                *(headers or ()),
            ]
        )
        self._stream.answer(head, parts, nbytes, b"")

    def end(self, error: EmbedServeError, headers: HeaderList) -> None:
        encode = self.options.response_codec.encode_error
        write_error(self._stream, error, headers, encode_error=encode)


def write_error(
    stream: Stream,
    error: EmbedServeError,
    headers: HeaderList,
    method: bytes = b"POST",
    encode_error: Callable[[EmbedServeError], bytes] = JSON.encode_error,
) -> None:
    """Writes the response to ``error`` in the JSON format of its route; to HEAD without a body.

    ``headers`` are extra headers, such as the request id.
    """
    headers, body = error_answer(error, headers, encode_error)
    status = (b":status", b"%d" % error.http_status)
    head = encode([status, *headers, (b"content-length", b"%d" % len(body))])
    if method == b"HEAD":
        stream.send_head(head, is_end=True)
    else:
        stream.answer(head, (body,), len(body), b"")


def open_embed(
    route: Route, request: Http2Request, pipeline: RequestPipeline, metrics: ProtocolMetrics
) -> Callable[[Stream], Handler]:
    """Returns the handler factory for embed requests to ``route`` with these headers."""
    try:
        check_method(request.method.decode("latin-1"))
        options = read_headers(route, request.headers, metrics)
        by_name = headers_by_name(request.headers)
        authorization = by_name.get(b"authorization")
    except EmbedServeError as error:
        return refused(error, request, pipeline)

    def open_call(stream: Stream) -> Handler:
        call = Http2RestContext(options, pipeline, by_name, stream)
        authenticator = pipeline.authenticator
        if authenticator is not None and not authenticator.admit(call, authorization):
            call.is_refused = True
            return call
        size = stream.missing_bytes
        if (size is None or call.has_size(size, is_whole=True)) and pipeline.models.is_closed:
            pipeline.reject_if_overloaded(call)
        return call

    return open_call


def refused(
    error: EmbedServeError, request: Http2Request, pipeline: RequestPipeline
) -> Callable[[Stream], Handler]:
    """Returns a handler factory that answers each stream with ``error``."""

    def open_refused(stream: Stream) -> Handler:
        told = record_early_rejection(pipeline, error, request.headers, 0.0, stream.connection.peer)
        path = request.target.partition(b"?")[0].decode("latin-1")
        write_error(stream, error, told, request.method, error_encoder(path))
        return NULL_HANDLER

    return open_refused
