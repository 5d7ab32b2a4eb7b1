"""Timeouts of calls.

Validates the caller's timeout, falls back to the client's default, and makes the HTTP header with
the timeout for the server. httpx and grpc measure the time of an attempt, `retries` that of all.
"""

import math

TIMEOUT_HEADER = "X-Timeout-Ms"
TIMEOUT_S_MAX = 1e9
"""Seconds of a timeout, at most. Sockets and gRPC count nanoseconds in 64 bits: above 9.2e9 s
sockets raise OverflowError, and calls of gRPC fail at once."""


def check_timeout(timeout_s: float | None) -> float | None:
    """Returns timeout_s unchanged; None is no limit. Raises ValueError unless it is positive and
    at most TIMEOUT_S_MAX."""
    if timeout_s is not None and not 0 < timeout_s <= TIMEOUT_S_MAX:
        raise ValueError(
            f"timeout_s: {timeout_s!r} is not above 0 and at most {TIMEOUT_S_MAX:.0f} seconds; "
            "None is no limit"
        )
    return timeout_s


def timeout_of(call_s: float | None, default_s: float | None) -> float | None:
    """Returns the time limit of one call in seconds: its own, or the client's default."""
    return default_s if call_s is None else check_timeout(call_s)


def timeout_headers(timeout_s: float | None) -> dict[str, str]:
    """Returns the header with the timeout in whole milliseconds, rounded up so that it is never
    0."""
    return {} if timeout_s is None else {TIMEOUT_HEADER: str(math.ceil(timeout_s * 1000))}
