"""Tests of the timer queue: which timers it starts, and which deadlines it handles when they
fire."""

from dataclasses import dataclass

import pytest
from shard_client.fake_shards import FakeTime

from embedserve.shard_client.timer_queue import LATE_S, TICK_S, TimerQueue


@dataclass
class Item:
    name: str
    handled: list[str]
    is_over: bool = False
    fails: bool = False

    def on_due(self, now_s: float) -> None:
        self.handled.append(self.name)
        if self.fails:
            raise RuntimeError(self.name)


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


@pytest.fixture
def queue(time: FakeTime) -> TimerQueue:
    return TimerQueue(time.clock, time.call_later)


def timers(time: FakeTime) -> list[float]:
    """Returns the times of the timers that are not cancelled."""
    return [one.at_s for one in time.timers if not one.is_cancelled]


def test_timer_is_that_of_the_earliest_deadline(time: FakeTime, queue: TimerQueue) -> None:
    handled: list[str] = []
    queue.push(1000.5, Item("a", handled), time.now_s)
    queue.push(1000.7, Item("b", handled), time.now_s)
    queue.push(1000.5 - TICK_S / 2, Item("c", handled), time.now_s)  # too little earlier
    assert timers(time) == [1000.5]
    queue.push(1000.0, Item("d", handled), time.now_s)
    assert timers(time) == [1000 + TICK_S]
    time.advance(TICK_S)
    assert handled == ["d"]
    assert timers(time) == [pytest.approx(1000.5 - TICK_S / 2)]
    time.advance(0.5)
    assert handled == ["d", "c", "a"]
    time.advance(0.2)
    assert handled == ["d", "c", "a", "b"]
    assert not timers(time)


def test_items_that_are_over_are_dropped(time: FakeTime, queue: TimerQueue) -> None:
    handled: list[str] = []
    for name, is_over in {"a": False, "b": True, "c": False, "d": True}.items():
        queue.push(1000.5, Item(name, handled, is_over), time.now_s)
    queue.push(1001.0, Item("later, over", handled, is_over=True), time.now_s)
    time.advance(0.5)
    assert handled == ["a", "c"]
    assert not timers(time)


def test_late_timer_lets_replies_be_read_first(time: FakeTime, queue: TimerQueue) -> None:
    handled: list[str] = []
    queue.push(1000.5, Item("a", handled), time.now_s)
    time.now_s = 1000.5 + 2 * LATE_S
    time.advance(0)
    assert not handled
    assert timers(time) == [time.now_s + TICK_S]
    time.now_s = 1002.0  # late again
    time.advance(0)
    assert handled == ["a"]


def test_failing_item_is_logged_and_the_others_are_handled(
    time: FakeTime, queue: TimerQueue, caplog: pytest.LogCaptureFixture
) -> None:
    handled: list[str] = []
    queue.push(1000.5, Item("a", handled, fails=True), time.now_s)
    queue.push(1000.5, Item("b", handled), time.now_s)
    time.advance(0.5)
    assert handled == ["a", "b"]
    assert "RuntimeError: a" in caplog.text
