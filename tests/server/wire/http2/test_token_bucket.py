"""Tests of the token bucket: its burst, and its refill by time."""

from __future__ import annotations

import pytest

from embedserve.wire.http2.token_bucket import TokenBucket


@pytest.mark.parametrize("most", [1, 5])
def test_it_runs_out(most: int) -> None:
    allowance = TokenBucket(most, 0)
    assert [allowance.try_take() for _ in range(most + 2)] == [True] * most + [False, False]


def test_time_fills_it_up_again_to_its_most() -> None:
    allowance = TokenBucket(3, 1e12)
    assert all(allowance.try_take() for _ in range(1000))
