"""Streams that have ended: what may still come of them, and what may not.

A stream that we ended before its client did has frames on their way, which are thrown away. One
that its client ended has none, and a number that was passed over cannot come at all.
"""

from __future__ import annotations

from embedserve.wire.http2 import frames
from embedserve.wire.http2.frames import (
    END_STREAM,
    ErrorCode,
    ProtocolViolation,
    StreamError,
    violation,
)

REMEMBERED_MAX = 256
PASSED_OVER_MAX = 64
UNREAD_BYTES_MAX = 16 << 10
"""Of a request that was answered before it had ended, thrown away before its client is told."""


class ClosedStreams:
    """Of one connection, those that ended last."""

    def __init__(self, out: list[bytes | memoryview]) -> None:
        """``out`` is where resets go."""
        self._out = out
        self._passed_over: list[range] = []
        self._ours: dict[int, None] = {}  # that we ended
        self._unread: dict[int, int] = {}  # of these, answered ones: bytes that may yet come
        self._due: list[int] = []  # unread when it was last checked

    def pass_over(self, start: int, stop: int) -> None:
        """The client opened ``stop`` next where ``start`` would have been."""
        self._passed_over.append(range(start, stop, 2))
        del self._passed_over[:-PASSED_OVER_MAX]

    def may_come(self, stream_id: int) -> bool:
        """Whether frames of the stream may have been on their way as it was ended."""
        return stream_id in self._ours

    def leave_unread(self, stream_id: int) -> None:
        """The answer came before the request had ended: the rest is not wanted.

        It is thrown away while it is short, since some clients take a reset for a failure. Those
        that have waited for a while are reset in what tells the client of this one.
        """
        if self._due:
            self._reset_due()
        if len(self._unread) >= REMEMBERED_MAX:
            self.reset(next(iter(self._unread)), ErrorCode.NO_ERROR)
        self._unread[stream_id] = UNREAD_BYTES_MAX
        self._remember(stream_id)

    def reset(self, stream_id: int, code: ErrorCode) -> None:
        """Tells the client that the stream has ended."""
        self._unread.pop(stream_id, None)
        self._out.append(frames.rst_stream(stream_id, code))
        self._remember(stream_id)

    def reset_unread(self) -> None:
        """Tells the client that it need not go on with any."""
        for stream_id in list(self._unread):
            self.reset(stream_id, ErrorCode.NO_ERROR)

    def check_time(self) -> bool:
        """Resets those that were unread when it was last called; whether there were any."""
        has_reset = self._reset_due()
        self._due = list(self._unread)
        return has_reset

    def _reset_due(self) -> bool:
        due, self._due = self._due, []
        late = [stream_id for stream_id in due if stream_id in self._unread]
        for stream_id in late:
            self.reset(stream_id, ErrorCode.NO_ERROR)
        return bool(late)

    def _remember(self, stream_id: int) -> None:
        if len(self._ours) >= REMEMBERED_MAX:
            del self._ours[next(iter(self._ours))]
        self._ours[stream_id] = None

    def forget(self, stream_id: int) -> None:
        """The client has ended the stream, too: nothing more is on its way."""
        self._ours.pop(stream_id, None)
        self._unread.pop(stream_id, None)

    def read_headers(self, stream_id: int, flags: int) -> None:
        """Takes HEADERS, whose block is to be decoded all the same.

        Raises:
            ProtocolViolation: none can have been on their way.
        """
        if stream_id in self._ours:
            self._throw_away(stream_id, flags, 0)
        elif any(stream_id in numbers for numbers in self._passed_over):
            raise violation(f"stream {stream_id} after higher ones")
        else:
            reason = f"HEADERS on stream {stream_id}, which ended"
            raise ProtocolViolation(ErrorCode.STREAM_CLOSED, reason)

    def read_data(self, stream_id: int, flags: int, length: int) -> None:
        """Takes DATA.

        Raises:
            StreamError: none can have been on its way.
        """
        if stream_id not in self._ours:
            raise StreamError(stream_id, ErrorCode.STREAM_CLOSED, "DATA on a stream that ended")
        self._throw_away(stream_id, flags, length)

    def _throw_away(self, stream_id: int, flags: int, length: int) -> None:
        if stream_id not in self._unread:
            return
        self._unread[stream_id] -= length
        if flags & END_STREAM:
            del self._unread[stream_id]
        elif self._unread[stream_id] < 0:
            self.reset(stream_id, ErrorCode.NO_ERROR)
