"""Client side of an HTTP/2 connection for unary gRPC calls, without I/O.

``call`` and ``receive`` write bytes through a function. Requests beyond the shard's flow-control
windows wait in their streams, and calls beyond its stream limit wait for a free stream.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from embedserve.shard_client.client_stream import ClientStream, OnReply
from embedserve.shard_client.reply import INTERNAL, Reply, lost, reset_reply
from embedserve.shard_client.response_frames import (
    CONNECTION_WINDOW,
    FRAME_BYTES_ACCEPTED_MAX,
    ResponseFrames,
)
from embedserve.wire.grpc.grpc_framing import PREFIX, PREFIX_BYTES
from embedserve.wire.http2 import frames
from embedserve.wire.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_BYTES_MAX,
    FRAME_HEADER,
    HEADERS,
    WINDOW_AT_START,
    WINDOW_MAX,
    ErrorCode,
    ProtocolViolation,
    StreamError,
    violation,
)
from embedserve.wire.http2.header_blocks import LIST_BYTES_MAX, NO_TABLE
from embedserve.wire.http2.token_bucket import TokenBucket

logger = logging.getLogger(__name__)

STREAMS_AT_START = 100
"""Calls opened before the shard's SETTINGS name its own limit."""
LAST_STREAM_ID = 2**31 - 1
RESETS_MAX, RESETS_PER_SECOND = 500, 50
"""Burst and rate of RST_STREAM frames: half of what a shard tolerates per connection before it
treats them as a flood. The responses of further cancelled calls are received and discarded."""
LOST = "the connection was lost"


class Http2Client:
    """An HTTP/2 connection to a shard. It opens streams, and accepts none.

    Attributes:
        streams: open streams, by stream identifier.
        streams_max: stream limit of the shard.
        write: function that sends bytes.
        next_id: identifier of the next stream.
        window: bytes of DATA that may be sent on the connection.
        stream_window: initial send window of a stream.
        frame_bytes_max: bytes of the largest DATA payload to send.
        unsent: rests of requests that are not sent whole, by stream, in order.
        replies: number of streams that the shard has ended.
        is_begun: whether the shard's SETTINGS have arrived.
        is_draining: whether no more calls may begin, as after GOAWAY.
        is_paused: whether the transport's buffer is full. Calls wait until ``resume``.
        is_closed: whether the connection has ended.
        reason: why the connection drains or has ended.
    """

    def __init__(
        self,
        write: Callable[[bytes], object],
        response_bytes_max: int,
        on_change: Callable[[], None],
    ) -> None:
        """Sends the preface and SETTINGS.

        Args:
            response_bytes_max: limit of a response message; a larger one fails its call.
            on_change: called after ``is_begun``, ``is_draining`` or ``is_closed`` was set, and
                before the calls fail that end with the connection.
        """
        self.write = write
        self.streams: dict[int, ClientStream] = {}
        self.streams_max = STREAMS_AT_START
        self.next_id = 1
        self.replies = 0
        self.window = self.stream_window = WINDOW_AT_START
        self.frame_bytes_max = FRAME_BYTES_MAX
        self.unsent: dict[ClientStream, memoryview] = {}
        self.is_begun = self.is_draining = self.is_closed = self.is_paused = False
        self.reason = ""
        self._on_change = on_change
        self._message_bytes_max = PREFIX_BYTES + response_bytes_max
        self._pending: dict[ClientStream, tuple[bytes, Sequence[bytes], int]] = {}
        self._block_start = NO_TABLE
        self._resets = TokenBucket(RESETS_MAX, RESETS_PER_SECOND)
        self._responses = ResponseFrames(self, self._message_bytes_max)
        stream_window = min(WINDOW_MAX, self._message_bytes_max + WINDOW_AT_START)
        write(
            frames.PREFACE
            + frames.settings(
                (frames.SETTINGS_ENABLE_PUSH, 0),
                (frames.SETTINGS_INITIAL_WINDOW_SIZE, stream_window),
                (frames.SETTINGS_MAX_FRAME_SIZE, FRAME_BYTES_ACCEPTED_MAX),
                (frames.SETTINGS_MAX_HEADER_LIST_SIZE, LIST_BYTES_MAX),
            )
            + frames.window_update(0, CONNECTION_WINDOW - WINDOW_AT_START)
        )

    @property
    def in_flight(self) -> int:
        """Calls without a reply, and cancelled calls whose response still arrives."""
        return len(self.streams) + len(self._pending)

    # Sending

    def call(self, block: bytes, message: Sequence[bytes], on_reply: OnReply) -> ClientStream:
        """Starts a call; ``on_reply`` is called later and exactly once, unless it is cancelled.

        Args:
            block: header block of the request.
            message: chunks of the request message.
            on_reply: callback for the reply.

        Raises:
            ConnectionError: the connection accepts no more calls.
        """
        if self.is_draining:
            raise ConnectionError(self.reason)
        stream = ClientStream(self, on_reply)
        nbytes = sum(map(len, message))
        if self._pending or self.is_paused or len(self.streams) >= self.streams_max:
            self._pending[stream] = block, message, nbytes
        else:
            self._open(stream, block, message, nbytes)
        return stream

    def _open(
        self, stream: ClientStream, block: bytes, message: Sequence[bytes], nbytes: int
    ) -> None:
        """Opens a stream, and sends the request at once as far as the windows allow."""
        stream.id = stream_id = self.next_id
        self.next_id = stream_id + 2
        self.streams[stream_id] = stream
        if self._block_start:
            block, self._block_start = self._block_start + block, b""
        pack, size = FRAME_HEADER.pack, PREFIX_BYTES + nbytes
        head = pack(0, len(block), HEADERS, END_HEADERS, stream_id)
        prefix = PREFIX.pack(0, nbytes)
        if size <= self.window and size <= self.stream_window and size <= self.frame_bytes_max:
            self.window -= size
            data_head = pack(size >> 16, size & 0xFFFF, DATA, END_STREAM, stream_id)
            self.write(b"".join((head, block, data_head, prefix, *message)))
        else:
            self.unsent[stream] = memoryview(b"".join((prefix, *message)))
            stream.send_window = self.stream_window
            self.write(head + block)
            self.send_unsent()
        if self.next_id > LAST_STREAM_ID:
            self.start_drain("the stream identifiers are used up", LAST_STREAM_ID)

    def send_unsent(self) -> None:
        """Sends the rest of requests, in order, as far as the windows allow."""
        for stream, unsent in list(self.unsent.items()):
            if self.window <= 0 or self.is_paused:
                return
            self._send_some(stream, unsent)

    def _send_some(self, stream: ClientStream, unsent: memoryview) -> None:
        nbytes = min(len(unsent), stream.send_window, self.window)
        if nbytes <= 0:
            return
        stream.send_window -= nbytes
        self.window -= nbytes
        size = self.frame_bytes_max
        pieces: list[bytes | memoryview] = []
        for start in range(0, nbytes, size):
            chunk = unsent[start : min(start + size, nbytes)]
            flags = END_STREAM if start + len(chunk) == len(unsent) else 0
            pieces += [frames.frame_header(len(chunk), DATA, flags, stream.id), chunk]
        if nbytes == len(unsent):
            del self.unsent[stream]
        else:
            self.unsent[stream] = unsent[nbytes:]
        self.write(b"".join(pieces))

    def cancel(self, stream: ClientStream) -> None:
        """Ends a call without a reply, and resets its stream unless there were many resets."""
        stream.on_reply = None
        self._pending.pop(stream, None)
        if stream.id in self.streams and self._resets.try_take():
            self._reset(stream, ErrorCode.CANCEL)
            self.open_pending()
            self._close_if_drained()

    def _reset(self, stream: ClientStream, code: ErrorCode) -> None:
        del self.streams[stream.id]
        self.unsent.pop(stream, None)
        self.write(frames.rst_stream(stream.id, code))

    def pause(self) -> None:
        """Stops sending requests, as the transport's buffer is full."""
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False
        self.send_unsent()
        self.open_pending()

    def open_pending(self) -> None:
        """Opens streams for waiting calls, as far as the shard's stream limit allows."""
        pending = self._pending
        while pending and len(self.streams) < self.streams_max and not self.is_paused:
            stream = next(iter(pending))
            self._open(stream, *pending.pop(stream))

    # Receiving

    def receive(self, data: bytes) -> None:
        """Processes received bytes. Malformed ones end the connection."""
        if self.is_closed:
            return
        try:
            self._responses.receive(data)
        except ProtocolViolation as error:
            self.close(f"the shard violates HTTP/2: {error.reason}", error.code)

    def begin(self) -> None:
        """Allows calls, after the shard's SETTINGS have arrived."""
        if not self.is_begun:
            self.is_begun = True
            self._on_change()

    # Ends

    def check_opened(self, stream_id: int, what: str) -> None:
        """Raises ProtocolViolation for a frame on a stream that was never opened."""
        if not (0 < stream_id < self.next_id and stream_id & 1):
            raise violation(f"{what} on stream {stream_id}, which is not open")

    def end(self, stream: ClientStream, reply: Reply) -> None:
        """Ends a stream whose response has ended; a request that is not sent whole is reset."""
        self.replies += 1
        if stream in self.unsent:
            self._reset(stream, ErrorCode.CANCEL)
        else:
            del self.streams[stream.id]
        if self._pending:
            self.open_pending()
        _complete(stream, reply)
        self._close_if_drained()

    def _close_if_drained(self) -> None:
        if self.is_draining and not self.streams:
            self.close(self.reason)

    def reset_by_shard(self, stream_id: int, code: int) -> None:
        """Ends a stream that the shard has reset."""
        stream = self.streams.get(stream_id)
        if stream is not None:
            self.unsent.pop(stream, None)
            self.end(stream, reset_reply(code))

    def fail_stream(self, error: StreamError) -> None:
        """Resets a stream and fails its call."""
        stream = self.streams.get(error.stream_id)
        if stream is not None:
            self.write(frames.rst_stream(stream.id, error.code))
            self.unsent.pop(stream, None)
            self.end(stream, Reply(INTERNAL, error.reason))

    def start_drain(self, reason: str, last_id: int) -> None:
        """Accepts no more calls, and fails those that the shard will not process.

        Args:
            reason: why the connection drains.
            last_id: highest identifier of a stream that the shard still processes.
        """
        if not self.is_draining:
            self.is_draining, self.reason = True, reason
            self._on_change()
        failed = [stream for stream in self.streams.values() if stream.id > last_id]
        for stream in failed:
            del self.streams[stream.id]
            self.unsent.pop(stream, None)
        waiting = list(self._pending)
        self._pending.clear()
        for stream in failed + waiting:
            _complete(stream, lost(reason))
        self._close_if_drained()

    def finish(self, reason: str) -> None:
        """Accepts no more calls, and closes the connection after those in flight."""
        self.start_drain(reason, LAST_STREAM_ID)

    def close(self, reason: str = LOST, code: ErrorCode = ErrorCode.NO_ERROR) -> None:
        """Ends the connection with GOAWAY, and fails the calls in flight."""
        if self.is_closed:
            return
        self.is_closed = self.is_draining = True
        self.reason = reason
        self.write(frames.goaway(0, code, reason))
        streams = [*self.streams.values(), *self._pending]
        for calls in (self.streams, self._pending, self.unsent):
            calls.clear()
        self._on_change()
        for stream in streams:
            _complete(stream, lost(reason))


def _complete(stream: ClientStream, reply: Reply) -> None:
    """Passes a reply to the caller, if it still waits. The connection survives its errors."""
    on_reply, stream.on_reply = stream.on_reply, None
    if on_reply is not None:
        try:
            on_reply(reply)
        except Exception:
            logger.exception("a reply could not be processed")
