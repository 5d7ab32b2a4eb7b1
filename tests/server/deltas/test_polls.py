"""Tests of poll schedules: each follower backs off by itself, and an unexpected error affects it
alone."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from embedserve.deltas.followed_lines import RETRY_S_MAX, PollSchedule, shortest_poll_s
from embedserve.deltas.follower import DeltaFollower
from embedserve.deltas.status import STALLED, DeltaStatus
from embedserve_store.errors import StoreError
from embedserve_store.format.delta_manifest import LinePosition

POLL_S = 0.25


class FakeFollower:
    """A follower whose polls have given outcomes."""

    def __init__(self, poll: Callable[[], bool]) -> None:
        self.poll_once = poll


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def schedule_of(
    poll: Callable[[DeltaStatus], bool], poll_s: float = POLL_S
) -> tuple[PollSchedule, DeltaStatus, list[int]]:
    """Returns a schedule, its status and the number of followers that it has created."""
    status, made = DeltaStatus(LinePosition(1, 0, "ab" * 32)), [0]

    def make() -> DeltaFollower:
        made[0] += 1
        # A successor reads why nothing was applied, so that it can log the end of that.
        assert (status.read().state == STALLED) == (made[0] > 1)
        return cast(DeltaFollower, FakeFollower(lambda: poll(status)))

    return PollSchedule(make, status, poll_s), status, made


def waits(schedule: PollSchedule, clock: list[float], polls: int) -> list[float]:
    found = []
    for _ in range(polls):
        schedule.poll_if_due()
        found.append(schedule.due_s - clock[0])
        clock[0] = schedule.due_s
    return found


def test_poll_that_leaves_deltas_is_repeated_immediately(clock: list[float]) -> None:
    outcomes = iter([True, False, False])
    schedule, *_ = schedule_of(lambda _: next(outcomes))
    assert waits(schedule, clock, 3) == [0, POLL_S, POLL_S]


def test_stalled_follower_polls_at_growing_intervals(
    clock: list[float],
) -> None:
    def fail(status: DeltaStatus) -> bool:
        status.write(replace(status.read(), state=STALLED, reason="damaged"))
        return False

    failing, status, _ = schedule_of(fail)
    assert waits(failing, clock, 6) == [0.5, 1, 2, 4, RETRY_S_MAX, RETRY_S_MAX]
    status.write(replace(status.read(), reason=""))
    failing._follower = cast(Any, FakeFollower(lambda: False))
    assert waits(failing, clock, 1) == [POLL_S]
    rarely, *_ = schedule_of(fail, poll_s=60)
    assert waits(rarely, clock, 2) == [60, 60]


def test_follower_is_not_polled_before_its_due_time(clock: list[float]) -> None:
    polls: list[float] = []

    def poll(_: DeltaStatus) -> bool:
        polls.append(clock[0])
        return False

    schedule, *_ = schedule_of(poll)
    schedule.poll_if_due()
    clock[0] += POLL_S / 2
    schedule.poll_if_due()
    assert polls == [100.0]


def test_notifications_hasten_polls_down_to_the_minimum_interval(
    clock: list[float],
) -> None:
    """Checks the bounds during a flood: five polls in each interval, and at most 20 a second."""
    schedule, *_ = schedule_of(lambda _: False)
    schedule.poll_if_due()
    clock[0] += POLL_S / 2
    schedule.hurry()
    assert schedule.due_s <= clock[0]
    schedule.poll_if_due()
    for _ in range(10):
        schedule.hurry()
    assert schedule.due_s == clock[0] + POLL_S / 5
    assert [shortest_poll_s(one) for one in (0.05, 0.25, 60)] == [0.01, 0.05, 0.05]


def test_notifications_do_not_hasten_polls_of_a_stalled_line(clock: list[float]) -> None:
    """Guards against polls that each read a damaged delta of gigabytes again."""

    def fail(status: DeltaStatus) -> bool:
        status.write(replace(status.read(), state=STALLED, reason="damaged"))
        return False

    schedule, *_ = schedule_of(fail)
    waits(schedule, clock, 4)
    schedule.poll_if_due()
    due_s = schedule.due_s
    schedule.hurry()
    assert schedule.due_s == due_s == clock[0] + RETRY_S_MAX


def test_follower_is_recreated_after_an_unexpected_error(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    outcomes = iter([ZeroDivisionError("by zero")])

    def poll(status: DeltaStatus) -> bool:
        if error := next(outcomes, None):
            raise error
        status.write(replace(status.read(), state="following", reason=""))
        return False

    schedule, status, made = schedule_of(poll)
    assert waits(schedule, clock, 1) == [2 * POLL_S]
    now = status.read()
    assert (now.state, now.reason, made) == (STALLED, "ZeroDivisionError: by zero", [1])
    assert "by zero" in caplog.text
    assert waits(schedule, clock, 1) == [POLL_S]
    assert (status.read().state, made) == ("following", [2])


def test_follower_that_cannot_be_recreated_is_tried_again(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    status = DeltaStatus(LinePosition(1, 0, "ab" * 32))
    failures = iter([ZeroDivisionError("by zero"), StoreError("lookups hang")])
    made = [False]

    def fail_once() -> bool:
        if error := next(failures, None):
            raise error
        status.write(replace(status.read(), state="following", reason=""))
        return False

    def make() -> DeltaFollower:
        if made[0] and (error := next(failures, None)):
            raise error
        made[0] = True
        return cast(DeltaFollower, FakeFollower(fail_once))

    schedule = PollSchedule(make, status, POLL_S)
    assert waits(schedule, clock, 2) == [2 * POLL_S, 4 * POLL_S]
    assert status.read().reason == "StoreError: lookups hang"
    assert waits(schedule, clock, 1) == [POLL_S]
    assert status.read().state == "following"
