"""Tests of the token bucket: its burst, and its refill by time."""

from __future__ import annotations

import pytest

from embedserve.wire.http2.token_bucket import TokenBucket


@pytest.mark.parametrize("capacity", [1, 5])
def test_bucket_is_empty_after_its_capacity(capacity: int) -> None:
    bucket = TokenBucket(capacity, 0)
    assert [bucket.try_take() for _ in range(capacity + 2)] == [True] * capacity + [False, False]


def test_bucket_refills_over_time() -> None:
    bucket = TokenBucket(3, 1e12)
    assert all(bucket.try_take() for _ in range(1000))
