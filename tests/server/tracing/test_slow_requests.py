"""Tests of the slowest requests: a few of the last minutes. Fields are computed only for kept
ones."""

import random
from unittest.mock import Mock

import pytest

from embedserve.tracing.slow_requests import KEPT_MAX, KEPT_S, SlowRequests


class FakeClock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def kept_ids(slow: SlowRequests) -> list[int]:
    return [one["request_id"] for one in slow.fields()]


def test_slowest_requests_are_kept_and_listed_first(clock: FakeClock) -> None:
    slow = SlowRequests(clock)
    order = list(range(10 * KEPT_MAX))
    random.Random(1).shuffle(order)
    for one in order:
        slow.add(one / 10, lambda one=one: {"request_id": one})  # type: ignore[misc]
    assert kept_ids(slow) == sorted(order, reverse=True)[:KEPT_MAX]
    assert slow.fields()[0]["when"].endswith("+00:00")


def test_fields_are_not_computed_for_a_request_that_is_not_kept(clock: FakeClock) -> None:
    slow = SlowRequests(clock)
    for one in range(KEPT_MAX):
        slow.add(2.0, lambda one=one: {"request_id": one})  # type: ignore[misc]
    slow.add(2.0, Mock(side_effect=AssertionError("it was described")))
    assert kept_ids(slow) == list(range(KEPT_MAX))


def test_expired_request_is_replaced(clock: FakeClock) -> None:
    slow = SlowRequests(clock)
    slow.add(9.0, lambda: {"request_id": 1})
    clock.now_s += KEPT_S - 1
    slow.add(1.0, lambda: {"request_id": 2})
    assert kept_ids(slow) == [1, 2]
    clock.now_s += 1
    assert kept_ids(slow) == [2]


def test_expired_requests_leave_room_for_faster_ones(clock: FakeClock) -> None:
    slow = SlowRequests(clock)
    for one in range(KEPT_MAX):
        slow.add(9.0, lambda one=one: {"request_id": one})  # type: ignore[misc]
    clock.now_s += KEPT_S
    slow.add(1.0, lambda: {"request_id": KEPT_MAX})
    assert kept_ids(slow) == [KEPT_MAX]
