"""Tests of the timer queue: which timers it starts, and which deadlines it handles when they
fire."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from embedserve.shard_client.timer_queue import LATE_S, TICK_S, TimerQueue


@dataclass
class FakeTimer:
    """A timer of a loop whose time is ``Loop.now_s``."""

    delay_s: float
    run: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass
class Loop:
    now_s: float = 100.0
    timers: list[FakeTimer] = field(default_factory=list)

    def call_later(self, delay_s: float, run: Callable[[], None]) -> FakeTimer:
        self.timers.append(FakeTimer(delay_s, run))
        return self.timers[-1]

    def fire(self, now_s: float) -> None:
        """Fires the only timer that is not cancelled, at ``now_s``."""
        (timer,) = [one for one in self.timers if not one.is_cancelled]
        self.timers.clear()
        self.now_s = now_s
        timer.run()


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
def loop() -> Loop:
    return Loop()


@pytest.fixture
def queue(loop: Loop) -> TimerQueue:
    return TimerQueue(lambda: loop.now_s, loop.call_later)  # type: ignore[arg-type]


def test_timer_is_that_of_the_earliest_deadline(loop: Loop, queue: TimerQueue) -> None:
    handled: list[str] = []
    queue.push(100.5, Item("a", handled), 100.0)
    queue.push(100.7, Item("b", handled), 100.0)
    queue.push(100.5 - TICK_S / 2, Item("c", handled), 100.0)  # too little earlier
    assert [one.delay_s for one in loop.timers] == [0.5]
    queue.push(100.0, Item("d", handled), 100.0)
    assert [(one.delay_s, one.is_cancelled) for one in loop.timers] == [
        (0.5, True),
        (TICK_S, False),
    ]
    loop.fire(100.001)
    assert handled == ["d"]
    assert [one.delay_s for one in loop.timers] == [pytest.approx(0.4985)]
    loop.fire(100.5)
    assert handled == ["d", "c", "a"]
    loop.fire(100.7)
    assert handled == ["d", "c", "a", "b"]
    assert not loop.timers


def test_items_that_are_over_are_dropped(loop: Loop, queue: TimerQueue) -> None:
    handled: list[str] = []
    for name, is_over in {"a": False, "b": True, "c": False, "d": True}.items():
        queue.push(100.5, Item(name, handled, is_over), 100.0)
    queue.push(101.0, Item("later, over", handled, is_over=True), 100.0)
    loop.fire(100.5)
    assert handled == ["a", "c"]
    assert not loop.timers


def test_late_timer_lets_replies_be_read_first(loop: Loop, queue: TimerQueue) -> None:
    handled: list[str] = []
    queue.push(100.5, Item("a", handled), 100.0)
    loop.fire(100.5 + 2 * LATE_S)
    assert not handled
    assert [one.delay_s for one in loop.timers] == [TICK_S]
    loop.fire(102.0)
    assert handled == ["a"]


def test_failing_item_is_logged_and_the_others_are_handled(
    loop: Loop, queue: TimerQueue, caplog: pytest.LogCaptureFixture
) -> None:
    handled: list[str] = []
    queue.push(100.5, Item("a", handled, fails=True), 100.0)
    queue.push(100.5, Item("b", handled), 100.0)
    loop.fire(100.5)
    assert handled == ["a", "b"]
    assert "RuntimeError: a" in caplog.text
