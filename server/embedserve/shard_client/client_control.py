"""Control frames that a shard sends: settings, pings, window updates, resets and GOAWAY."""

from __future__ import annotations

from typing import TYPE_CHECKING

from embedserve.wire.http2 import frames
from embedserve.wire.http2.frames import (
    ACK,
    GOAWAY,
    PING,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    STREAM_MASK,
    WINDOW_MAX,
    WINDOW_UPDATE,
    ErrorCode,
    ProtocolViolation,
    StreamError,
    read_settings,
    violation,
)

if TYPE_CHECKING:
    from embedserve.shard_client.http2_client import Http2Client

FRAME_BYTES_SENT = 1 << 20
"""Bytes of the largest DATA payload that is sent, even if the shard allows larger frames."""
REASON_CHARACTERS_MAX = 200
"""Characters of a GOAWAY's text that are reported."""
PAYLOAD_BYTES = {RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}
CONNECTION_KINDS = {SETTINGS, PING, GOAWAY}
"""Frames that belong to no stream."""


class ClientControl:
    """Validates and processes the control frames of one connection."""

    def __init__(self, client: Http2Client) -> None:
        self._client = client
        self._on_frame = {
            RST_STREAM: self._on_rst_stream,
            SETTINGS: self._on_settings,
            PUSH_PROMISE: self._on_push_promise,
            PING: self._on_ping,
            GOAWAY: self._on_goaway,
            WINDOW_UPDATE: self._on_window_update,
        }

    def receive(self, kind: int, stream_id: int, flags: int, payload: bytes) -> None:
        """Processes a frame; frames of unknown types are ignored.

        Raises:
            ProtocolViolation: a connection error.
            StreamError: a stream error.
        """
        act = self._on_frame.get(kind)
        if act is None:
            return
        if len(payload) != PAYLOAD_BYTES.get(kind, len(payload)):
            reason = f"a frame of type {kind} has {len(payload)} bytes"
            raise ProtocolViolation(ErrorCode.FRAME_SIZE_ERROR, reason)
        if stream_id and kind in CONNECTION_KINDS:
            raise violation(f"a frame of type {kind} on stream {stream_id}")
        act(stream_id, flags, payload)

    def _on_push_promise(self, stream_id: int, flags: int, payload: bytes) -> None:
        raise violation("PUSH_PROMISE, which the client does not accept")

    def _on_rst_stream(self, stream_id: int, flags: int, payload: bytes) -> None:
        self._client.check_opened(stream_id, "RST_STREAM")
        self._client.reset_by_shard(stream_id, int.from_bytes(payload, "big"))

    def _on_settings(self, stream_id: int, flags: int, payload: bytes) -> None:
        settings = read_settings(flags, payload)
        if flags & ACK:
            return
        client = self._client
        window = client.stream_window
        for number, value in settings:
            if number == frames.SETTINGS_INITIAL_WINDOW_SIZE:
                window = value
            elif number == frames.SETTINGS_MAX_FRAME_SIZE:
                client.frame_bytes_max = min(value, FRAME_BYTES_SENT)
            elif number == frames.SETTINGS_MAX_CONCURRENT_STREAMS:
                client.streams_max = value
        self._change_windows(window - client.stream_window)
        client.write(frames.SETTINGS_ACK)
        client.begin()
        client.send_unsent()
        client.open_pending()

    def _change_windows(self, change: int) -> None:
        """Applies a new initial window to the streams that still send."""
        self._client.stream_window += change
        for stream in self._client.unsent:
            stream.send_window += change
            if stream.send_window > WINDOW_MAX:
                reason = "SETTINGS raise a window over 2^31 - 1"
                raise ProtocolViolation(ErrorCode.FLOW_CONTROL_ERROR, reason)

    def _on_ping(self, stream_id: int, flags: int, payload: bytes) -> None:
        if not flags & ACK:
            self._client.write(frames.ping(payload, ACK))

    def _on_goaway(self, stream_id: int, flags: int, payload: bytes) -> None:
        if len(payload) < 8:
            raise ProtocolViolation(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY of under 8 bytes")
        last_id = int.from_bytes(payload[:4], "big") & STREAM_MASK
        code = int.from_bytes(payload[4:8], "big")
        reason = "the shard closes the connection"
        if code:
            text = payload[8:].decode(errors="replace")[:REASON_CHARACTERS_MAX]
            reason += f" with code {code}: {text}"
        self._client.start_drain(reason, last_id)

    def _on_window_update(self, stream_id: int, flags: int, payload: bytes) -> None:
        client = self._client
        increment = int.from_bytes(payload, "big") & STREAM_MASK
        over = ErrorCode.FLOW_CONTROL_ERROR, "WINDOW_UPDATE raises a window over 2^31 - 1"
        if not stream_id:
            if not increment:
                raise violation("WINDOW_UPDATE of 0")
            client.window += increment
            if client.window > WINDOW_MAX:
                raise ProtocolViolation(*over)
            client.send_unsent()
            return
        client.check_opened(stream_id, "WINDOW_UPDATE")
        if not increment:
            raise StreamError(stream_id, ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")
        stream = client.streams.get(stream_id)
        if stream is None or stream not in client.unsent:
            return  # the request has ended
        stream.send_window += increment
        if stream.send_window > WINDOW_MAX:
            raise StreamError(stream_id, *over)
        client.send_unsent()
