"""Tests of request ids: a caller's id is used unchanged, or not at all."""

import pytest

from embedserve.tracing.request_id import ID_BYTES_MAX, request_id_of, usable_id


@pytest.mark.parametrize("given", [b"7", b"a/B-c_9:{}\"'~!", b"x" * ID_BYTES_MAX])
def test_printable_request_ids_are_kept(given: bytes) -> None:
    assert usable_id(given) == request_id_of(given) == given


@pytest.mark.parametrize(
    "given",
    [None, b"", b"a b", b"a\tb", b"a\nb", b"a\0", b"\x7f", b"\xc3\xa9", b"x" * (ID_BYTES_MAX + 1)],
)
def test_missing_or_invalid_request_ids_are_replaced_by_generated_ids(given: bytes | None) -> None:
    assert usable_id(given) == b""
    first, second = request_id_of(given), request_id_of(given)
    assert first != second
    assert usable_id(first) == first
    assert len(first) == 32
