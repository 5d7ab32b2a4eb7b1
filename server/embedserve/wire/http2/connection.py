"""State machine of a server-side HTTP/2 connection, without I/O.

``receive`` takes received bytes; bytes to send are in ``frame_writer.out``. The exception is a
response that is alone, which goes immediately to ``frame_writer.write``: to the transport, as
Http2Protocol sets it. A complete header block opens a stream with a handler, which receives the
request body and sends the response. The states and errors are those of RFC 9113, sections 5.1, 5.4
and 6.
"""

from __future__ import annotations

from collections.abc import Callable

from embedserve.access.authenticator import ClientCertificate
from embedserve.wire.http2 import frames
from embedserve.wire.http2.closed_streams import ClosedStreams
from embedserve.wire.http2.control import STREAMS_MAX, ControlFrames
from embedserve.wire.http2.frame_writer import FrameWriter
from embedserve.wire.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_BYTES_MAX,
    FRAME_HEADER,
    FRAME_HEADER_BYTES,
    HEADERS,
    JOINED_FRAME_BYTES_MIN,
    SETTINGS,
    STREAM_MASK,
    WINDOW_UPDATE,
    ErrorCode,
    ProtocolViolation,
    StreamError,
    join_data_frames,
    violation,
)
from embedserve.wire.http2.graceful_shutdown import GracefulShutdown
from embedserve.wire.http2.header_blocks import HeaderBlocks
from embedserve.wire.http2.inbound_flow_control import WINDOW_LOW, InboundFlowControl
from embedserve.wire.http2.request_frames import UNSENT_BYTES_MAX, RequestFrames
from embedserve.wire.http2.request_headers import ResolvedRoute, ResolveRoute
from embedserve.wire.http2.stream import Stream
from embedserve.wire.http2.token_bucket import ResponseTokenBucket, TokenBucket
from embedserve.wire.http2.turns import (
    ABUSE_BYTES,
    ABUSE_WORK,
    FRAMES_PER_TURN,
    HEADERS_ONLY_WORK,
    WORK_PER_TURN,
    MessageTurns,
)
from embedserve.wire.http2.upload_budget import UploadBudget
from embedserve.wire.http_stream import NULL_HANDLER, UNSENT_S_MAX, Handler
from embedserve.wire.response_date import ResponseDate

RESETS_PER_FRAME = 1
"""Resets accepted per DATA frame, or other last frame of a response. Clients that hedge their calls
reset many, but have more calls answered. A request that is reset costs no more than one that is
answered."""


class Http2Connection:
    """An HTTP/2 connection, from the end of its preface, which ProtocolDetector has read.

    Attributes:
        frame_writer: sending half.
        on_output: callback when there are bytes to send.
        flow_control: windows of the receiving half.
        blocks: decoder of header blocks.
        streams: open streams, by stream identifier.
        streams_max: limit of concurrent streams; 0 once new streams are no longer accepted.
        next_id: lowest stream identifier that the client has neither opened nor skipped.
        closed_streams: recently closed streams.
        message_turns: turns of streams that have many messages to take.
        required_frame_type: required type of the next frame; None: any type. The first frame must
            be SETTINGS, and only CONTINUATION may follow an incomplete header block.
        certificate: client certificate from the TLS handshake; None if there was none.
        peer: address of the client.
        date: Date header of REST responses; gRPC servers send none.
        shutdown: graceful shutdown of the connection.
        is_over: whether reading has ended; ``frame_writer.out`` then holds the last bytes to send.
        has_more: whether received bytes are left to read after yielding to other connections.
    """

    __slots__ = (
        "_abuse_budget",
        "_control",
        "_left",
        "_requests",
        "_resets",
        "_turn_left",
        "blocks",
        "certificate",
        "closed_streams",
        "date",
        "flow_control",
        "frame_writer",
        "has_more",
        "is_over",
        "message_turns",
        "next_id",
        "on_output",
        "peer",
        "required_frame_type",
        "shutdown",
        "streams",
        "streams_max",
    )

    def __init__(
        self,
        resolve_route: ResolveRoute,
        uploads: UploadBudget,
        on_output: Callable[[], None],
        date: ResponseDate,
    ) -> None:
        self.frame_writer = FrameWriter()
        self.flow_control = InboundFlowControl(self.frame_writer.out, uploads, on_output)
        self.message_turns = MessageTurns(self.flow_control, on_output)
        self.streams: dict[int, Stream] = {}
        self.certificate: ClientCertificate | None = None
        self.peer = ""
        self.is_over = self.has_more = False
        self.on_output = on_output
        self.date = date
        self.blocks: HeaderBlocks[ResolvedRoute | str] = HeaderBlocks(resolve_route)
        self._left, self._turn_left = b"", 0
        self.next_id, self.streams_max = 1, STREAMS_MAX
        self.closed_streams = ClosedStreams(self.frame_writer.out)
        self.required_frame_type: int | None = SETTINGS
        self._resets = ResponseTokenBucket(self.frame_writer, RESETS_PER_FRAME)
        self._abuse_budget = TokenBucket()  # of frames without a request
        self.shutdown = GracefulShutdown(self)
        self._control = ControlFrames(self)
        self._requests = RequestFrames(self)
        self._control.send_settings()
        self.flow_control.top_up()

    def receive(self, data: bytes) -> None:
        """Processes received bytes. With b"" continues with the bytes left by an earlier call."""
        if self.is_over:
            return
        if self._left:
            data = self._left + data
            self.has_more = False
        self._turn_left = WORK_PER_TURN
        try:
            end = self._read_frames(data)
            if end < len(data):
                self._left = data[end:]
                self.has_more = self._turn_left <= 0
            else:
                self._left = b""
        except ProtocolViolation as error:
            self.end(error.code, error.reason)
            return
        if self.flow_control.window <= WINDOW_LOW:
            self.flow_control.top_up()

    @property
    def is_begun(self) -> bool:
        """Whether the client's SETTINGS frame has arrived."""
        return self.required_frame_type != SETTINGS

    @property
    def left_bytes(self) -> int:
        """Received bytes that are not processed yet: frames, and an incomplete header block."""
        return len(self._left) + len(self._requests.block)

    def _read_frames(self, data: bytes) -> int:
        """Processes the complete frames in ``data``. Returns the position where they end."""
        position, end = 0, len(data)
        last_head = end - FRAME_HEADER_BYTES
        unpack = FRAME_HEADER.unpack_from
        for _ in range(FRAMES_PER_TURN):
            if position > last_head or self._turn_left <= 0:
                break
            upper, lower, kind, flags, stream_id = unpack(data, position)
            start = position + FRAME_HEADER_BYTES
            after = start + (upper << 16 | lower)
            if after - start > FRAME_BYTES_MAX:
                raise ProtocolViolation(
                    ErrorCode.FRAME_SIZE_ERROR,
                    f"a frame has {after - start} bytes, the most is {FRAME_BYTES_MAX}",
                )
            if after > end:
                break
            if self.required_frame_type is not None:
                self._check_order(kind, flags)
            try:
                if kind == HEADERS and flags == END_HEADERS and after <= last_head:
                    position = self._read_whole(stream_id, data, start, after, end)
                    if position:
                        continue
                if kind == DATA and not flags and after - start >= JOINED_FRAME_BYTES_MIN:
                    payload, flags, position = join_data_frames(data, start, after, stream_id)
                else:
                    payload, position = data[start:after], after
                stream_id &= STREAM_MASK
                if kind == DATA:
                    self._requests.on_data(stream_id, flags, payload)
                elif kind == HEADERS:
                    self._requests.on_headers(stream_id, flags, payload)
                elif kind == WINDOW_UPDATE:
                    self._control.on_window_update(stream_id, payload)
                elif kind == CONTINUATION:
                    self._requests.on_continuation(stream_id, flags, payload)
                else:
                    self._control.receive(kind, stream_id, flags, payload)
            except StreamError as error:
                self.reset(error.stream_id, "streams in error")
                self.closed_streams.reset(error.stream_id, error.code)
            if self.is_over:
                return end
        else:
            self._turn_left = 0
        return position

    def _read_whole(self, stream_id: int, data: bytes, start: int, after: int, end: int) -> int:
        """Fast path: opens a stream for a request that has arrived completely, as most do.

        The request is a cached header block, at data[start:after], and one DATA frame with the
        whole body. Returns the position where that frame ends, or 0 for any other request.
        """
        opened = self.blocks.cached.get(data[start:after])
        upper, lower, kind, flags, body_stream_id = FRAME_HEADER.unpack_from(data, after)
        length = upper << 16 | lower
        start = after + FRAME_HEADER_BYTES
        after = start + length
        flow_control = self.flow_control
        if (
            type(opened) is not ResolvedRoute
            or (opened.content_length is not None and opened.content_length != length)
            or stream_id != self.next_id
            or body_stream_id != stream_id
            or flags != END_STREAM
            or kind != DATA
            or after > end
            or length > flow_control.whole_bytes_max
            or length > flow_control.window
            or len(self.streams) >= self.streams_max
            or self.frame_writer.unsent_bytes > UNSENT_BYTES_MAX
        ):
            return 0
        self.next_id = stream_id + 2
        flow_control.window -= length
        self.open(stream_id, opened, data[start:after])
        return after

    def open(self, stream_id: int, route: ResolvedRoute, body: bytes | None) -> None:
        """Opens a stream. ``body`` is the whole request body, or None if it is still to arrive."""
        send_window = self.frame_writer.stream_window
        receive_window = self.flow_control.stream_window
        stream = Stream(self, stream_id, send_window, receive_window, body is not None)
        if body is None:
            stream.missing_bytes = route.content_length
        self.streams[stream_id] = stream
        handler = route.make_handler(stream)
        if stream.is_sent:
            self.spend_turn(HEADERS_ONLY_WORK)
            return
        stream.handler = handler
        if body is not None:
            handler.receive(body, True)

    def _check_order(self, kind: int, flags: int) -> None:
        """Raises ProtocolViolation if the frame is not of ``required_frame_type``."""
        if self.required_frame_type == SETTINGS:
            if kind != SETTINGS or flags & ACK:
                raise violation("the first frame is not SETTINGS")
            self.required_frame_type = None
        elif kind != self.required_frame_type:
            raise violation("another frame within a header block")

    def spend(self, what: str, nbytes: int = 0, bucket: TokenBucket | None = None) -> None:
        """Takes work units from the event-loop iteration, and tokens from ``bucket``, by default
        the one of frames without a request.

        Args:
            what: kind of the frame, in the plural.
            nbytes: bytes of its payload that take time to process.

        Raises:
            ProtocolViolation: the bucket is empty, as the client has sent too many ``what``.
        """
        count = 1 + nbytes // ABUSE_BYTES
        self._turn_left -= count * ABUSE_WORK
        if not (bucket or self._abuse_budget).try_take(count):
            raise ProtocolViolation(ErrorCode.ENHANCE_YOUR_CALM, f"too many {what}")

    def spend_turn(self, work: int) -> None:
        """Takes ``work`` units from the budget of this event-loop iteration (WORK_PER_TURN)."""
        self._turn_left -= work

    def was_opened(self, stream_id: int) -> bool:
        """Returns whether ``stream_id`` is or was an open stream, or was skipped."""
        return 0 < stream_id < self.next_id and stream_id & 1 == 1

    # Ends

    def sent(self, stream: Stream) -> None:
        """Schedules output after ``stream`` has written; removes it if its response has ended."""
        if stream.is_sent and stream.id in self.streams:
            if not stream.is_received:
                self.closed_streams.discard_rest(stream.id)
            self._forget(stream)
        self.on_output()

    def response_queued(self, stream: Stream) -> None:
        """Ends ``stream`` after its complete response was written; a faster ``sent``."""
        has_window = stream.held_bytes or stream.granted_bytes
        stream.is_sent = True
        if stream.is_received and self.streams_max and not has_window:
            # Most streams end here: nothing else refers to them.
            stream.handler = NULL_HANDLER
            del self.streams[stream.id]
            if self.frame_writer.out:
                self.on_output()
        else:
            self.sent(stream)

    def cancel(self, stream: Stream, code: ErrorCode) -> None:
        """Resets ``stream`` without calling its handler."""
        if stream.id in self.streams:
            self._forget(stream)
            self.closed_streams.reset(stream.id, code)
            self.on_output()

    def reset(self, stream_id: int, what: str) -> None:
        """Ends a stream without a response. It counts as one of too many ``what``."""
        self.spend(what, bucket=self._resets)
        stream = self.streams.get(stream_id)
        if stream is not None:
            self._forget(stream).reset()

    def _forget(self, stream: Stream) -> Handler:
        """Removes a stream and returns its handler.

        The stream drops its reference to the handler. Handlers refer to their streams, and such a
        cycle would live until the next garbage collection.
        """
        del self.streams[stream.id]
        stream.is_sent = True
        handler, stream.handler = stream.handler, NULL_HANDLER
        if stream.held_bytes or stream.granted_bytes:
            self.flow_control.forget(stream)
        if stream.unsent:
            self.frame_writer.forget(stream)
        if not (self.streams_max or self.streams):
            self.finish()
        return handler

    def finish(self) -> None:
        """Ends the connection once every request is answered.

        Streams whose request is still incomplete are reset now, because grpcio discards a complete
        response if the connection closes while its stream is half open.
        """
        self.closed_streams.reset_incomplete()
        self.is_over = True

    def check_time(self, now_s: float) -> None:
        """Ends streams, or the connection, past their time limits; called every CHECK_S."""
        self.flow_control.check_time(now_s)
        if self.closed_streams.check_time():
            self.on_output()
        if self.frame_writer.stuck_s(now_s) > UNSENT_S_MAX:
            self.end(ErrorCode.ENHANCE_YOUR_CALM, "no window for the answers")
            return
        for stream in list(self.frame_writer.blocked_streams.values()):
            if now_s - stream.blocked_since_s > UNSENT_S_MAX:
                handler = stream.handler
                self.cancel(stream, ErrorCode.CANCEL)
                handler.reset()
        for stream in list(self.streams.values()):
            stream.handler.check_time(now_s)

    def end(self, code: ErrorCode, reason: str = "") -> None:
        """Ends the connection immediately with GOAWAY; its open streams are dropped."""
        if not self.is_over:
            self.frame_writer.out.append(frames.goaway(max(0, self.next_id - 2), code, reason))
        self.close()
        self.on_output()

    def close(self) -> None:
        """Releases all streams and buffers after the connection is lost or ended."""
        self.is_over = True
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.is_sent = True
            self.flow_control.forget(stream)
            self.frame_writer.forget(stream)
            handler, stream.handler = stream.handler, NULL_HANDLER
            handler.reset()
        self.flow_control.close()
        self._left = self._requests.block = b""
        self.blocks.clear()
        self.has_more = False
