"""Token buckets against HTTP/2 floods: resets, pings, settings and empty frames."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from embedserve.wire.http2.frame_writer import FrameWriter

ABUSE_TOKENS_MAX, ABUSE_TOKENS_PER_S = 1000, 100
"""Resets, or frames without a request such as pings and settings, that a client may send at once,
and each second in the long run. Each takes a token."""


class TokenBucket:
    """A token bucket that refills with time. The refill is computed only when it runs out."""

    __slots__ = ("_at_s", "_capacity", "_left", "_per_second")

    def __init__(
        self, capacity: float = ABUSE_TOKENS_MAX, per_second: float = ABUSE_TOKENS_PER_S
    ) -> None:
        self._left = self._capacity = capacity
        self._per_second = per_second
        self._at_s = perf_counter()

    def try_take(self, count: int = 1) -> bool:
        """Takes ``count`` tokens. Returns False, and takes none, if the bucket has run out."""
        if self._left < count:
            self._left = min(self._capacity, self._left + self._take_refill())
            if self._left < count:
                return False
        self._left -= count
        return True

    def _take_refill(self) -> float:
        """Returns the tokens that were earned since the last call."""
        since_s, self._at_s = self._at_s, perf_counter()
        return (self._at_s - since_s) * self._per_second


class ResponseTokenBucket(TokenBucket):
    """A token bucket of one connection that its responses refill, too."""

    __slots__ = ("_frames_seen", "_per_frame", "_writer")

    def __init__(self, writer: FrameWriter, per_frame: int) -> None:
        """
        Args:
            writer: counter of the response frames.
            per_frame: tokens that one of these frames refills.
        """
        super().__init__()
        self._writer = writer
        self._per_frame = per_frame
        self._frames_seen = writer.response_frames

    def _take_refill(self) -> float:
        seen, self._frames_seen = self._frames_seen, self._writer.response_frames
        return super()._take_refill() + (self._frames_seen - seen) * self._per_frame
