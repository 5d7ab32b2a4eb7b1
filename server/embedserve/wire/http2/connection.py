"""An HTTP/2 connection of a server, without I/O: what its bytes mean, and what is wrong with them.

``receive`` takes what came; what is to be sent lies in ``sender.out``. A request whose header block
is whole becomes a stream with a handler, which is told of its body and answers it. The states and
errors are those of RFC 9113, sections 5.1, 5.4 and 6.
"""

from __future__ import annotations

from collections.abc import Callable

from embedserve.access.authenticator import Certificate
from embedserve.wire.http2 import frames
from embedserve.wire.http2.closed_streams import ClosedStreams
from embedserve.wire.http2.control import DRAIN_PING, ControlFrames
from embedserve.wire.http2.frame_writer import FrameWriter
from embedserve.wire.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_BYTES_MAX,
    HEAD,
    HEAD_BYTES,
    HEADERS,
    PREFACE,
    RUN_FRAME_BYTES_MIN,
    SETTINGS,
    STREAM_MASK,
    ErrorCode,
    ProtocolViolation,
    StreamError,
    run_of_data,
    violation,
)
from embedserve.wire.http2.header_blocks import HeaderBlocks
from embedserve.wire.http2.inbound_flow_control import STREAM_WINDOW, WINDOW_LOW, InboundFlowControl
from embedserve.wire.http2.request_frames import UNSENT_BYTES_MAX, RequestFrames
from embedserve.wire.http2.route_resolver import OpenRequest, ResolvedRoute
from embedserve.wire.http2.stream import NULL_HANDLER, Handler, Stream
from embedserve.wire.http2.token_bucket import TokenBucket
from embedserve.wire.http2.upload_budget import UploadBudget

STREAMS_MAX = 128
HEADER_LIST_BYTES_MAX = 16 << 10
WORK_PER_TURN = 32 << 10
"""Of decoded header blocks, in bytes as HPACK counts them, and of what asks nothing: after it, some
milliseconds, it is others' turn."""
FRAMES_PER_TURN = 512
"""Of any kind: those of as many requests as there may be at once, and more."""
IDLE_WORK = 1024
"""Of one frame that asks nothing: the stream that a reset ends was opened for it."""
UNREAD_S_MAX = 30.0
"""How long an answer may wait for its client to read, or to give it a window."""
IDLE_BYTES = 64
"""Of a frame that asks nothing, which cost as much as a short one."""
MAX_STREAM_ID = 2**31 - 1


class Http2Connection:
    """One connection, from its preface to its end.

    Attributes:
        sender, receiver: its halves.
        abuse_budget: what the client may send that asks nothing.
        blocks: reads its header blocks.
        streams: that are open, by their number.
        streams_max: that may be; 0 once no more are taken.
        next_id: the lowest number that the client has not opened or passed over.
        ended: streams that were open.
        expected: the type that the next frame has to be of: the client's settings come first, and
            nothing within a header block; None: any.
        certificate: that the client has shown.
        peer: address of the other end.
        is_over: nothing is to be read any more; what is in ``sender.out`` is the last.
        has_more: bytes are left that are to be read after other connections had their turn.
    """

    __slots__ = (
        "_control",
        "_is_draining",
        "_left",
        "_on_output",
        "_preface_left",
        "_requests",
        "_resets",
        "_turn_left",
        "abuse_budget",
        "blocks",
        "certificate",
        "ended",
        "flow_control",
        "frame_writer",
        "has_more",
        "is_over",
        "next_id",
        "peer",
        "required_frame_type",
        "streams",
        "streams_max",
    )

    def __init__(
        self, open_request: OpenRequest, uploads: UploadBudget, on_output: Callable[[], None]
    ) -> None:
        """
        Args:
            open_request: makes of a request's headers what opens its handler.
            uploads: the room for large bodies.
            on_output: called when there is something to send.
        """
        self.frame_writer = FrameWriter()
        self.flow_control = InboundFlowControl(self.frame_writer.out, uploads, on_output)
        self.streams: dict[int, Stream] = {}
        self.certificate: Certificate | None = None
        self.peer = ""
        self.is_over = False
        self.has_more = False
        self._on_output = on_output
        self.blocks: HeaderBlocks[ResolvedRoute | str] = HeaderBlocks(open_request)
        self._left = b""
        self._preface_left = PREFACE
        self.next_id = 1
        self.ended = ClosedStreams(self.frame_writer.out)
        self.required_frame_type: int | None = SETTINGS
        self._turn_left = 0
        self.streams_max = STREAMS_MAX
        self._is_draining = False
        self._resets = TokenBucket()
        self.abuse_budget = TokenBucket()
        self._control = ControlFrames(self)
        self._requests = RequestFrames(self)
        self.frame_writer.out.append(
            frames.settings(
                (frames.SETTINGS_MAX_CONCURRENT_STREAMS, STREAMS_MAX),
                (frames.SETTINGS_INITIAL_WINDOW_SIZE, STREAM_WINDOW),
                (frames.SETTINGS_MAX_HEADER_LIST_SIZE, HEADER_LIST_BYTES_MAX),
            )
        )
        self.flow_control.top_up()

    def receive(self, data: bytes) -> None:
        """Takes what came. With b"" goes on with what was left for later."""
        if self.is_over:
            return
        if self._left:
            data = self._left + data
            self.has_more = False
        self._turn_left = WORK_PER_TURN
        try:
            if self._preface_left:
                data = self._read_preface(data)
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
        """Whether the preface and the client's settings have come."""
        return self.required_frame_type != SETTINGS

    @property
    def left_bytes(self) -> int:
        """Of what came and is to be read later."""
        return len(self._left)

    def _read_preface(self, data: bytes) -> bytes:
        count = min(len(data), len(self._preface_left))
        if data[:count] != self._preface_left[:count]:
            raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "not the preface of HTTP/2")
        self._preface_left = self._preface_left[count:]
        return data[count:]

    def _read_frames(self, data: bytes) -> int:
        """Acts on the whole frames in ``data``; gives where they end."""
        position, end = 0, len(data)
        last_head = end - HEAD_BYTES
        unpack = HEAD.unpack_from
        for _ in range(FRAMES_PER_TURN):
            if position > last_head or self._turn_left <= 0:
                break
            upper, lower, kind, flags, stream_id = unpack(data, position)
            start = position + HEAD_BYTES
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
                if kind == DATA and not flags and after - start >= RUN_FRAME_BYTES_MIN:
                    payload, flags, position = run_of_data(data, start, after, stream_id)
                else:
                    payload, position = data[start:after], after
                stream_id &= STREAM_MASK
                if kind == DATA:
                    self._requests.on_data(stream_id, flags, payload)
                elif kind == HEADERS:
                    self._requests.on_headers(stream_id, flags, payload)
                elif kind == CONTINUATION:
                    self._requests.on_continuation(stream_id, flags, payload)
                else:
                    self._control.receive(kind, stream_id, flags, payload)
            except StreamError as error:
                self._end_stream(error)
            if self.is_over:
                return end
        else:
            self._turn_left = 0
        return position

    def _read_whole(self, stream_id: int, data: bytes, start: int, after: int, end: int) -> int:
        """Opens a stream for a request that has come whole, as most do: a header block that is
        known, at data[start:after], and one frame with all of its body. Gives where that ends, or
        0 for any other request."""
        opened = self.blocks.known.get(data[start:after])
        upper, lower, kind, flags, body_stream_id = HEAD.unpack_from(data, after)
        length = upper << 16 | lower
        start = after + HEAD_BYTES
        after = start + length
        receiver = self.flow_control
        if (
            type(opened) is not ResolvedRoute
            or (opened.content_length is not None and opened.content_length != length)
            or stream_id != self.next_id
            or body_stream_id != stream_id
            or flags != END_STREAM
            or kind != DATA
            or after > end
            or length > receiver.whole_bytes_max
            or length > receiver.window
            or len(self.streams) >= self.streams_max
            or self.frame_writer.unsent_bytes > UNSENT_BYTES_MAX
        ):
            return 0
        self.next_id = stream_id + 2
        receiver.window -= length
        self.open(stream_id, opened, data[start:after])
        return after

    def open(self, stream_id: int, route: ResolvedRoute, body: bytes | None) -> None:
        """Opens a stream; ``body`` is all of its request's, or None where that is to come."""
        stream = Stream(
            self, stream_id, self.frame_writer.stream_window, self.flow_control.stream_window
        )
        if body is None:
            stream.missing_bytes = route.content_length
        else:
            stream.is_received = True
        self.streams[stream_id] = stream
        handler = route.open(stream)
        if not stream.is_sent:
            stream.handler = handler
            if body is not None:
                handler.receive(body, True)

    def _check_order(self, kind: int, flags: int) -> None:
        """Raises ProtocolViolation for another frame than is expected."""
        if self.required_frame_type == SETTINGS:
            if kind != SETTINGS or flags & ACK:
                raise violation("the first frame is not SETTINGS")
            self.required_frame_type = None
        elif kind != self.required_frame_type:
            raise violation("another frame within a header block")

    def spend(self, bucket: TokenBucket, what: str, nbytes: int = 0) -> None:
        """Raises ProtocolViolation where the client has done ``what`` too often."""
        count = 1 + nbytes // IDLE_BYTES
        self._turn_left -= count * IDLE_WORK
        if not bucket.try_take(count):
            raise ProtocolViolation(ErrorCode.ENHANCE_YOUR_CALM, f"too many {what}")

    def spend_turn(self, work: int) -> None:
        """Takes so much of what a connection may do before others have their turn."""
        self._turn_left -= work

    def was_opened(self, stream_id: int) -> bool:
        """Whether there is or was a stream of that number."""
        return 0 < stream_id < self.next_id and stream_id & 1 == 1

    # Ends

    def sent(self, stream: Stream) -> None:
        """Something of ``stream`` is to be written; if that was its end, it is forgotten."""
        if stream.is_sent and stream.id in self.streams:
            if not stream.is_received:
                self.ended.leave_unread(stream.id)
            self._forget(stream)
        self._on_output()

    def answered(self, stream: Stream) -> None:
        """As sent, of a whole answer, which ends its stream."""
        if stream.is_received and self.streams_max and not stream.held_bytes:
            # What most streams are: nothing is left of them.
            stream.is_sent = True
            stream.handler = NULL_HANDLER
            del self.streams[stream.id]
            if self.frame_writer.out:
                self._on_output()
        else:
            stream.is_sent = True
            self.sent(stream)

    def cancel(self, stream: Stream, code: ErrorCode) -> None:
        if stream.id in self.streams:
            self._forget(stream)
            self.ended.reset(stream.id, code)
            self._on_output()

    def reset_by_client(self, stream_id: int) -> None:
        """The client ended a stream."""
        self.spend(self._resets, "resets")
        self.ended.forget(stream_id)
        stream = self.streams.get(stream_id)
        if stream is not None:
            self._forget(stream).reset()

    def _end_stream(self, error: StreamError) -> None:
        stream = self.streams.get(error.stream_id)
        self.spend(self._resets, "streams in error")
        if stream is not None:
            self._forget(stream).reset()
        self.ended.reset(error.stream_id, error.code)

    def _forget(self, stream: Stream) -> Handler:
        """Ends a stream; gives its handler, which has it no more: handlers hold their streams, and
        such circles live until garbage is collected."""
        del self.streams[stream.id]
        stream.is_sent = True
        handler, stream.handler = stream.handler, NULL_HANDLER
        if stream.held_bytes or stream.granted_bytes:
            self.flow_control.forget(stream)
        if stream.unsent:
            self.frame_writer.forget(stream)
        if not (self.streams_max or self.streams):
            self._finish()
        return handler

    def _finish(self) -> None:
        """All was answered. Whose request goes on is told so now: grpcio drops a whole answer whose
        stream is half open as the connection ends."""
        self.ended.reset_unread()
        self.is_over = True

    def check_time(self, now_s: float) -> None:
        """Ends what takes too long; called now and then."""
        self.flow_control.check_time(now_s)
        if self.ended.check_time():
            self._on_output()
        if self.frame_writer.stuck_s(now_s) > UNREAD_S_MAX:
            self.end(ErrorCode.ENHANCE_YOUR_CALM, "no window for the answers")
            return
        for stream in list(self.frame_writer.blocked_streams.values()):
            if now_s - stream.parked_s > UNREAD_S_MAX:
                handler = stream.handler
                self.cancel(stream, ErrorCode.CANCEL)
                handler.reset()
        for stream in list(self.streams.values()):
            stream.handler.check_time(now_s)

    def send_goaway(self) -> None:
        """Tells the client to open no more streams; those that are on their way are taken, and all
        go on."""
        if self.streams_max and not self.is_over:  # else it was told which is the last
            self.frame_writer.out.append(frames.goaway(MAX_STREAM_ID, ErrorCode.NO_ERROR))
            self.frame_writer.out.append(frames.ping(DRAIN_PING))
            self._on_output()

    def start_drain(self) -> None:
        """As say_goaway, and has streams end once they have answered what they took."""
        self._is_draining = True
        self.send_goaway()
        self._drain_streams()
        self._on_output()

    def _drain_streams(self) -> None:
        for stream in list(self.streams.values()):
            stream.handler.drain()

    def finish_drain(self) -> None:
        """Takes no more streams, and is over when the last has ended."""
        if self.is_over or not self.streams_max:
            return
        self.streams_max = 0
        self.frame_writer.out.append(frames.goaway(max(0, self.next_id - 2), ErrorCode.NO_ERROR))
        if self._is_draining:
            self._drain_streams()
        if not self.streams:
            self._finish()
        self._on_output()

    def end(self, code: ErrorCode, reason: str = "") -> None:
        """Ends the connection now; what its streams wait for is dropped."""
        if not self.is_over:
            self.frame_writer.out.append(frames.goaway(max(0, self.next_id - 2), code, reason))
        self.close()
        self._on_output()

    def close(self) -> None:
        """The connection is gone."""
        self.is_over = True
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.is_sent = True
            self.flow_control.forget(stream)
            self.frame_writer.forget(stream)
            handler, stream.handler = stream.handler, NULL_HANDLER
            handler.reset()
        self.flow_control.close()
        self._left = b""
        self._requests.close()
        self.has_more = False
