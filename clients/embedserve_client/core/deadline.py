"""Timeouts of calls.

Validates the caller's timeout, falls back to the client's default, and makes the HTTP header that
tells the server. httpx and grpc measure the time.
"""

import math

TIMEOUT_HEADER = "X-Timeout-Ms"


def check_timeout(timeout_s: float | None) -> float | None:
    """Returns timeout_s unchanged; None is no limit. Raises ValueError unless it is positive and
    finite."""
    if timeout_s is not None and not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise ValueError(f"timeout_s: {timeout_s!r} is not a positive, finite number of seconds")
    return timeout_s


def timeout_of(call_s: float | None, default_s: float | None) -> float | None:
    """Returns the time limit of one call in seconds: its own, or the client's default."""
    return default_s if call_s is None else check_timeout(call_s)


def timeout_headers(timeout_s: float | None) -> dict[str, str]:
    """Returns the header with the timeout in whole milliseconds, rounded up so that it is never
    0."""
    return {} if timeout_s is None else {TIMEOUT_HEADER: str(math.ceil(timeout_s * 1000))}
