"""The receiving half's windows: what clients may send, and when they may send more.

A connection has room for so many bytes that were received and not consumed; a stream for fewer.
What a message needs beyond that is granted by Uploads. A client whose request was refused for a
full queue is told to begin with little: what is refused at its head then stays with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from time import perf_counter

from embedserve.wire.http2 import frames
from embedserve.wire.http2.frames import (
    FRAME_BYTES_MAX,
    SETTINGS_INITIAL_WINDOW_SIZE,
    WINDOW_AT_START,
    ErrorCode,
    ProtocolViolation,
    StreamError,
)
from embedserve.wire.http2.stream import Stream
from embedserve.wire.http2.upload_budget import UploadBudget

STREAM_WINDOW = 128 << 10
CONNECTION_WINDOW = 1 << 20
WINDOW_LOW = CONNECTION_WINDOW // 2
NARROW_STREAM_WINDOW = 4 << 10
"""Of the streams of a client that was refused for a full queue: all of a small request."""
NARROW_S = 1.0
"""How long after it was last refused."""
UNACKNOWLEDGED_MAX = 4
"""Settings; a client that acknowledges none is sent no more."""


class InboundFlowControl:
    """The windows of one connection's receiving half.

    Attributes:
        out: where updates of windows go.
        window: bytes of DATA that the client may send on the connection.
        stream_window: of a new stream, as far as the client has acknowledged it.
        whole_bytes_max: of a request's body that comes as one frame.
        held_bytes: received on all streams and not consumed yet.
    """

    __slots__ = (
        "_announced",
        "_granted_bytes",
        "_is_over",
        "_narrow_until_s",
        "_on_output",
        "_spare_bytes",
        "_uploads",
        "_wants_spare",
        "held_bytes",
        "out",
        "stream_window",
        "whole_bytes_max",
        "window",
    )

    def __init__(
        self, out: list[bytes | memoryview], uploads: UploadBudget, on_output: Callable[[], None]
    ) -> None:
        """``on_output`` is called where an update comes later than what asked for it."""
        self.out = out
        self._on_output = on_output
        self._uploads = uploads
        self.window = WINDOW_AT_START
        self.stream_window = STREAM_WINDOW
        self.whole_bytes_max = FRAME_BYTES_MAX
        self._announced = deque([STREAM_WINDOW])  # in settings that are not acknowledged
        self._narrow_until_s = 0.0
        self.held_bytes = 0
        self._granted_bytes = 0
        self._spare_bytes = 0
        self._wants_spare = False
        self._is_over = False

    def shrink_initial_window(self) -> None:
        """A request was refused for a full queue: bodies stay with the client for a while."""
        self._narrow_until_s = perf_counter() + NARROW_S
        self._announce(NARROW_STREAM_WINDOW)

    def check_time(self, now_s: float) -> None:
        """Ends that while, once it has passed; what is said of it goes with what is next."""
        if now_s > self._narrow_until_s:
            self._announce(STREAM_WINDOW)

    def _announce(self, stream_window: int) -> None:
        last = self._announced[-1] if self._announced else self.stream_window
        if last != stream_window and len(self._announced) < UNACKNOWLEDGED_MAX:
            self._announced.append(stream_window)
            self.out.append(frames.settings((SETTINGS_INITIAL_WINDOW_SIZE, stream_window)))

    def acknowledged(self, streams: Iterable[Stream]) -> None:
        """The client goes by the next settings that it was sent, on ``streams``, too."""
        if not self._announced:
            return
        change = self._announced.popleft() - self.stream_window
        if change:
            self.stream_window += change
            self.whole_bytes_max = min(FRAME_BYTES_MAX, self.stream_window)
            for stream in streams:
                stream.receive_window += change

    def take(self, nbytes: int) -> None:
        """Counts a DATA frame's payload against the connection's window.

        Raises:
            ProtocolViolation: the client had no window for it.
        """
        self.window -= nbytes
        if self.window < 0:
            raise ProtocolViolation(
                ErrorCode.FLOW_CONTROL_ERROR, "DATA beyond the connection's window"
            )

    def hold(self, stream: Stream, length: int, nbytes: int) -> None:
        """Counts a frame of ``length`` with ``nbytes`` of body against the stream's window.

        An empty frame needs no window (RFC 9113, section 6.9.1), which our own settings may have
        lowered below 0.

        Raises:
            StreamError: the client had no window for it.
        """
        stream.receive_window -= length
        if length and stream.receive_window < 0:
            raise StreamError(
                stream.id, ErrorCode.FLOW_CONTROL_ERROR, "DATA beyond the stream's window"
            )
        stream.held_bytes += nbytes
        self.held_bytes += nbytes

    def consumed(self, stream: Stream, nbytes: int) -> None:
        stream.held_bytes -= nbytes
        self.held_bytes -= nbytes
        over = stream.receive_window + stream.held_bytes - STREAM_WINDOW
        self._return_grant(stream, 0 if stream.is_received else max(0, over))
        if stream.is_received:
            return
        more = STREAM_WINDOW - stream.receive_window - stream.held_bytes
        if more >= STREAM_WINDOW // 2:
            self._open(stream, more)

    def _open(self, stream: Stream, nbytes: int) -> None:
        stream.receive_window += nbytes
        self.out.append(frames.window_update(stream.id, nbytes))

    def want(self, stream: Stream, missing_bytes: int) -> None:
        """Gives ``stream`` more window as there is room, until what it misses has come.

        In steps, each as large as what has come: what a client promises costs nothing, only what
        it sends.
        """
        step = max(STREAM_WINDOW, stream.held_bytes)
        if stream.has_asked or stream.receive_window >= min(missing_bytes, step // 2):
            return

        def grant(nbytes: int) -> bool:
            stream.has_asked = False
            if stream.is_received or stream.is_sent or self._is_over:
                return False
            stream.granted_bytes += nbytes
            self._granted_bytes += nbytes
            self._open(stream, nbytes)
            self.top_up()
            stream.connection.sent(stream)
            return True

        stream.has_asked = True
        self._uploads.request(min(missing_bytes - stream.receive_window, step), grant)

    def top_up(self) -> None:
        """Gives the client more of the connection's window, once there is much to give: not while
        ``window`` is over WINDOW_LOW."""
        room = CONNECTION_WINDOW + self._granted_bytes + self._spare_bytes - self.held_bytes
        more = room - self.window
        if more >= WINDOW_LOW:
            self.window += more
            self.out.append(frames.window_update(0, more))
        elif self.window < STREAM_WINDOW and not self._wants_spare:
            # Bodies that have all begun and cannot end would wait for each other.
            self._wants_spare = True
            self._uploads.request(CONNECTION_WINDOW, self._spare)

    def _spare(self, nbytes: int) -> bool:
        self._wants_spare = False
        if self._is_over or self.window >= STREAM_WINDOW:
            return False
        self._spare_bytes += nbytes
        self.top_up()
        self._on_output()
        return True

    def forget(self, stream: Stream) -> None:
        """The stream has ended: what it held and was granted is free again."""
        self.held_bytes -= stream.held_bytes
        stream.held_bytes = 0
        self._return_grant(stream, 0)
        if self._spare_bytes and self.held_bytes < CONNECTION_WINDOW // 2:
            spare, self._spare_bytes = self._spare_bytes, 0
            self._uploads.give_back(spare)

    def _return_grant(self, stream: Stream, kept_bytes: int) -> None:
        """Gives back what ``stream`` was granted, but for so much."""
        granted = stream.granted_bytes - kept_bytes
        if granted > 0:
            stream.granted_bytes = kept_bytes
            self._granted_bytes -= granted
            self._uploads.give_back(granted)

    def close(self) -> None:
        """The connection has ended, and before it its streams."""
        self._is_over = True
        if self._spare_bytes:
            spare, self._spare_bytes = self._spare_bytes, 0
            self._uploads.give_back(spare)
