"""Trace context of a request: the traceparent header of W3C Trace Context, level 1."""

from __future__ import annotations

import re
from dataclasses import dataclass

TRACEPARENT = b"traceparent"
_SAMPLED = 1
_PATTERN = re.compile(
    rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]*)?"
)
TRACEPARENT_BYTES_MAX = 256
"""Bytes of a traceparent header. Version 00 has 55 bytes; later versions may be longer."""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Position of a request in a trace.

    Attributes:
        trace_id: id of the trace, 32 hex digits.
        parent_id: id of the caller's span, 16 hex digits; "" if the trace starts here.
        is_sampled: sampled flag: whether the caller records its spans.
    """

    trace_id: str
    parent_id: str
    is_sampled: bool


def read_traceparent(value: bytes | None) -> TraceContext | None:
    """Parses a traceparent header; returns None if it is absent or malformed."""
    if not value or len(value) > TRACEPARENT_BYTES_MAX:
        return None
    found = _PATTERN.fullmatch(value)
    if found is None or (found[1] == b"00" and found[5]):
        return None
    is_sampled = bool(int(found[4], 16) & _SAMPLED)
    return TraceContext(found[2].decode(), found[3].decode(), is_sampled)


def sampled_traceparent(trace_id: str, span_id: str) -> bytes:
    """Returns the traceparent header for calls below a recorded span.

    Args:
        trace_id: id of the trace, 32 hex digits.
        span_id: id of the span, 16 hex digits.
    """
    return f"00-{trace_id}-{span_id}-{_SAMPLED:02x}".encode()
