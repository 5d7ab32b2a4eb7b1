"""Tests of timeouts: which timeout applies to a call, and which deadline the server gets."""

import pytest

from embedserve_client.core.deadline import check_timeout, timeout_headers, timeout_of


@pytest.mark.parametrize("timeout_s", [0, -1.5, 1e10, float("inf"), float("nan")])
def test_invalid_timeout_is_rejected(timeout_s: float) -> None:
    with pytest.raises(ValueError, match=f"timeout_s: {timeout_s!r} is not"):
        check_timeout(timeout_s)


def test_timeout_of_the_call_overrides_the_default() -> None:
    assert timeout_of(0.5, 10.0) == 0.5
    assert timeout_of(None, 10.0) == 10.0
    assert timeout_of(None, None) is None


@pytest.mark.parametrize(
    ("timeout_s", "headers"),
    [(0.25, {"X-Timeout-Ms": "250"}), (0.0001, {"X-Timeout-Ms": "1"}), (None, {})],
)
def test_timeout_header_is_in_whole_milliseconds(
    timeout_s: float | None, headers: dict[str, str]
) -> None:
    assert timeout_headers(timeout_s) == headers
