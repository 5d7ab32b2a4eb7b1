"""How much a client may do that costs us and asks nothing: a few at once, and some each second."""

from __future__ import annotations

from time import perf_counter

IDLE_WORK_MAX, IDLE_WORK_PER_SECOND = 1000, 100
"""Of resets, pings, settings and such: at once, and in the long run."""


class TokenBucket:
    """Runs out where a client does one thing too often, and fills up again with time."""

    __slots__ = ("_at_s", "_left", "_most", "_per_second")

    def __init__(
        self, most: float = IDLE_WORK_MAX, per_second: float = IDLE_WORK_PER_SECOND
    ) -> None:
        self._left = self._most = most
        self._per_second = per_second
        self._at_s = perf_counter()

    def try_take(self, count: int = 1) -> bool:
        """Takes so many; False: there are none left."""
        self._left -= count
        if self._left >= 0:
            return True
        now_s = perf_counter()
        self._left = min(self._most, self._left + (now_s - self._at_s) * self._per_second)
        self._at_s = now_s
        return self._left >= 0

    def refill(self, count: int) -> None:
        """More, for what asked something."""
        self._left = min(self._most, self._left + count)
