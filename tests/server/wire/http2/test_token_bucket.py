"""Tests of the token bucket: its burst, and its refill by time and by requests."""

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


def test_it_is_earned_to_its_most() -> None:
    allowance = TokenBucket(3, 0)
    for _ in range(3):
        assert allowance.try_take()
    allowance.refill(2)
    assert [allowance.try_take() for _ in range(3)] == [True, True, False]
    allowance.refill(100)
    assert [allowance.try_take() for _ in range(4)] == [True, True, True, False]
