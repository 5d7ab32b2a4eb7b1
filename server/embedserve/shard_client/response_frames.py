"""Processing of the frames that carry responses: HEADERS, CONTINUATION and DATA.

Payloads of DATA go to their streams as they arrive, as views of the received bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from embedserve.shard_client.client_control import ClientControl
from embedserve.shard_client.reply import read_response_headers
from embedserve.wire.grpc.grpc_framing import PREFIX_BYTES
from embedserve.wire.http2 import frames
from embedserve.wire.http2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER,
    FRAME_HEADER_BYTES,
    HAS_PRIORITY,
    HEADERS,
    PADDED,
    STREAM_MASK,
    ErrorCode,
    ProtocolViolation,
    StreamError,
    violation,
    without_padding,
)
from embedserve.wire.http2.header_blocks import LIST_BYTES_MAX, HeaderBlocks

if TYPE_CHECKING:
    from embedserve.shard_client.http2_client import Http2Client

CONNECTION_WINDOW = 64 << 20
"""Bytes of responses that a shard may send before the client returns window, which it does as soon
as half of them have arrived."""
FRAME_BYTES_ACCEPTED_MAX = 1 << 20
"""Bytes of the largest DATA frame accepted. Payloads are passed on as they arrive, so a large frame
needs no buffer."""


class ResponseFrames:
    """Reads the frames of one connection."""

    def __init__(self, client: Http2Client, message_bytes_max: int) -> None:
        """
        Args:
            message_bytes_max: limit of a response message with its prefix; a larger one fails its
                call.
        """
        self._client = client
        self._control = ClientControl(client)
        self._message_bytes_max = message_bytes_max
        self._blocks = HeaderBlocks(read_response_headers)
        self._left = b""
        self._block: bytearray | None = None  # the beginning of one that is continued
        self._block_head = (0, 0)  # stream identifier and flags of its HEADERS
        self._cut = (0, 0, 0)  # stream identifier, flags and missing bytes of a DATA frame
        self._window = CONNECTION_WINDOW

    def receive(self, data: bytes) -> None:
        """Processes received bytes, and returns window to the shard.

        Raises:
            ProtocolViolation: the shard violates the protocol.
        """
        if self._left:
            data = self._left + data
        end = self._read_frames(data)
        self._left = data[end:] if end < len(data) else b""
        if self._window <= CONNECTION_WINDOW // 2 and not self._client.is_closed:
            self._client.write(frames.window_update(0, CONNECTION_WINDOW - self._window))
            self._window = CONNECTION_WINDOW

    def _read_frames(self, data: bytes) -> int:
        """Processes the frames in ``data``. Returns the position where the processed bytes end."""
        client, view, end = self._client, memoryview(data), len(data)
        position = self._continue_data(view) if self._cut[2] else 0
        last_head, unpack = end - FRAME_HEADER_BYTES, FRAME_HEADER.unpack_from
        while position <= last_head and not client.is_closed:
            upper, lower, kind, flags, stream_id = unpack(data, position)
            start = position + FRAME_HEADER_BYTES
            length = upper << 16 | lower
            after = start + length
            stream_id &= STREAM_MASK
            if not client.is_begun or self._block is not None:
                self._check_order(kind, flags)
            limit = FRAME_BYTES_ACCEPTED_MAX if kind == DATA else LIST_BYTES_MAX
            if length > limit:
                reason = f"a frame has {length} bytes, the most is {limit}"
                raise ProtocolViolation(ErrorCode.FRAME_SIZE_ERROR, reason)
            try:
                if kind == DATA and not flags & PADDED:
                    self._take_window(length)
                    if after > end:
                        self._cut = stream_id, flags, after - end
                        self._on_data(stream_id, 0, view[start:])
                        return end
                    self._on_data(stream_id, flags, view[start:after])
                elif after > end:
                    return position
                elif kind == HEADERS:
                    self._on_headers(stream_id, flags, data[start:after])
                elif kind == CONTINUATION:
                    self._on_continuation(stream_id, flags, data[start:after])
                elif kind == DATA:
                    self._on_padded_data(stream_id, flags, data[start:after])
                else:
                    self._control.receive(kind, stream_id, flags, data[start:after])
            except StreamError as error:
                client.fail_stream(error)
            position = after
        return min(position, end)

    def _check_order(self, kind: int, flags: int) -> None:
        if self._block is not None:
            if kind != CONTINUATION:
                raise violation("another frame within a header block")
        elif kind != frames.SETTINGS or flags & frames.ACK:
            raise violation("the first frame is not SETTINGS")

    def _take_window(self, nbytes: int) -> None:
        self._window -= nbytes
        if self._window < 0:
            reason = "DATA beyond the connection's window"
            raise ProtocolViolation(ErrorCode.FLOW_CONTROL_ERROR, reason)

    def _continue_data(self, view: memoryview) -> int:
        """Processes the next bytes of a DATA frame that was cut. Returns their number."""
        stream_id, flags, missing = self._cut
        nbytes = min(missing, len(view))
        self._cut = stream_id, flags, missing - nbytes
        try:
            self._on_data(stream_id, flags if nbytes == missing else 0, view[:nbytes])
        except StreamError as error:
            self._client.fail_stream(error)
        return nbytes

    def _on_padded_data(self, stream_id: int, flags: int, payload: bytes) -> None:
        self._take_window(len(payload))
        body = without_padding(payload, flags)
        if stream_id in self._client.streams and not flags & END_STREAM:
            # A stream's window has room for the message, but not for padding.
            self._client.write(frames.window_update(stream_id, len(payload) - len(body)))
        self._on_data(stream_id, flags, memoryview(body))

    def _on_data(self, stream_id: int, flags: int, chunk: memoryview) -> None:
        stream = self._client.streams.get(stream_id)
        if stream is None:
            self._client.check_opened(stream_id, "DATA")
            return
        stream.append(chunk)
        if stream.nbytes > self._message_bytes_max:
            limit = self._message_bytes_max - PREFIX_BYTES
            reason = f"the response has over {limit} bytes"
            raise StreamError(stream_id, ErrorCode.CANCEL, reason)
        if flags & END_STREAM:
            self._client.end(stream, stream.on_end())

    def _on_headers(self, stream_id: int, flags: int, payload: bytes) -> None:
        if flags & (PADDED | HAS_PRIORITY):
            payload = without_padding(payload, flags)
            if flags & HAS_PRIORITY:
                payload = payload[5:]
        if flags & END_HEADERS:
            self._on_block(stream_id, flags, payload)
        else:
            self._client.check_opened(stream_id, "HEADERS")
            self._block = bytearray(payload)
            self._block_head = stream_id, flags

    def _on_continuation(self, stream_id: int, flags: int, payload: bytes) -> None:
        block = self._block
        if block is None or stream_id != self._block_head[0]:
            raise violation("CONTINUATION without its HEADERS")
        block += payload
        if len(block) > LIST_BYTES_MAX or not (payload or flags & END_HEADERS):
            reason = f"an empty CONTINUATION, or a header block of over {LIST_BYTES_MAX} bytes"
            raise ProtocolViolation(ErrorCode.ENHANCE_YOUR_CALM, reason)
        if flags & END_HEADERS:
            self._block = None
            self._on_block(stream_id, self._block_head[1], bytes(block))

    def _on_block(self, stream_id: int, flags: int, block: bytes) -> None:
        headers = self._blocks.read(block)  # also of ended streams: it changes the HPACK state
        stream = self._client.streams.get(stream_id)
        if stream is None:
            self._client.check_opened(stream_id, "HEADERS")
            return
        is_end = flags & END_STREAM != 0
        reply = stream.on_headers(headers, is_end)
        if reply is None:
            return
        if not is_end:
            raise StreamError(stream_id, ErrorCode.PROTOCOL_ERROR, reply.message)
        self._client.end(stream, reply)
