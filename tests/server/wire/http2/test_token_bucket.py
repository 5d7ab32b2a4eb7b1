"""Tests of the token bucket: its burst, and its refill by time."""

import pytest

from embedserve.wire.http2.frame_writer import FrameWriter
from embedserve.wire.http2.token_bucket import ABUSE_TOKENS_MAX, ResponseTokenBucket, TokenBucket


@pytest.mark.parametrize("capacity", [1, 5])
def test_bucket_is_empty_after_its_capacity(capacity: int) -> None:
    bucket = TokenBucket(capacity, 0)
    assert [bucket.try_take() for _ in range(capacity + 2)] == [True] * capacity + [False, False]


def test_bucket_refills_over_time() -> None:
    bucket = TokenBucket(3, 1e12)
    assert all(bucket.try_take() for _ in range(1000))


def test_rejected_tries_take_nothing_from_the_refill_of_a_response() -> None:
    writer = FrameWriter()
    bucket = ResponseTokenBucket(writer, ABUSE_TOKENS_MAX)
    taken = [bucket.try_take() for _ in range(6 * ABUSE_TOKENS_MAX)]
    assert taken[ABUSE_TOKENS_MAX - 1]
    assert not all(taken)
    writer.response_frames += 1
    assert bucket.try_take()
