"""Processing of control frames: settings, pings, window updates, resets and priorities."""

from __future__ import annotations

from typing import TYPE_CHECKING

from embedserve.wire.http2 import frames
from embedserve.wire.http2.frame_writer import FRAME_BYTES_SENT_MAX
from embedserve.wire.http2.frames import (
    ACK,
    GOAWAY,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    STREAM_MASK,
    ErrorCode,
    ProtocolViolation,
    StreamError,
    read_settings,
    violation,
)
from embedserve.wire.http2.graceful_shutdown import DRAIN_PING
from embedserve.wire.http2.inbound_flow_control import STREAM_WINDOW
from embedserve.wire.http2.token_bucket import ResponseTokenBucket

if TYPE_CHECKING:
    from embedserve.wire.http2.connection import Http2Connection

STREAMS_MAX = 128
"""Streams that a client may have open on a connection, as the server's SETTINGS announce."""
HEADER_LIST_BYTES_MAX = 16 << 10
"""Bytes of a request's decoded headers, plus 32 each, as SETTINGS announce; more are rejected."""
UPDATES_PER_FRAME = 4
"""WINDOW_UPDATE frames accepted per DATA frame, or other last frame of a response. A reader sends
two: one for the stream and one for the connection. gRPC's clients send one with each call."""


class ControlFrames:
    """Validates and processes the control frames of one connection."""

    def __init__(self, connection: Http2Connection) -> None:
        self._connection = connection
        self._frame_writer = connection.frame_writer
        self._updates = ResponseTokenBucket(connection.frame_writer, UPDATES_PER_FRAME)
        self._on_frame = {
            PRIORITY: self._on_priority,
            RST_STREAM: self._on_rst_stream,
            SETTINGS: self._on_settings,
            PUSH_PROMISE: self._on_push_promise,
            PING: self._on_ping,
            GOAWAY: self._on_goaway,
        }

    def send_settings(self) -> None:
        """Sends the SETTINGS frame that begins the connection."""
        self._frame_writer.out.append(
            frames.settings(
                (frames.SETTINGS_MAX_CONCURRENT_STREAMS, STREAMS_MAX),
                (frames.SETTINGS_INITIAL_WINDOW_SIZE, STREAM_WINDOW),
                (frames.SETTINGS_MAX_HEADER_LIST_SIZE, HEADER_LIST_BYTES_MAX),
            )
        )

    def receive(self, kind: int, stream_id: int, flags: int, payload: bytes) -> None:
        """Processes a frame other than WINDOW_UPDATE; frames of unknown types are ignored.

        Raises:
            ProtocolViolation: a connection error.
            StreamError: a stream error.
        """
        if kind != RST_STREAM:
            # A SETTINGS frame may hold many settings; the payload of other frames is not parsed.
            nbytes = len(payload) if kind == SETTINGS else 0
            self._connection.spend("frames that ask nothing", nbytes)
        act = self._on_frame.get(kind)
        if act is not None:
            act(stream_id, flags, payload)

    def _on_push_promise(self, stream_id: int, flags: int, payload: bytes) -> None:
        raise violation("PUSH_PROMISE of a client")

    def _on_priority(self, stream_id: int, flags: int, payload: bytes) -> None:
        """Validates a PRIORITY frame, which is otherwise ignored."""
        if stream_id == 0:
            raise violation("PRIORITY of no stream")
        if len(payload) != 5:
            raise self._error(stream_id, ErrorCode.FRAME_SIZE_ERROR, "PRIORITY is 5 bytes")
        if int.from_bytes(payload[:4], "big") & STREAM_MASK == stream_id:
            raise self._error(stream_id, ErrorCode.PROTOCOL_ERROR, "a stream depends on itself")

    def _error(self, stream_id: int, code: ErrorCode, reason: str) -> Exception:
        """Returns a stream error, or a connection error if the stream was never opened."""
        if self._connection.was_opened(stream_id):
            return StreamError(stream_id, code, reason)
        return ProtocolViolation(code, reason)

    def _on_rst_stream(self, stream_id: int, flags: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ProtocolViolation(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM is 4 bytes")
        if not self._connection.was_opened(stream_id):
            raise violation(f"RST_STREAM of stream {stream_id}, which was not opened")
        self._connection.reset(stream_id, "resets")
        self._connection.closed_streams.forget(stream_id)

    def _on_settings(self, stream_id: int, flags: int, payload: bytes) -> None:
        if stream_id:
            raise violation("SETTINGS of a stream")
        settings = read_settings(flags, payload)
        if flags & ACK:
            self._connection.flow_control.apply_acknowledged(self._connection.streams.values())
            return
        window = self._frame_writer.stream_window
        for number, value in settings:
            if number == frames.SETTINGS_INITIAL_WINDOW_SIZE:
                window = value
            elif number == frames.SETTINGS_MAX_FRAME_SIZE:
                self._frame_writer.frame_bytes_max = min(value, FRAME_BYTES_SENT_MAX)
        if window != self._frame_writer.stream_window:
            # Applied once per frame, even if the frame repeats the setting: many streams may be
            # open.
            change = window - self._frame_writer.stream_window
            self._frame_writer.stream_window = window
            for stream in list(self._connection.streams.values()):
                self._frame_writer.open_window(stream, change)
        self._frame_writer.out.append(frames.SETTINGS_ACK)

    def _on_ping(self, stream_id: int, flags: int, payload: bytes) -> None:
        if stream_id:
            raise violation("PING of a stream")
        if len(payload) != 8:
            raise ProtocolViolation(ErrorCode.FRAME_SIZE_ERROR, "PING is 8 bytes")
        if not flags & ACK:
            self._frame_writer.out.append(frames.ping(payload, ACK))
        elif payload == DRAIN_PING:
            self._connection.shutdown.finish()

    def _on_goaway(self, stream_id: int, flags: int, payload: bytes) -> None:
        if stream_id:
            raise violation("GOAWAY of a stream")
        if len(payload) < 8:
            raise ProtocolViolation(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY of under 8 bytes")

    def on_window_update(self, stream_id: int, payload: bytes) -> None:
        """Processes a WINDOW_UPDATE frame.

        Raises:
            ProtocolViolation: a connection error.
            StreamError: a stream error.
        """
        if len(payload) != 4:
            raise ProtocolViolation(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE is 4 bytes")
        stream = self._connection.streams.get(stream_id) if stream_id else None
        if stream_id and stream is None and not self._connection.was_opened(stream_id):
            raise violation(f"WINDOW_UPDATE of stream {stream_id}, which was not opened")
        if not self._updates.try_take():
            raise ProtocolViolation(ErrorCode.ENHANCE_YOUR_CALM, "too many updates of windows")
        increment = int.from_bytes(payload, "big") & STREAM_MASK
        if increment == 0:
            if not stream_id:
                raise violation("WINDOW_UPDATE of 0")
            raise StreamError(stream_id, ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")
        if stream_id and stream is None:
            return  # the stream has ended
        try:
            self._frame_writer.open_window(stream, increment)
        except ProtocolViolation as error:
            if stream is None:
                raise
            raise StreamError(stream_id, error.code, error.reason) from error
