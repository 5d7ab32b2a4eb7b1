"""Retry policy of a call: when to retry, after which pause, and never past the deadline.

Overloaded and Unavailable are retried, because a later attempt may succeed. The pause before a
retry is the server's Retry-After plus a random part. The bound of the random part doubles with each
retry, so that callers that failed together do not return together ("full jitter": M. Brooker,
"Exponential Backoff And Jitter", AWS Architecture Blog, 2015). `retry_loop` does the waiting.
"""

import random
import time

from embedserve_client.errors import EmbedServeClientError, Overloaded, Unavailable

FIRST_PAUSE_S, PAUSE_S_MAX = 0.05, 2.0
"""Seconds of the bound of the random part: for the first retry, and for any."""
RETRY_AFTER_S_MAX = 60.0
"""Seconds of Retry-After up to which a call is retried. A server or proxy that requests more ends
the call."""
LEFT_S_MIN = 0.001
"""Seconds that the last attempt of a call gets at least, because a timeout must be positive."""


def check_retries(retries: int) -> int:
    """Returns retries unchanged; raises ValueError if it is negative or not an integer."""
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
        raise ValueError(f"retries: {retries!r} is not a whole number, 0 or more")
    return retries


class RetryState:
    """Backoff state of one call: the retries left, the deadline and the next pause."""

    def __init__(self, retries: int, timeout_s: float | None) -> None:
        """Starts the clock of the call.

        Args:
            timeout_s: seconds for all attempts together; None is no limit.
        """
        self._retries = retries
        self._end_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._pause_s = FIRST_PAUSE_S

    def left_s(self) -> float | None:
        """Returns the seconds left of the call's timeout, at least LEFT_S_MIN; None is no limit."""
        if self._end_s is None:
            return None
        return max(LEFT_S_MIN, self._end_s - time.monotonic())

    def pause_s(self, error: EmbedServeClientError) -> float | None:
        """Returns the seconds to wait before the next attempt; None if the call must fail with
        ``error``."""
        if not self._retries or not isinstance(error, Overloaded | Unavailable):
            return None
        requested_s = error.retry_after_s or 0.0
        pause_s = requested_s + random.uniform(0.0, self._pause_s)
        left_s = self.left_s()
        if requested_s > RETRY_AFTER_S_MAX or (left_s is not None and pause_s >= left_s):
            return None
        self._retries -= 1
        self._pause_s = min(PAUSE_S_MAX, 2 * self._pause_s)
        return pause_s
