"""Token bucket against HTTP/2 floods: resets, pings, settings and empty frames."""

from __future__ import annotations

from time import perf_counter

IDLE_WORK_MAX, IDLE_WORK_PER_SECOND = 1000, 100
"""Burst of resets, pings, settings and similar frames, and their sustained rate per second."""


class TokenBucket:
    """A token bucket that refills with time. The refill is computed only when it runs out."""

    __slots__ = ("_at_s", "_left", "_most", "_per_second")

    def __init__(
        self, most: float = IDLE_WORK_MAX, per_second: float = IDLE_WORK_PER_SECOND
    ) -> None:
        self._left = self._most = most
        self._per_second = per_second
        self._at_s = perf_counter()

    def try_take(self, count: int = 1) -> bool:
        """Takes ``count`` tokens. Returns False if the bucket has run out."""
        self._left -= count
        if self._left >= 0:
            return True
        now_s = perf_counter()
        self._left = min(self._most, self._left + (now_s - self._at_s) * self._per_second)
        self._at_s = now_s
        return self._left >= 0
