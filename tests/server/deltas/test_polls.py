"""Tests of poll schedules: each follower backs off by itself, and an unexpected error affects it
alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from embedserve.deltas.applier_process import RETRY_S_MAX, PollSchedule, shortest_poll_s
from embedserve.deltas.follower import DeltaFollower
from embedserve.deltas.status import STALLED, DeltaStatus
from embedserve_store.format.delta_manifest import LinePosition

POLL_S = 0.25


class Follower:
    """A follower whose polls have given outcomes."""

    def __init__(self, look: Callable[[], bool]) -> None:
        self.poll_once = look


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def schedule_of(look: Callable[[DeltaStatus], bool]) -> tuple[PollSchedule, DeltaStatus, list[int]]:
    """Returns a schedule, its status and the number of followers that it has created."""
    status, made = DeltaStatus(LinePosition(1, 0, "ab" * 32)), [0]

    def make() -> DeltaFollower:
        made[0] += 1
        return cast(DeltaFollower, Follower(lambda: look(status)))

    return PollSchedule(make, status, POLL_S), status, made


def waits(schedule: PollSchedule, clock: list[float], looks: int) -> list[float]:
    found = []
    for _ in range(looks):
        schedule.poll_if_due()
        found.append(schedule.due_s - clock[0])
        clock[0] = schedule.due_s
    return found


def test_a_look_that_leaves_more_is_repeated_at_once(clock: list[float]) -> None:
    outcomes = iter([True, False, False])
    schedule, *_ = schedule_of(lambda _: next(outcomes))
    assert waits(schedule, clock, 3) == [0, POLL_S, POLL_S]


def test_a_follower_that_fails_looks_ever_less_often_whatever_others_do(
    clock: list[float],
) -> None:
    def fail(status: DeltaStatus) -> bool:
        status.write(replace(status.read(), state=STALLED, reason="damaged"))
        return False

    failing, status, _ = schedule_of(fail)
    assert waits(failing, clock, 6) == [0.5, 1, 2, 4, RETRY_S_MAX, RETRY_S_MAX]
    status.write(replace(status.read(), reason=""))
    failing._follower = cast(Any, Follower(lambda: False))
    assert waits(failing, clock, 1) == [POLL_S]


def test_nothing_is_looked_for_before_it_is_due(clock: list[float]) -> None:
    looks: list[float] = []

    def look(_: DeltaStatus) -> bool:
        looks.append(clock[0])
        return False

    schedule, *_ = schedule_of(look)
    schedule.poll_if_due()
    clock[0] += POLL_S / 2
    schedule.poll_if_due()
    assert looks == [100.0]


def test_notifications_hasten_a_look_but_not_below_the_smallest_interval(
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


def test_notifications_hasten_no_look_while_no_delta_can_be_applied(clock: list[float]) -> None:
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


def test_after_an_unexpected_error_the_follower_is_made_anew(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    outcomes = iter([ZeroDivisionError("by zero")])

    def look(status: DeltaStatus) -> bool:
        if error := next(outcomes, None):
            raise error
        status.write(replace(status.read(), state="following", reason=""))
        return False

    schedule, status, made = schedule_of(look)
    assert waits(schedule, clock, 1) == [2 * POLL_S]
    now = status.read()
    assert (now.state, now.reason, made) == (STALLED, "ZeroDivisionError: by zero", [2])
    assert "by zero" in caplog.text
    assert waits(schedule, clock, 1) == [POLL_S]
    assert (status.read().state, made) == ("following", [2])
