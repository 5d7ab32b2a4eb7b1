"""How long a call may take.

Checks the caller's timeout, falls back to the client's, and gives the HTTP header that tells
the server. Never measures time itself: httpx and grpc do.
"""

import math

TIMEOUT_HEADER = "X-Timeout-Ms"


def check_timeout(timeout_s: float | None) -> float | None:
    """timeout_s as given; None is no limit. ValueError unless positive and finite."""
    if timeout_s is not None and not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise ValueError(f"timeout_s: {timeout_s!r} is not a positive, finite number of seconds")
    return timeout_s


def timeout_of(call_s: float | None, default_s: float | None) -> float | None:
    """The limit of one call: its own, else the client's."""
    return default_s if call_s is None else check_timeout(call_s)


def timeout_headers(timeout_s: float | None) -> dict[str, str]:
    """The header with whole milliseconds, rounded up so that it is never 0."""
    return {} if timeout_s is None else {TIMEOUT_HEADER: str(math.ceil(timeout_s * 1000))}
