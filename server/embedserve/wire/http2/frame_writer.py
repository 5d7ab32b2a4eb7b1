"""Send scheduling of a connection: responses as frames, within the client's flow-control windows.

A small response is written immediately as one byte string. Data beyond a window waits in its
stream. Streams that are ready to send are scheduled round-robin, a few frames each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter

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
)
from embedserve.wire.http2.header_blocks import NO_TABLE
from embedserve.wire.http2.stream import Stream
from embedserve.wire.http_stream import PROGRESS_BYTES_MIN

TURN_BYTES = 64 << 10
"""Bytes of a stream's body that are framed before the next ready stream is scheduled."""
OUT_BYTES_MAX = 1 << 20
"""Bytes framed by one ``pump``; the caller writes them to the transport before the next."""
KEPT_BYTES_MIN = 1 << 20
"""Blocked responses below this many bytes are copied, so that they do not keep their whole batch
alive."""
END_HEADERS_AND_STREAM = END_HEADERS | END_STREAM
FRAME_BYTES_SENT_MAX = 1 << 20
"""Bytes of the largest DATA payload that is sent, even if the client allows larger frames."""


class FrameWriter:
    """Frames the responses of a connection's streams and schedules them.

    Attributes:
        window: bytes of DATA that may be sent on this connection.
        stream_window: initial send window of a new stream.
        frame_bytes_max: bytes of the largest DATA payload to send.
        out: bytes to write, in order.
        write: function that takes a response which is alone, while ``out`` is empty: the write of
            the transport.
        unsent_bytes: unsent body bytes of all streams.
        response_frames: number of DATA frames sent so far, and of other frames that end a response.
        fresh: streams that have written since the last ``detach_small_bodies``.
        ready: streams with unsent data and an open stream window.
        blocked_streams: streams blocked by their flow-control window, by stream identifier.
    """

    __slots__ = (
        "_given_bytes",
        "_stuck_since_s",
        "_table_update",
        "_whole_bytes_max",
        "blocked_streams",
        "frame_bytes_max",
        "fresh",
        "out",
        "ready",
        "response_frames",
        "stream_window",
        "unsent_bytes",
        "window",
        "write",
    )

    def __init__(self) -> None:
        self.window = WINDOW_AT_START
        self.stream_window = WINDOW_AT_START
        self.frame_bytes_max = FRAME_BYTES_MAX
        self.out: list[bytes | memoryview] = []
        self.write: Callable[[bytes], None] = self.out.append
        self.unsent_bytes = 0
        self.response_frames = 0
        self.blocked_streams: dict[int, Stream] = {}
        self.ready: deque[Stream] = deque()
        self.fresh: list[Stream] = []
        self._table_update = NO_TABLE
        self._whole_bytes_max = -1  # of a body sent as one string; -1 until NO_TABLE is framed
        self._given_bytes = 0  # added to the connection window since _stuck_since_s
        self._stuck_since_s = perf_counter()

    def write_response(
        self,
        stream: Stream,
        head: bytes,
        chunks: Sequence[bytes | memoryview],
        nbytes: int,
        tail: bytes,
    ) -> None:
        """Writes a complete response: as one byte string if it fits into one DATA frame, otherwise
        as the windows allow. ``head`` and ``tail`` are the header blocks of headers and trailers;
        without trailers ``tail`` is b""."""
        if (
            nbytes > stream.send_window
            or nbytes > self.window
            or nbytes > self._whole_bytes_max
            or stream.is_sent
            or stream.tail is not None
        ):
            self.write_headers(stream, head, False)
            self.write_body(stream, chunks, nbytes)
            self.end(stream, tail)
            return
        self.window -= nbytes
        self.response_frames += 1
        number, pack = stream.id, FRAME_HEADER.pack
        of_head = pack(0, len(head), HEADERS, END_HEADERS, number)
        if tail:
            of_body = pack(0, nbytes, DATA, 0, number)
            of_tail = pack(0, len(tail), HEADERS, END_HEADERS_AND_STREAM, number)
            buffers = (of_head, head, of_body, *chunks, of_tail, tail)
        else:
            of_body = pack(0, nbytes, DATA, END_STREAM, number)
            buffers = (of_head, head, of_body, *chunks)
        connection = stream.connection
        # With other streams open the response waits for the flush: more responses of the same
        # batch may be written together with it.
        is_lone = len(connection.streams) == 1 and not self.out
        (self.write if is_lone else self.out.append)(b"".join(buffers))
        connection.response_queued(stream)

    def write_headers(self, stream: Stream, block: bytes, is_end: bool) -> None:
        if stream.is_sent or stream.tail is not None:
            return  # the response has already ended
        block = self._table_update + block
        self._table_update = b""
        self._whole_bytes_max = FRAME_BYTES_MAX
        flags = END_HEADERS
        if is_end:
            flags |= END_STREAM
        self._write_header_block(stream.id, block, flags)
        if is_end:
            stream.is_sent = True
            self.response_frames += 1
        stream.connection.sent(stream)

    def _write_header_block(self, stream_id: int, block: bytes, flags: int) -> None:
        """Frames a header block as HEADERS and as many CONTINUATION frames as it needs."""
        first, rest = block[:FRAME_BYTES_MAX], block[FRAME_BYTES_MAX:]
        kind = HEADERS
        while rest:
            self.out += (
                frames.frame_header(len(first), kind, flags & ~END_HEADERS, stream_id),
                first,
            )
            kind, flags = frames.CONTINUATION, END_HEADERS
            first, rest = rest[:FRAME_BYTES_MAX], rest[FRAME_BYTES_MAX:]
        self.out += (frames.frame_header(len(first), kind, flags, stream_id), first)

    def write_body(self, stream: Stream, chunks: Sequence[bytes | memoryview], nbytes: int) -> None:
        if stream.is_sent or stream.tail is not None or not nbytes:
            return
        if stream.unsent is None:
            stream.unsent = deque()
        was_empty = not stream.unsent
        stream.unsent.extend([memoryview(chunk).cast("B") for chunk in chunks if len(chunk)])
        stream.unsent_bytes += nbytes
        self.unsent_bytes += nbytes
        self.fresh.append(stream)
        if was_empty:
            self._make_ready(stream)
        stream.connection.sent(stream)

    def end(self, stream: Stream, tail: bytes) -> None:
        if stream.is_sent or stream.tail is not None:
            return
        stream.tail = tail
        if not stream.unsent:
            self._send_tail(stream)
        stream.connection.sent(stream)

    def _make_ready(self, stream: Stream) -> None:
        if stream.send_window > 0:
            self.ready.append(stream)
        else:
            self._block_stream(stream)

    def _block_stream(self, stream: Stream) -> None:
        self.blocked_streams[stream.id] = stream
        if not stream.blocked_since_s:
            stream.blocked_since_s = perf_counter()
            stream.sent_while_blocked = 0

    def pump(self) -> int:
        """Frames up to OUT_BYTES_MAX of body bytes, as the windows allow. Returns the byte count.

        The caller writes ``out`` before it calls again for more.
        """
        left = OUT_BYTES_MAX
        while self.ready and self.window > 0 and left > 0:
            stream = self.ready.popleft()
            if stream.send_window <= 0:  # SETTINGS has lowered it since the stream became ready
                self._block_stream(stream)
                continue
            left -= self._send_some(stream, TURN_BYTES if self.ready else left)
            if not stream.unsent:
                self._on_body_framed(stream)
            else:
                self._make_ready(stream)
        return OUT_BYTES_MAX - left

    def detach_small_bodies(self) -> None:
        """Copies small bodies that must wait, after ``pump``: see KEPT_BYTES_MIN."""
        fresh, self.fresh = self.fresh, []
        for stream in fresh:
            if stream.unsent and stream.unsent_bytes < KEPT_BYTES_MIN:
                stream.unsent = deque((memoryview(b"".join(stream.unsent)),))

    def _send_some(self, stream: Stream, bytes_max: int) -> int:
        """Frames up to ``bytes_max`` of a stream's body. Returns the byte count.

        The stream has unsent data, and its window and the connection's are above 0.
        """
        unsent = stream.unsent
        assert unsent is not None
        turn = left = min(bytes_max, stream.send_window, self.window)
        while left > 0 and unsent:
            chunk = unsent.popleft()
            if len(chunk) > left:
                unsent.appendleft(chunk[left:])
                chunk = chunk[:left]
            left -= len(chunk)
            self._frame_chunk(stream, chunk, END_STREAM if stream.tail == b"" and not unsent else 0)
        sent = turn - left
        stream.send_window -= sent
        self.window -= sent
        stream.unsent_bytes -= sent
        self.unsent_bytes -= sent
        if stream.blocked_since_s:
            stream.sent_while_blocked += sent
            if stream.sent_while_blocked >= PROGRESS_BYTES_MIN:
                stream.blocked_since_s = 0.0
        return sent

    def _frame_chunk(self, stream: Stream, chunk: memoryview, flags: int) -> None:
        """Frames ``chunk`` as DATA; ``flags`` are set on its last frame."""
        out, size = self.out, self.frame_bytes_max
        start = 0
        if len(chunk) > size:
            head = frames.frame_header(size, DATA, 0, stream.id)
            for start in range(size, len(chunk), size):
                out.append(head)
                out.append(chunk[start - size : start])
        out.append(frames.frame_header(len(chunk) - start, DATA, flags, stream.id))
        out.append(chunk[start:])
        self.response_frames += 1 + start // size

    def _on_body_framed(self, stream: Stream) -> None:
        """Ends or resumes a stream after all of its queued body was framed."""
        stream.blocked_since_s = 0.0
        if stream.tail == b"":
            stream.is_sent = True
            stream.connection.sent(stream)
        elif stream.tail is not None:
            self._send_tail(stream)
            stream.connection.sent(stream)
        else:
            stream.handler.resume()

    def _send_tail(self, stream: Stream) -> None:
        if stream.tail:
            self.out.append(
                frames.frame_header(len(stream.tail), HEADERS, END_HEADERS_AND_STREAM, stream.id)
                + stream.tail
            )
        else:
            self.out.append(frames.frame_header(0, DATA, END_STREAM, stream.id))
        stream.is_sent = True
        self.response_frames += 1

    def stuck_s(self, now_s: float) -> float:
        """Returns for how many seconds responses have waited for the connection window.

        The value is current only if the method is called periodically.
        """
        if not self.ready or self.window > 0 or self._given_bytes >= PROGRESS_BYTES_MIN:
            self._stuck_since_s = now_s
            self._given_bytes = 0
        return now_s - self._stuck_since_s

    def restart_timeouts(self, now_s: float) -> None:
        """Restarts the time limits on missing windows; called while nothing is read, and so no
        update of a window."""
        self._stuck_since_s = now_s
        for stream in self.blocked_streams.values():
            stream.blocked_since_s = now_s

    def forget(self, stream: Stream) -> None:
        """Drops the unsent data of a stream that has ended."""
        if stream.unsent:
            self.unsent_bytes -= stream.unsent_bytes
            stream.unsent.clear()
            stream.unsent_bytes = 0
            if self.blocked_streams.pop(stream.id, None) is None:
                self.ready.remove(stream)

    def open_window(self, stream: Stream | None, increment: int) -> None:
        """Adds ``increment`` to the send window of ``stream``, or of the connection if None.

        Raises:
            ProtocolViolation: the window exceeds 2^31 - 1.
        """
        if stream is None:
            self.window += increment
            self._given_bytes += increment
            is_over = self.window > WINDOW_MAX
        else:
            stream.send_window += increment
            is_over = stream.send_window > WINDOW_MAX
            if stream.send_window > 0 and self.blocked_streams.pop(stream.id, None) is not None:
                self.ready.append(stream)
        if is_over:
            raise ProtocolViolation(ErrorCode.FLOW_CONTROL_ERROR, "a window is over 2^31 - 1")
