"""Receive windows of a connection and its streams, and the updates that let clients send more.

The windows bound bytes that are received and not consumed, per connection and per stream. Larger
messages get more window from UploadBudget. Incomplete bodies that fill the connection's window
would wait for each other: the connection then takes spare bytes from that budget. After a client's
request is rejected because its queue is full, the client gets a small initial window. The body of a
request that is rejected by its headers then stays with the client.
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

STREAM_WINDOW, CONNECTION_WINDOW = 128 << 10, 1 << 20
"""Bytes of the usual windows: received on a stream, or on a connection, and not consumed yet."""
WINDOW_LOW = CONNECTION_WINDOW // 2
"""Bytes of the connection's window at which it is opened again."""
NARROW_STREAM_WINDOW = 4 << 10
"""Bytes of the initial stream window after an overload rejection; a small request fits into it."""
NARROW_S = 1.0
"""Seconds for which the initial window stays small after the last overload rejection."""
UNACKNOWLEDGED_MAX = 4
"""Unacknowledged SETTINGS frames; a client that acknowledges none gets no more."""


class InboundFlowControl:
    """Receive windows of one connection.

    Attributes:
        out: output list for WINDOW_UPDATE and SETTINGS frames.
        window: bytes of DATA that the client may send on the connection.
        stream_window: initial window of a new stream, as acknowledged by the client.
        whole_bytes_max: bytes of a request body that may arrive as one frame.
        held_bytes: bytes received on all streams and not consumed yet.
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
        """
        Args:
            on_output: called when a frame is added outside of ``receive``.
        """
        self.out = out
        self._on_output = on_output
        self._uploads = uploads
        self.window = WINDOW_AT_START
        self.stream_window = STREAM_WINDOW
        self.whole_bytes_max = FRAME_BYTES_MAX
        self._announced = deque([STREAM_WINDOW])  # initial windows in unacknowledged SETTINGS
        self._narrow_until_s = 0.0
        self.held_bytes = 0
        self._granted_bytes = 0
        self._spare_bytes = 0
        self._wants_spare = False
        self._is_over = False

    def shrink_initial_window(self) -> None:
        """Shrinks the initial stream window for NARROW_S after an overload rejection."""
        self._narrow_until_s = perf_counter() + NARROW_S
        self._announce(NARROW_STREAM_WINDOW)

    def check_time(self, now_s: float) -> None:
        """Restores the initial stream window after NARROW_S."""
        if now_s > self._narrow_until_s:
            self._announce(STREAM_WINDOW)

    def _announce(self, stream_window: int) -> None:
        last = self._announced[-1] if self._announced else self.stream_window
        if last != stream_window and len(self._announced) < UNACKNOWLEDGED_MAX:
            self._announced.append(stream_window)
            self.out.append(frames.settings((SETTINGS_INITIAL_WINDOW_SIZE, stream_window)))
            self._on_output()

    def apply_acknowledged(self, streams: Iterable[Stream]) -> None:
        """Applies the oldest unacknowledged initial window, also to the open ``streams``."""
        if not self._announced:
            return
        change = self._announced.popleft() - self.stream_window
        if change:
            self.stream_window += change
            self.whole_bytes_max = min(FRAME_BYTES_MAX, self.stream_window)
            for stream in streams:
                stream.receive_window += change

    def take(self, nbytes: int) -> None:
        """Counts the payload of a DATA frame against the connection window.

        Raises:
            ProtocolViolation: the payload exceeds the window.
        """
        self.window -= nbytes
        if self.window < 0:
            raise ProtocolViolation(
                ErrorCode.FLOW_CONTROL_ERROR, "DATA beyond the connection's window"
            )

    def hold(self, stream: Stream, length: int, nbytes: int) -> None:
        """Counts a frame of ``length`` with ``nbytes`` of body against the stream window.

        An empty frame needs no window (RFC 9113, section 6.9.1). The server's settings may have
        lowered the window below 0.

        Raises:
            StreamError: the frame exceeds the window.
        """
        stream.receive_window -= length
        if length and stream.receive_window < 0:
            raise StreamError(
                stream.id, ErrorCode.FLOW_CONTROL_ERROR, "DATA beyond the stream's window"
            )
        stream.held_bytes += nbytes
        self.held_bytes += nbytes

    def consumed(self, stream: Stream, nbytes: int) -> None:
        """Releases consumed bytes: returns budget, and reopens the window once half is free."""
        stream.held_bytes -= nbytes
        self.held_bytes -= nbytes
        over = stream.receive_window + stream.held_bytes - STREAM_WINDOW
        self._return_grant(stream, 0 if stream.is_received else max(0, over))
        if not stream.is_received:
            more = STREAM_WINDOW - stream.receive_window - stream.held_bytes
            if more >= STREAM_WINDOW // 2:
                self._open(stream, more)
        if self._spare_bytes:
            self._return_spare()

    def _open(self, stream: Stream, nbytes: int) -> None:
        stream.receive_window += nbytes
        self.out.append(frames.window_update(stream.id, nbytes))

    def request_window(self, stream: Stream, missing_bytes: int) -> None:
        """Requests more window for ``stream`` from UploadBudget.

        Each step is at most as large as the bytes already received, or STREAM_WINDOW. A client
        therefore reserves budget by the bytes that it sends, not by the length that it declares.
        """
        step = max(STREAM_WINDOW, stream.held_bytes)
        if stream.has_pending_grant or stream.receive_window >= min(missing_bytes, step // 2):
            return

        def is_needed() -> bool:
            return not (stream.is_received or stream.is_sent)

        def grant(nbytes: int) -> bool:
            stream.has_pending_grant = False
            if not is_needed():
                return False
            stream.granted_bytes += nbytes
            self._granted_bytes += nbytes
            self._open(stream, nbytes)
            self.top_up()
            stream.connection.sent(stream)
            return True

        stream.has_pending_grant = True
        self._uploads.request(min(missing_bytes - stream.receive_window, step), grant, is_needed)

    def top_up(self) -> None:
        """Sends a connection window update if it adds at least WINDOW_LOW bytes.

        Callers skip it while ``window`` is over WINDOW_LOW.
        """
        if not self._widen() and self.window < STREAM_WINDOW and not self._wants_spare:
            self._wants_spare = True
            self._uploads.request(CONNECTION_WINDOW, self._take_spare, lambda: not self._is_over)

    def _widen(self) -> bool:
        """Sends a connection window update, unless it would add less than WINDOW_LOW bytes.

        Spare bytes make up for held bytes and never widen the window beyond its usual size. A
        client could otherwise use spare bytes that were returned.
        """
        unpaid_bytes = max(0, self.held_bytes - self._spare_bytes)
        more = CONNECTION_WINDOW + self._granted_bytes - unpaid_bytes - self.window
        if more < WINDOW_LOW:
            return False
        self.window += more
        self.out.append(frames.window_update(0, more))
        return True

    def _take_spare(self, nbytes: int) -> bool:
        """Takes ``nbytes`` of spare bytes, granted by UploadBudget. Returns False if the connection
        no longer needs them."""
        self._wants_spare = False
        if self._is_over or self.window >= STREAM_WINDOW:
            return False
        # Held bytes may have been consumed while the request for spare bytes waited.
        is_needed = not self._widen()
        if is_needed:
            self._spare_bytes += nbytes
            self.top_up()
        self._on_output()
        return is_needed

    def forget(self, stream: Stream) -> None:
        """Releases the held and granted bytes of a stream that has ended."""
        self.held_bytes -= stream.held_bytes
        stream.held_bytes = 0
        self._return_grant(stream, 0)
        self._return_spare()

    def _return_spare(self) -> None:
        """Returns the spare bytes to the upload budget once the usual window is enough."""
        if self._spare_bytes and self.held_bytes < CONNECTION_WINDOW // 2:
            spare, self._spare_bytes = self._spare_bytes, 0
            self._uploads.give_back(spare)

    def _return_grant(self, stream: Stream, kept_bytes: int) -> None:
        """Returns the grants of ``stream`` to the upload budget, except for ``kept_bytes``."""
        granted = stream.granted_bytes - kept_bytes
        if granted > 0:
            stream.granted_bytes = kept_bytes
            self._granted_bytes -= granted
            self._uploads.give_back(granted)

    def close(self) -> None:
        """Returns spare bytes to the upload budget, after the connection and its streams ended."""
        self._is_over = True
        self._return_spare()
