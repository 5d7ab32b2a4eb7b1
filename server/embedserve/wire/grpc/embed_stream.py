"""EmbedStream and ModelStreamInfer calls: requests are read ahead and answered in order.

Reading continues while responses are awaited, up to a limit of requests and bytes. A response is
encoded as soon as its result is ready, so that it does not keep its whole batch alive. An accepted
request is cancelled only if its client disconnects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from time import perf_counter
from typing import TYPE_CHECKING

from embedserve.access.authenticator import Certificate
from embedserve.errors import EmbedServeError
from embedserve.lookup import ResponseChunks
from embedserve.pipeline import RequestContext, RequestOptions, RequestPipeline
from embedserve.tracing.request_id import HeaderList
from embedserve.wire.grpc.calls import ANSWER_BYTES_MAX, BidiStream
from embedserve.wire.http2.stream import Stream

if TYPE_CHECKING:
    from embedserve.wire.http2.connection import Http2Connection

DRAIN_STREAM_S = 1.0
"""Seconds a stream continues while the server drains; shorter streams can finish completely."""
REQUESTS_MAX = 256
"""Requests of one stream that wait for a response or for sending it; more are left unread."""


class StreamedRequestContext(RequestContext):
    """One request of a stream.

    Attributes:
        is_done: whether the response is encoded.
        parts: chunks of the encoded response, once ``is_done``.
        nbytes: total bytes of ``parts``.
        reserved_bytes: bytes reserved for the response in the stream's response budget.
    """

    __slots__ = ("_stream", "is_done", "nbytes", "parts", "reserved_bytes")

    def __init__(self, options: RequestOptions, stream: EmbedStream) -> None:
        super().__init__(options, perf_counter(), stream.pipeline)
        self.deadline_s = stream.deadline_s
        self._stream = stream
        self.is_done = False
        self.parts: ResponseChunks = ()
        self.nbytes = 0
        self.reserved_bytes = 0

    @property
    def origin(self) -> object:
        return self._stream.connection

    @property
    def certificate(self) -> Certificate | None:
        return self._stream.connection.certificate

    @property
    def peer(self) -> str:
        return self._stream.connection.peer

    def header(self, name: bytes) -> bytes | None:
        return self._stream.headers.get(name)

    @property
    def request_id(self) -> bytes:
        """Request id of the whole stream, which is sent in its trailers."""
        return self._stream.request_id

    def on_enqueued(self) -> None:
        assert self.queue is not None
        self._stream.reserve(self, self.request.response_bytes(self.queue.model))
        self._stream.go_on()

    def write_response(
        self, parts: ResponseChunks, nbytes: int, headers: HeaderList | None = None
    ) -> None:
        self._end(parts, nbytes)

    def write_error(self, error: EmbedServeError, headers: HeaderList) -> None:
        body = self.options.response_codec.encode_streamed_error(error)
        self._end((body,), len(body))

    def _end(self, parts: ResponseChunks, nbytes: int) -> None:
        self.is_done = True
        self.parts = parts
        self.nbytes = nbytes
        if not self._stream.write_those_done(self):
            self.parts = (b"".join(parts),)  # a copy: it waits for earlier responses


class EmbedStream(BidiStream):
    """Handler of an EmbedStream or ModelStreamInfer call.

    Attributes:
        pipeline: request pipeline.
        deadline_s: perf_counter time of the call's deadline; infinity if it has none.
    """

    def __init__(
        self,
        options: RequestOptions,
        pipeline: RequestPipeline,
        encoding: bytes,
        headers: Mapping[bytes, bytes],
        stream: Stream,
        answer_bytes_max: int = ANSWER_BYTES_MAX,
    ) -> None:
        super().__init__(encoding, pipeline.limits.body_bytes_max, headers, stream)
        self._asked = options
        self._authorization = headers.get(b"authorization")
        self.pipeline = pipeline
        self._requests: deque[StreamedRequestContext] = deque()
        self._answer_bytes = 0
        self._answer_bytes_max = answer_bytes_max
        self._draining_since_s = 0.0
        timeout_s = options.timeout_s
        self.deadline_s = float("inf") if timeout_s is None else perf_counter() + timeout_s

    def has_room(self) -> bool:
        return (
            len(self._requests) < REQUESTS_MAX
            and self._answer_bytes + self._stream.unsent_bytes < self._answer_bytes_max
        )

    def is_idle(self) -> bool:
        return not self._requests

    @property
    def connection(self) -> Http2Connection:
        return self._stream.connection

    def take(self, message: bytes) -> None:
        request = StreamedRequestContext(self._asked, self)
        self._requests.append(request)
        authenticator = self.pipeline.authenticator
        if authenticator is None or authenticator.admit(request, self._authorization):
            self.pipeline.submit(request, message)
        if request.queue is not None:
            self.reserve(request, request.request.response_bytes(request.queue.model))
        elif not request.is_done:  # in decoding: the response size is unknown
            self.reserve(request, self._answer_bytes_max)

    def reserve(self, request: StreamedRequestContext, nbytes: int) -> None:
        """Reserves ``nbytes`` of the response budget for the response to ``request``."""
        self._answer_bytes += nbytes - request.reserved_bytes
        request.reserved_bytes = nbytes

    def write_those_done(self, request: StreamedRequestContext) -> bool:
        """Sends the response to ``request`` and the finished responses behind it.

        Returns False if an earlier response is not ready yet.
        """
        requests = self._requests
        if requests[0] is not request:
            return False
        while requests and requests[0].is_done:
            first = requests.popleft()
            self._answer_bytes -= first.reserved_bytes
            self.write(first.parts, first.nbytes)
        self.go_on()
        return True

    def drain(self) -> None:
        """Starts the drain: continues for DRAIN_STREAM_S, as further requests may be in flight."""
        self._draining_since_s = self._draining_since_s or perf_counter()

    def check_time(self, now_s: float) -> None:
        super().check_time(now_s)
        if self._draining_since_s and now_s - self._draining_since_s > DRAIN_STREAM_S:
            super().drain()

    def reset(self) -> None:
        super().reset()
        requests, self._requests = self._requests, deque()
        for request in requests:
            request.cancel()
