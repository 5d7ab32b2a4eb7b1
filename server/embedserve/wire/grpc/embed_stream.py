"""EmbedStream and ModelStreamInfer calls: requests are read ahead and answered in order.

Reading continues while responses are awaited, up to a limit of requests and bytes. A response is
encoded as soon as its result is ready, so that it does not keep its whole batch alive. An accepted
request is cancelled only if its client disconnects.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter

from embedserve.errors import EmbedServeError
from embedserve.lookup_types import ResponseChunks
from embedserve.pipeline import RequestContext, RequestOptions, RequestPipeline, decode_later
from embedserve.tracing.request_id import ExtraHeaders
from embedserve.wire.embed_call_handler import StreamWriter
from embedserve.wire.grpc.calls import STREAM_RESPONSE_BYTES_MAX, BidiCall
from embedserve.wire.grpc.grpc_framing import BODY_LIMIT, GrpcCallError, GrpcHeaders, LargeMessage
from embedserve.wire.http2.stream import Stream

DRAIN_STREAM_S = 1.0
"""Seconds a stream continues while the server drains; shorter streams can finish completely."""
REQUESTS_MAX = 256
"""Requests of one stream that wait for a response or for sending it; more are left unread."""


class StreamedResponse(StreamWriter[Stream]):
    """The response to one request of a stream, kept until the earlier responses are sent.

    Attributes:
        context: the request; None once its response is encoded.
        chunks: chunks of the encoded response.
        nbytes: total bytes of ``chunks``.
        reserved_bytes: bytes reserved for the response in the stream's response budget.
        failure: error that ends the stream in place of a response; None for a response.
    """

    __slots__ = ("_call", "_options", "chunks", "context", "failure", "nbytes", "reserved_bytes")

    def __init__(self, options: RequestOptions, call: EmbedStream, stream: Stream) -> None:
        self._options = options
        self._call = call
        self._headers = call.headers.by_name
        self._stream = stream
        self.chunks: ResponseChunks = ()
        self.nbytes = 0
        self.reserved_bytes = 0
        self.failure: GrpcCallError | None = None
        self.context: RequestContext | None = RequestContext(
            options, perf_counter(), call.pipeline, self
        )
        self.context.deadline_s = call.deadline_s

    def request_id(self) -> bytes:
        """Returns the request id of the whole stream, which is sent in its trailers."""
        return self._call.request_id

    def on_enqueued(self) -> None:
        self._call.reserve(self)
        self._call.take_messages()

    def write_response(
        self, chunks: ResponseChunks, nbytes: int, headers: ExtraHeaders | None = None
    ) -> None:
        self._end(chunks, nbytes)

    def write_error(self, error: EmbedServeError, headers: ExtraHeaders) -> None:
        if self.context is None:  # A response was not written: later ones would take its place.
            self.abort()
            return
        if isinstance(error, GrpcCallError):  # found when the message was decompressed
            self.failure = error
            self._end((), 0)
            return
        body = self._options.response_codec.encode_streamed_error(error)
        self._end((body,), len(body))

    def abort(self) -> None:
        super().abort()
        self._call.reset()

    def _end(self, chunks: ResponseChunks, nbytes: int) -> None:
        self.context = None
        self.chunks = chunks
        self.nbytes = nbytes
        if not self._call.write_ready_responses(self):
            self.chunks = (b"".join(chunks),)  # a copy: it waits for earlier responses


class EmbedStream(BidiCall):
    """Handler of an EmbedStream or ModelStreamInfer call.

    Attributes:
        pipeline: request pipeline.
        deadline_s: perf_counter time of the call's deadline; infinity if it has none.
    """

    def __init__(
        self,
        options: RequestOptions,
        pipeline: RequestPipeline,
        headers: GrpcHeaders,
        stream: Stream,
        response_bytes_max: int = STREAM_RESPONSE_BYTES_MAX,
    ) -> None:
        bytes_max = pipeline.limits.body_bytes_max
        super().__init__(headers, stream, bytes_max, BODY_LIMIT)
        self._options = options
        self._authorization = headers.by_name.get(b"authorization")
        self.pipeline = pipeline
        self._responses: deque[StreamedResponse] = deque()
        self._response_bytes = 0
        self._response_bytes_max = response_bytes_max
        self._draining_since_s = 0.0
        self._has_failed = False  # a message is invalid, and none behind it is taken
        timeout_s = options.timeout_s
        self.deadline_s = float("inf") if timeout_s is None else perf_counter() + timeout_s

    def has_room(self) -> bool:
        return (
            not self._has_failed
            and len(self._responses) < REQUESTS_MAX
            and self._response_bytes + self._stream.unsent_bytes < self._response_bytes_max
        )

    def is_idle(self) -> bool:
        return not self._responses

    def _begin_response(self) -> tuple[StreamedResponse, RequestContext]:
        response = StreamedResponse(self._options, self, self._stream)
        self._responses.append(response)
        assert response.context is not None
        return response, response.context

    def take(self, message: bytes | LargeMessage) -> None:
        response, context = self._begin_response()
        authenticator = self.pipeline.authenticator
        if authenticator is None or authenticator.admit(context, self._authorization):
            if isinstance(message, LargeMessage):
                decode_later(context, message.nbytes, message.whole, is_compressed=True)
            else:
                self.pipeline.submit(context, message)
        self.reserve(response)

    def take_large(self, message: LargeMessage) -> None:
        self.take(message)

    def reserve(self, response: StreamedResponse) -> None:
        """Reserves the bytes of ``response`` in the response budget.

        While the request is decoded its size is unknown, and all of the budget is reserved.
        """
        context = response.context
        if context is None:
            return
        nbytes = self._response_bytes_max
        if context.queue is not None:
            nbytes = context.request.response_bytes(context.queue.model)
        self._response_bytes += nbytes - response.reserved_bytes
        response.reserved_bytes = nbytes

    def write_ready_responses(self, response: StreamedResponse) -> bool:
        """Sends ``response`` and the finished responses behind it.

        Returns False if an earlier response is not ready yet.
        """
        responses = self._responses
        if responses[0] is not response:
            return False
        while responses and responses[0].context is None:
            first = responses.popleft()
            self._response_bytes -= first.reserved_bytes
            if first.failure is not None:
                self.finish(first.failure)
                return True
            self.write(first.chunks, first.nbytes)
        self.take_messages()
        return True

    def fail(self, error: GrpcCallError) -> None:
        """Rejects the invalid message, which ends the stream after the responses to the messages
        before it."""
        self._has_failed = True
        _, context = self._begin_response()
        context.reject(error)

    def finish(self, error: EmbedServeError | None = None) -> None:
        super().finish(error)
        self._cancel()

    def drain(self) -> None:
        """Starts the drain: continues for DRAIN_STREAM_S, as further requests may be in flight."""
        self._draining_since_s = self._draining_since_s or perf_counter()

    def check_time(self, now_s: float) -> None:
        super().check_time(now_s)
        if self._draining_since_s and now_s - self._draining_since_s > DRAIN_STREAM_S:
            super().drain()

    def reset(self) -> None:
        super().reset()
        self._cancel()

    def _cancel(self) -> None:
        """Cancels the requests that have no response yet."""
        responses, self._responses = self._responses, deque()
        for response in responses:
            if response.context is not None:
                response.context.cancel()
                response.context = None
