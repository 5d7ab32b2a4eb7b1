"""Tests of traceparent: it is parsed as W3C Trace Context says, or ignored."""

import pytest

from embedserve.tracing.trace_context import TRACEPARENT_BYTES_MAX, TraceContext, read_traceparent

TRACE, SPAN = b"4bf92f3577b34da6a3ce929d0e0e4736", b"00f067aa0ba902b7"
TRACE_AND_SPAN = (TRACE.decode(), SPAN.decode())


@pytest.mark.parametrize(
    ("flags", "is_sampled"), [(b"00", False), (b"01", True), (b"02", False), (b"ff", True)]
)
def test_sampled_flag_of_a_traceparent_is_read(flags: bytes, is_sampled: bool) -> None:
    value = b"-".join((b"00", TRACE, SPAN, flags))
    assert read_traceparent(value) == TraceContext(*TRACE_AND_SPAN, is_sampled)


def test_later_traceparent_versions_may_have_more_fields() -> None:
    value = b"-".join((b"cc", TRACE, SPAN, b"01"))
    assert read_traceparent(value + b"-what-comes") == TraceContext(*TRACE_AND_SPAN, True)
    assert read_traceparent(value + b"what-comes") is None


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"00",
        b"-".join((b"00", TRACE, SPAN)),
        b"-".join((b"ff", TRACE, SPAN, b"01")),
        b"-".join((b"00", b"0" * 32, SPAN, b"01")),
        b"-".join((b"00", TRACE, b"0" * 16, b"01")),
        b"-".join((b"00", TRACE.upper(), SPAN, b"01")),
        b"-".join((b"00", TRACE, SPAN, b"01", b"more")),
        b"-".join((b"00", TRACE, SPAN, b"01\n")),
        b"-".join((b"cc", TRACE, SPAN, b"01", b"x" * TRACEPARENT_BYTES_MAX)),
    ],
)
def test_missing_or_malformed_traceparent_is_parsed_as_none(value: bytes | None) -> None:
    assert read_traceparent(value) is None
