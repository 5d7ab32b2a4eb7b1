"""gRPC calls as stream handlers: messages in, messages and a status out.

A unary call waits for its complete message; a streaming call takes messages as they arrive. The
pipeline or a plain function processes the messages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property, partial
from time import perf_counter

from embedserve.access.caller_quota import CallerQuota
from embedserve.errors import DRAINING, INTERNAL, EmbedServeError, EngineError, NotReadyError
from embedserve.lookup_types import ResponseChunks
from embedserve.pipeline import (
    UPLOAD_S_MAX,
    RequestContext,
    RequestOptions,
    RequestPipeline,
    decode_later,
    late_request,
)
from embedserve.tracing.request_id import REQUEST_ID, ExtraHeaders, request_id_header, request_id_of
from embedserve.wire.embed_call_handler import EmbedCallHandler
from embedserve.wire.grpc.grpc_framing import (
    PLAIN_BYTES_MAX,
    PLAIN_LIMIT,
    PREFIX,
    PREFIX_BYTES,
    Deframer,
    GrpcCallError,
    GrpcHeaders,
    LargeMessage,
    framed,
)
from embedserve.wire.grpc.statuses import (
    HEAD_BLOCK,
    OK_BLOCK,
    OK_TRAILERS,
    error_block,
    error_trailers,
    only_trailers,
)
from embedserve.wire.http2.header_blocks import encode
from embedserve.wire.http2.stream import Stream
from embedserve.wire.http2.turns import WORK_PER_TURN
from embedserve.wire.http_stream import Handler

logger = logging.getLogger(__name__)

STREAM_RESPONSE_BYTES_MAX = 64 << 20
"""Bytes of one stream's responses that are pending or unsent; one request above it is accepted."""
PLAIN_WORK = 2048
"""Work units (WORK_PER_TURN) of a call of a plain method; a byte of its response costs one more."""


class GrpcEmbedCall(EmbedCallHandler[Stream]):
    """A unary lookup (Embed, ModelInfer or Predict) as stream handler, from its header block to its
    response.

    While a queue is full the call may be rejected before its message arrives.
    """

    __slots__ = ("_deframer", "_encoding")

    def __init__(
        self,
        options: RequestOptions,
        pipeline: RequestPipeline,
        headers: GrpcHeaders,
        stream: Stream,
    ) -> None:
        self._encoding = headers.encoding
        self._headers = headers.by_name
        self._stream = stream
        self._is_rejected = False
        self._deframer: Deframer | None = None
        context = self._context = RequestContext(options, perf_counter(), pipeline, self)
        if pipeline.authenticator is not None and not self.admit(context, pipeline.authenticator):
            return
        if pipeline.models.has_full_unsized_queue:
            pipeline.reject_if_overloaded(context)

    def receive(self, data: bytes, is_end: bool) -> None:
        context = self._context
        if context is None or self._is_rejected:
            return
        try:
            if self._deframer is None:
                bytes_max = context.pipeline.limits.body_bytes_max
                if is_end and self._encoding == b"identity":
                    whole = only_message(data, bytes_max)
                    if whole is not None:
                        context.pipeline.submit(context, whole)
                        return
                self._deframer = Deframer(bytes_max, self._encoding)
            message = receive_unary(self._deframer, self._stream, data, is_end)
        except GrpcCallError as error:
            context.reject(error)
            return
        if isinstance(message, LargeMessage):
            decode_later(context, message.nbytes, message.whole, is_compressed=True)
        elif message is not None:
            context.pipeline.submit(context, message)

    def write_response(
        self, chunks: ResponseChunks, nbytes: int, headers: ExtraHeaders | None = None
    ) -> None:
        self._context = None
        prefix, stream = b"\0" + nbytes.to_bytes(4, "big"), self._stream
        end = OK_BLOCK if headers is None else OK_BLOCK + encode(headers)
        # Stream.send_response without its call, as this runs for every request.
        stream.connection.frame_writer.write_response(
            stream, HEAD_BLOCK, (prefix, *chunks), nbytes + PREFIX_BYTES, end
        )

    def end_with_error(self, error: EmbedServeError, headers: ExtraHeaders) -> None:
        self._stream.send_head(error_block(error) + encode(headers), is_end=True)


def only_message(body: bytes, bytes_max: int) -> bytes | None:
    """Returns the message if ``body`` is exactly one uncompressed message within ``bytes_max``.

    Returns None for any other body.
    """
    size = len(body) - PREFIX_BYTES
    if size < 0 or size > bytes_max or PREFIX.unpack_from(body) != (0, size):
        return None
    return body[PREFIX_BYTES:]


def receive_unary(
    deframer: Deframer, stream: Stream, data: bytes, is_end: bool
) -> bytes | LargeMessage | None:
    """Takes a chunk of a body that is one message. Returns the message after the last chunk,
    otherwise None.

    Raises:
        GrpcCallError: the body is not exactly one message, or the message is too large, or its
            framing or compression is malformed.
    """
    deframer.feed(data)
    # The prefix has the size: a message that is too large is rejected before it arrives.
    missing = deframer.check_size()
    if missing < 0:
        raise GrpcCallError("UNIMPLEMENTED", "the method requires exactly one message: more came")
    if not is_end:
        stream.expect(missing)
        return None
    stream.consumed(stream.held_bytes)
    try:
        message = deframer.next_message()
    finally:
        if deframer.encoding != b"identity":
            stream.connection.spend_turn(deframer.work)
    if message is None:
        deframer.check_end()
        raise GrpcCallError("UNIMPLEMENTED", "the method requires exactly one message: none came")
    return message


class GrpcPlainCall(Handler):
    """A unary call of a plain method: a function answers it, without a lookup.

    Its message has at most PLAIN_BYTES_MAX.
    """

    def __init__(
        self,
        function: Callable[[CallerQuota | None, bytes], bytes],
        headers: GrpcHeaders,
        stream: Stream,
        quota: CallerQuota | None,
    ) -> None:
        """
        Args:
            function: takes ``quota`` and the request message and returns the response message, or
                raises EmbedServeError.
            headers: headers of the call.
            stream: stream of the call.
            quota: quota of the caller; None without authentication.
        """
        self._function = partial(function, quota)
        self._encoding = headers.encoding
        self._headers = headers.by_name
        self._stream = stream
        self._start_s = perf_counter()
        self._deframer: Deframer | None = None

    def receive(self, data: bytes, is_end: bool) -> None:
        try:
            if self._deframer is None:
                self._deframer = Deframer(PLAIN_BYTES_MAX, self._encoding, PLAIN_LIMIT)
            message = receive_unary(self._deframer, self._stream, data, is_end)
            if message is None:
                return
            assert isinstance(message, bytes)  # PLAIN_BYTES_MAX are decompressed inline
            response = framed(self._function(message))
            self._stream.connection.spend_turn(PLAIN_WORK + len(response))
        except EmbedServeError as error:
            self._end(error)
        except Exception:
            logger.exception("a call failed")
            self._end(EngineError(INTERNAL))
        else:
            self._stream.send_response(HEAD_BLOCK, (response,), len(response), OK_BLOCK)

    def _end(self, error: EmbedServeError) -> None:
        extra_trailers = request_id_header(self._headers.get(REQUEST_ID))
        self._stream.send_head(error_block(error) + encode(extra_trailers), is_end=True)

    def check_time(self, now_s: float) -> None:
        if not self._stream.is_received and now_s - self._start_s > UPLOAD_S_MAX:
            self._end(late_request())


class BidiCall(Handler):
    """A bidirectional streaming call. Subclasses process the messages in ``take``.

    Attributes:
        is_read: whether the client has ended its side and all messages were taken.
        headers: headers of the call.
    """

    def __init__(
        self,
        headers: GrpcHeaders,
        stream: Stream,
        bytes_max: int = PLAIN_BYTES_MAX,
        limit: str = PLAIN_LIMIT,
    ) -> None:
        """
        Args:
            headers: headers of the call.
            stream: stream of the call.
            bytes_max: limit of a message in bytes; if it is larger than the default, the subclass
                has ``take_large``.
            limit: name of that limit.

        Raises:
            GrpcCallError: UNIMPLEMENTED, its encoding is not supported.
        """
        self.headers = headers
        self._stream = stream
        self._deframer = Deframer(bytes_max, headers.encoding, limit)
        self._whole_s = perf_counter()  # when last no incomplete message was buffered
        self._has_started = False
        self._has_all = False
        self._is_over = False
        self._is_draining = False
        self._is_taking = False
        self._is_turn_due = False  # messages are left for a later event-loop iteration

    @property
    def is_read(self) -> bool:
        return self._has_all and not self._deframer.nbytes

    def receive(self, data: bytes, is_end: bool) -> None:
        self._deframer.feed(data)
        self._has_all = is_end
        self.take_messages()

    def take_messages(self) -> None:
        """Takes buffered messages while there is room for their responses; ends a finished call.

        After WORK_PER_TURN it continues in a later event-loop iteration.
        """
        if self._is_over or self._is_taking or self._is_turn_due:
            return
        self._is_taking = True
        try:
            self._take_all()
        except GrpcCallError as error:
            self.fail(error)
        except Exception:
            logger.exception("a call failed")
            self.finish(EngineError(INTERNAL))
        finally:
            self._is_taking = False
        if self.is_idle() and (self.is_read or self._is_draining):
            self.finish(None if self.is_read else NotReadyError(DRAINING))

    def fail(self, error: GrpcCallError) -> None:
        """Ends the call, because its next message is invalid."""
        self.finish(error)

    def _take_all(self) -> None:
        deframer, connection = self._deframer, self._stream.connection
        work_before = deframer.work
        try:
            while not self._is_over and not self._is_draining and self.has_room():
                if deframer.work - work_before >= WORK_PER_TURN:
                    self._is_turn_due = True
                    connection.message_turns.add(self._take_turn)
                    return
                before = deframer.nbytes
                message = deframer.next_message()
                if message is None:
                    self._expect_more()
                    return
                self._stream.consumed(min(self._stream.held_bytes, before - deframer.nbytes))
                if isinstance(message, LargeMessage):
                    self.take_large(message)
                else:
                    self.take(message)
        finally:
            connection.spend_turn(deframer.work - work_before)

    def _take_turn(self) -> None:
        self._is_turn_due = False
        self.take_messages()

    def _expect_more(self) -> None:
        if self._has_all:
            self._deframer.check_end()
            return
        self._stream.expect(self._deframer.check_size())

    def has_room(self) -> bool:
        """Returns whether another message may be taken."""
        return self._stream.unsent_bytes < STREAM_RESPONSE_BYTES_MAX

    def is_idle(self) -> bool:
        """Returns whether all messages taken have been answered."""
        return True

    def take(self, message: bytes) -> None:
        """Processes ``message``; the response may be written later."""
        raise AssertionError("a subclass takes messages")

    def take_large(self, message: LargeMessage) -> None:
        """Processes a message that must be decompressed off the event loop."""
        raise AssertionError("a subclass with a larger limit takes such messages")

    def charge(self, work: int) -> None:
        """Adds ``work`` units to those of the current message, which are MESSAGE_WORK or more."""
        self._deframer.work += work

    def write(self, chunks: ResponseChunks, nbytes: int) -> None:
        """Sends one response message."""
        if not self._has_started:
            self._has_started = True
            self._stream.send_head(HEAD_BLOCK)
        prefix = b"\0" + nbytes.to_bytes(4, "big")
        self._stream.send_body((prefix, *chunks), nbytes + PREFIX_BYTES)

    def finish(self, error: EmbedServeError | None = None) -> None:
        """Ends the call, with ``error`` if it failed; does nothing if it has ended."""
        if self._is_over:
            return
        self._is_over = True
        self._deframer.drop()
        trailers = [*(OK_TRAILERS if error is None else error_trailers(error))]
        if error is not None or REQUEST_ID in self.headers.by_name or "request_id" in self.__dict__:
            trailers.append((REQUEST_ID, self.request_id))
        if self._has_started:
            self._stream.end(encode(trailers))
        else:
            self._stream.send_head(only_trailers(trailers), is_end=True)

    @cached_property
    def request_id(self) -> bytes:
        """Request id of the call: the caller's, or an id generated at the first access."""
        return request_id_of(self.headers.by_name.get(REQUEST_ID))

    def reset(self) -> None:
        self._is_over = True
        self._deframer.drop()

    def resume(self) -> None:
        self.take_messages()

    def check_time(self, now_s: float) -> None:
        """Ends a stream whose message stays incomplete for UPLOAD_S_MAX.

        Between messages a stream may be idle for as long as its connection is open.
        """
        if self._is_turn_due or not (self._deframer.nbytes and self.has_room()):
            self._whole_s = now_s
        elif now_s - self._whole_s > UPLOAD_S_MAX:
            late = late_request()
            self.fail(GrpcCallError(late.code, late.message))

    def drain(self) -> None:
        self._is_draining = True
        self.take_messages()
