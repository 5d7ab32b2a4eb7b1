"""When a call that failed is tried again: another time soon, never past its deadline.

Tried again is what another moment may answer, Overloaded and Unavailable. Between two tries lies
what the server asks for (Retry-After), and a pause on top that doubles from try to try and is
drawn at random up to its length, so that callers who failed together do not come back together
("full jitter": M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015).
It waits for nothing itself: the clients do.
"""

import random
import time

from embedserve_client.errors import EmbedServeClientError, Overloaded, Unavailable

FIRST_PAUSE_S = 0.05
PAUSE_S_MAX = 2.0
RETRY_AFTER_S_MAX = 60.0
"""A server, or a proxy, that asks for more is not asked again."""
LEFT_S_MIN = 0.001
"""Of a call's time, when its last try begins: a timeout must be positive."""


def check_retries(retries: int) -> int:
    """retries as given; ValueError where it is negative or no whole number."""
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
        raise ValueError(f"retries: {retries!r} is not a whole number, 0 or more")
    return retries


class RetryState:
    """Those of one call."""

    def __init__(self, retries: int, timeout_s: float | None) -> None:
        """timeout_s: of all tries together; None is no limit."""
        self._retries = retries
        self._end_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._pause_s = FIRST_PAUSE_S

    def left_s(self) -> float | None:
        """Of the call's time; None: no limit."""
        if self._end_s is None:
            return None
        return max(LEFT_S_MIN, self._end_s - time.monotonic())

    def pause_s(self, error: EmbedServeClientError) -> float | None:
        """How long to wait before the next try; None: ``error`` is the call's end."""
        if not self._retries or not isinstance(error, Overloaded | Unavailable):
            return None
        asked_s = error.retry_after_s or 0.0
        pause_s = asked_s + random.uniform(0.0, self._pause_s)
        left_s = self.left_s()
        if asked_s > RETRY_AFTER_S_MAX or (left_s is not None and pause_s >= left_s):
            return None
        self._retries -= 1
        self._pause_s = min(PAUSE_S_MAX, 2 * self._pause_s)
        return pause_s
