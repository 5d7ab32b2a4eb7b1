"""Processing of the frames that carry requests: HEADERS, CONTINUATION and DATA.

A complete header block opens a stream, or ends the request of an open stream as trailers. DATA
payloads go to the stream's handler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from embedserve.wire.http2.frames import (
    CONTINUATION,
    END_HEADERS,
    END_STREAM,
    HAS_PRIORITY,
    PADDED,
    STREAM_MASK,
    ErrorCode,
    ProtocolViolation,
    StreamError,
    violation,
    without_padding,
)
from embedserve.wire.http2.request_headers import wrong_header
from embedserve.wire.http2.stream import Stream
from embedserve.wire.http_stream import Headers

if TYPE_CHECKING:
    from embedserve.wire.http2.connection import Http2Connection

BLOCK_BYTES_MAX = 16 << 10
"""Bytes of a compressed header block; a larger block ends the connection."""
UNSENT_BYTES_MAX = 64 << 20
"""Bytes of unsent responses on a connection; above it new streams are rejected."""


class RequestFrames:
    """Validates and processes the request frames of one connection.

    Attributes:
        block: fragments of an incomplete header block, joined.

    Every method that takes a frame raises:
        ProtocolViolation: a connection error.
        StreamError: a stream error.
    """

    __slots__ = (
        "_block_head",
        "_connection",
        "_flow_control",
        "block",
    )

    def __init__(self, connection: Http2Connection) -> None:
        self._connection = connection
        self._flow_control = connection.flow_control
        self.block = b""
        self._block_head = (0, 0)  # stream identifier and flags of its HEADERS frame

    def on_headers(self, stream_id: int, flags: int, payload: bytes) -> None:
        if flags & ~END_STREAM == END_HEADERS and stream_id & 1:
            self._on_block(stream_id, flags, payload)
            return
        if not stream_id & 1:
            raise violation(f"HEADERS on stream {stream_id}, which no client opens")
        if flags & (PADDED | HAS_PRIORITY):
            payload = without_padding(payload, flags)
            if flags & HAS_PRIORITY:
                payload = self._without_priority(stream_id, payload)
        if flags & END_HEADERS:
            self._on_block(stream_id, flags, payload)
        else:
            self.block = payload
            self._block_head = (stream_id, flags)
            self._connection.required_frame_type = CONTINUATION
            self._check_block()

    def _without_priority(self, stream_id: int, payload: bytes) -> bytes:
        if len(payload) < 5:
            raise ProtocolViolation(ErrorCode.FRAME_SIZE_ERROR, "HEADERS too short for a priority")
        if int.from_bytes(payload[:4], "big") & STREAM_MASK == stream_id:
            # The block must still be decoded to keep the HPACK state for later blocks.
            self._decode(payload[5:])
            self._connection.next_id = max(self._connection.next_id, stream_id + 2)
            raise StreamError(stream_id, ErrorCode.PROTOCOL_ERROR, "a stream depends on itself")
        return payload[5:]

    def on_continuation(self, stream_id: int, flags: int, payload: bytes) -> None:
        connection = self._connection
        if connection.required_frame_type != CONTINUATION or stream_id != self._block_head[0]:
            raise violation("CONTINUATION without its HEADERS")
        connection.spend("CONTINUATION frames")
        self.block += payload
        self._check_block()
        if flags & END_HEADERS:
            block, self.block = self.block, b""
            connection.required_frame_type = None
            self._on_block(stream_id, self._block_head[1], block)

    def _check_block(self) -> None:
        if len(self.block) > BLOCK_BYTES_MAX:
            raise ProtocolViolation(
                ErrorCode.ENHANCE_YOUR_CALM, f"a header block of over {BLOCK_BYTES_MAX} bytes"
            )

    def _on_block(self, stream_id: int, flags: int, block: bytes) -> None:
        """Processes a complete header block: it opens a stream, or ends a request as trailers."""
        connection = self._connection
        if stream_id < connection.next_id:
            self._on_later_block(stream_id, flags, block)
            return
        if stream_id != connection.next_id:
            connection.closed_streams.record_skipped(connection.next_id, stream_id)
        connection.next_id = stream_id + 2
        opened = connection.blocks.cached.get(block)
        if opened is None:
            opened = connection.blocks.read(block)
            connection.spend_turn(connection.blocks.work)
        if (
            len(connection.streams) >= connection.streams_max
            or connection.frame_writer.unsent_bytes > UNSENT_BYTES_MAX
        ):
            connection.spend("streams over the limit")
            connection.closed_streams.reset(stream_id, ErrorCode.REFUSED_STREAM)
            return
        if isinstance(opened, str):
            raise StreamError(stream_id, ErrorCode.PROTOCOL_ERROR, opened)
        if not flags & END_STREAM:
            connection.open(stream_id, opened, None)
        elif opened.content_length:
            raise StreamError(stream_id, ErrorCode.PROTOCOL_ERROR, "a body is missing")
        else:
            connection.open(stream_id, opened, b"")

    def _on_later_block(self, stream_id: int, flags: int, block: bytes) -> None:
        """Processes HEADERS on a stream that is open, closed, or was skipped."""
        stream = self._connection.streams.get(stream_id)
        if stream is not None:
            self._on_trailers(stream, flags, block)
            return
        self._connection.closed_streams.discard_headers(stream_id, flags)
        self._connection.spend("HEADERS on streams that were reset", len(block))
        self._decode(block)

    def _decode(self, block: bytes) -> Headers:
        headers = self._connection.blocks.decode(block)
        self._connection.spend_turn(self._connection.blocks.work)
        return headers

    def _on_trailers(self, stream: Stream, flags: int, block: bytes) -> None:
        headers = self._decode(block)
        if stream.is_received:
            raise StreamError(stream.id, ErrorCode.STREAM_CLOSED, "HEADERS after the request's end")
        if not flags & END_STREAM:
            raise StreamError(stream.id, ErrorCode.PROTOCOL_ERROR, "HEADERS within a body")
        if any(name.startswith(b":") or wrong_header(name, value) for name, value in headers):
            raise StreamError(stream.id, ErrorCode.PROTOCOL_ERROR, "malformed trailers")
        _end_body(stream)
        stream.handler.receive(b"", True)

    def on_data(self, stream_id: int, flags: int, payload: bytes) -> None:
        length, flow_control = len(payload), self._flow_control
        stream = self._connection.streams.get(stream_id)
        if (
            flags == END_STREAM
            and stream is not None
            and length <= stream.receive_window
            and length <= flow_control.window
            and not (stream.is_received or stream.held_bytes)
            and (stream.missing_bytes is None or stream.missing_bytes == length)
        ):
            # Fast path of most requests: the whole body goes directly to the handler and is never
            # counted in held_bytes.
            flow_control.window -= length
            stream.is_received = True
            stream.handler.receive(payload, True)
            return
        flow_control.take(length)
        if flags & PADDED:
            payload = without_padding(payload, flags)
        if stream is None:
            self._on_late_data(stream_id, flags, length)
            return
        if stream.is_received:
            raise StreamError(stream_id, ErrorCode.STREAM_CLOSED, "DATA after the request's end")
        nbytes = len(payload)
        flow_control.hold(stream, length, nbytes)
        if stream.missing_bytes is not None:
            stream.missing_bytes -= nbytes
            if stream.missing_bytes < 0:
                raise StreamError(stream_id, ErrorCode.PROTOCOL_ERROR, "more body than declared")
        if flags & END_STREAM:
            _end_body(stream)
            stream.handler.receive(payload, True)
        else:
            if not nbytes:
                self._connection.spend("empty DATA frames")
            stream.handler.receive(payload, False)

    def _on_late_data(self, stream_id: int, flags: int, length: int) -> None:
        """Processes DATA on a stream that is not open."""
        connection = self._connection
        if not connection.was_opened(stream_id):
            raise violation(f"DATA on stream {stream_id}, which is not open")
        if not (length and connection.closed_streams.may_be_in_flight(stream_id)):
            connection.spend("DATA on streams that ended")
        connection.closed_streams.discard_data(stream_id, flags, length)


def _end_body(stream: Stream) -> None:
    if stream.missing_bytes:
        raise StreamError(stream.id, ErrorCode.PROTOCOL_ERROR, "less body than declared")
    stream.is_received = True
