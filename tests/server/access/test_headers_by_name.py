"""Tests of the headers that authentication reads: repeated ones, and lists in several lines."""

import sys
from types import FrameType
from typing import Any

from embedserve.access.authenticator import headers_by_name
from embedserve.access.client_address import X_FORWARDED_FOR


def test_repeated_single_headers_are_dropped_and_list_headers_joined() -> None:
    headers = [(b"a", b"1"), (X_FORWARDED_FOR, b"x"), (b"b", b"2"), (b"a", b"1"), (b"a", b"3")]
    assert headers_by_name(headers) == {b"a": b"", X_FORWARDED_FOR: b"x", b"b": b"2"}
    headers += [(X_FORWARDED_FOR, b"y, z"), (b"forwarded", b"for=u"), (X_FORWARDED_FOR, b"")]
    expected = {b"a": b"", X_FORWARDED_FOR: b"x, y, z, ", b"b": b"2", b"forwarded": b"for=u"}
    assert headers_by_name(headers) == expected


def test_lines_of_a_list_header_are_joined_once() -> None:
    """Guards against joining each line to all lines before it, which takes quadratic time."""
    lines = [b"%d" % i for i in range(1300)]
    built: list[object] = [None]

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code is not headers_by_name.__code__:
            return None
        value = frame.f_locals.get("found", {}).get(X_FORWARDED_FOR)
        if value is not built[-1]:
            built.append(value)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        found = headers_by_name([(X_FORWARDED_FOR, line) for line in lines])
    finally:
        sys.settrace(before)
    assert found[X_FORWARDED_FOR] == b", ".join(lines)
    assert built == [None, lines[0], found[X_FORWARDED_FOR]]
