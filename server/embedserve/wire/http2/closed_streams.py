"""Closed streams of a connection, and which frames may still arrive on them.

A stream that the server ended before its client did may have frames in flight, which are
discarded. A stream that the client ended has none. A skipped stream identifier cannot be opened.
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
"""Streams ended by the server that are remembered per connection; the oldest is dropped."""
SKIPPED_MAX = 64
"""Ranges of skipped stream identifiers that are remembered per connection."""
DISCARDED_BYTES_MAX = 16 << 10
"""Bytes discarded of a request that was answered before it ended; then its stream is reset."""


class ClosedStreams:
    """The recently closed streams of one connection."""

    def __init__(self, out: list[bytes | memoryview]) -> None:
        """
        Args:
            out: output list for RST_STREAM frames.
        """
        self._out = out
        self._skipped: list[range] = []
        self._ended_by_server: dict[int, None] = {}  # ended by the server, oldest first
        # answered streams of _ended_by_server: request bytes still accepted
        self._discardable: dict[int, int] = {}
        self._due: list[int] = []  # streams whose requests were incomplete at the last check_time

    def record_skipped(self, start: int, stop: int) -> None:
        """Records that the client skipped the stream identifiers from ``start`` to ``stop``."""
        self._skipped.append(range(start, stop, 2))
        del self._skipped[:-SKIPPED_MAX]

    def may_be_in_flight(self, stream_id: int) -> bool:
        """Returns whether frames of the stream may have been in flight when the server ended it."""
        return stream_id in self._ended_by_server

    def discard_rest(self, stream_id: int) -> None:
        """Discards the rest of a request whose response was sent before the request ended.

        A short rest is discarded without a reset, because some clients treat a reset as a failure.
        Older streams that the next check_time would reset are reset now, in the same write as this
        response.
        """
        if self._due:
            self._reset_due()
        if len(self._discardable) >= REMEMBERED_MAX:
            self.reset(next(iter(self._discardable)), ErrorCode.NO_ERROR)
        self._discardable[stream_id] = DISCARDED_BYTES_MAX
        self._remember(stream_id)

    def reset(self, stream_id: int, code: ErrorCode) -> None:
        """Sends RST_STREAM for the stream."""
        self._discardable.pop(stream_id, None)
        self._out.append(frames.rst_stream(stream_id, code))
        self._remember(stream_id)

    def reset_incomplete(self) -> None:
        """Resets every stream whose request is still incomplete."""
        for stream_id in list(self._discardable):
            self.reset(stream_id, ErrorCode.NO_ERROR)

    def check_time(self) -> bool:
        """Resets streams whose requests were incomplete at the last call and still are. Returns
        whether there were any."""
        has_reset = self._reset_due()
        self._due = list(self._discardable)
        return has_reset

    def _reset_due(self) -> bool:
        due, self._due = self._due, []
        late = [stream_id for stream_id in due if stream_id in self._discardable]
        for stream_id in late:
            self.reset(stream_id, ErrorCode.NO_ERROR)
        return bool(late)

    def _remember(self, stream_id: int) -> None:
        if len(self._ended_by_server) >= REMEMBERED_MAX:
            del self._ended_by_server[next(iter(self._ended_by_server))]
        self._ended_by_server[stream_id] = None

    def forget(self, stream_id: int) -> None:
        """Forgets a stream that the client has ended, too: no more frames are in flight."""
        self._ended_by_server.pop(stream_id, None)
        self._discardable.pop(stream_id, None)

    def discard_headers(self, stream_id: int, flags: int) -> None:
        """Discards HEADERS on a closed stream; the caller must still decode their block.

        Raises:
            ProtocolViolation: no HEADERS can have been in flight.
        """
        if stream_id in self._ended_by_server:
            self._discard(stream_id, flags, 0)
        elif any(stream_id in numbers for numbers in self._skipped):
            raise violation(f"stream {stream_id} after higher ones")
        else:
            reason = f"HEADERS on stream {stream_id}, which ended"
            raise ProtocolViolation(ErrorCode.STREAM_CLOSED, reason)

    def discard_data(self, stream_id: int, flags: int, length: int) -> None:
        """Discards DATA on a closed stream.

        Raises:
            StreamError: no DATA can have been in flight.
        """
        if stream_id not in self._ended_by_server:
            raise StreamError(stream_id, ErrorCode.STREAM_CLOSED, "DATA on a stream that ended")
        self._discard(stream_id, flags, length)

    def _discard(self, stream_id: int, flags: int, length: int) -> None:
        if stream_id not in self._discardable:
            return
        self._discardable[stream_id] -= length
        if flags & END_STREAM:
            del self._discardable[stream_id]
        elif self._discardable[stream_id] < 0:
            self.reset(stream_id, ErrorCode.NO_ERROR)
