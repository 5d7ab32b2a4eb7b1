"""Tests of quantiles of recent latencies, budgets, and many deadlines on one timer."""

import random

import pytest
from shard_client.fake_shards import FakeTime

from embedserve.shard_client.recent_latency import RecentLatency
from embedserve.shard_client.share_budget import ShareBudget
from embedserve.shard_client.timer_queue import TICK_S, TimerQueue


@pytest.mark.parametrize("scale_s", [1e-3, 20e-3])
def test_hedge_and_hung_delays_follow_the_latency_quantile(scale_s: float) -> None:
    recent = RecentLatency()
    rng = random.Random(1)
    samples = [scale_s * rng.lognormvariate(0, 1) for _ in range(640)]
    for sample in samples:
        recent.add(sample)
    exact_s = sorted(samples)[608]
    assert exact_s * 0.8 <= recent.hedge_s <= exact_s * 1.25
    assert recent.hung_s == pytest.approx(max(0.05, 10 * recent.hedge_s))


def test_delays_have_minima_and_forget_old_latencies() -> None:
    recent = RecentLatency()
    for _ in range(64):
        recent.add(0.0)
    assert (recent.hedge_s, recent.hung_s) == (0.001, 0.05)
    for _ in range(640):
        recent.add(1e9)
    assert recent.hedge_s > 100
    for _ in range(3000):
        recent.add(0.004)
    assert 0.008 <= recent.hedge_s <= 0.0088


def test_budget_is_a_share_plus_a_burst() -> None:
    budget = ShareBudget(0.1)
    assert sum(budget.try_take() for _ in range(100)) == 10
    taken = 0
    for _ in range(1000):
        budget.earn()
        taken += budget.try_take()
    assert 98 <= taken <= 100
    for _ in range(1000):
        budget.earn()
    assert sum(budget.try_take() for _ in range(100)) == 10, "unused calls beyond a burst are lost"
    none = ShareBudget(0)
    none.earn()
    assert not none.try_take()


def test_one_timer_serves_all_deadlines() -> None:
    time = FakeTime()
    queue = TimerQueue(time.clock, time.call_later)
    ran: list[str] = []

    class Item:
        def __init__(self, name: str, again_s: float = 0) -> None:
            self.name, self.again_s, self.is_over = name, again_s, False

        def on_due(self, now_s: float) -> None:
            assert now_s == time.now_s
            ran.append(self.name)
            if self.again_s:
                queue.push(now_s + self.again_s, Item(self.name + "'"), now_s)

    def timers() -> list[float]:
        return [timer.at_s - start_s for timer in time.timers if not timer.is_cancelled]

    start_s = time.now_s
    dropped = Item("dropped")
    for item, due_s, first_s in [
        (Item("c"), 0.3, 0.3),
        (Item("a", 0.1), 0.1, 0.1),
        (dropped, 0.2, 0.1),
        (Item("b"), 0.15, 0.1),
    ]:
        queue.push(start_s + due_s, item, start_s)
        assert timers() == pytest.approx([first_s])
    dropped.is_over = True
    time.advance(0.1 + TICK_S / 2)
    assert ran == ["a"]
    assert timers() == pytest.approx([0.15])
    time.advance(0.5)
    assert ran == ["a", "b", "a'", "c"]


def test_replies_are_read_before_expired_deadlines_of_a_busy_event_loop() -> None:
    time = FakeTime()
    queue = TimerQueue(time.clock, time.call_later)
    ran: list[str] = []

    class Item:
        def __init__(self, name: str) -> None:
            self.name, self.is_over = name, False

        def on_due(self, now_s: float) -> None:
            ran.append(self.name)

    answered, late = Item("answered"), Item("late")
    for item in (answered, late):
        queue.push(time.now_s + 0.1, item, time.now_s)
    for _ in range(2):
        time.now_s += 0.3  # the event loop is busy
        time.advance(0)
        answered.is_over = True  # the reply was read
        queue.push(time.now_s - 0.01, Item("earlier"), time.now_s)
        assert ran == []
        time.advance(0.001)
        assert sorted(ran) == ["earlier", "late"]
        ran.clear()
        queue.push(time.now_s + 0.1, late, time.now_s)


def test_exception_at_a_deadline_keeps_the_other_deadlines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    time = FakeTime()
    queue = TimerQueue(time.clock, time.call_later)
    ran: list[float] = []

    class Item:
        is_over = False

        def __init__(self, is_wrong: bool) -> None:
            self.is_wrong = is_wrong

        def on_due(self, now_s: float) -> None:
            if self.is_wrong:
                raise RuntimeError("item")
            ran.append(now_s)

    for is_wrong in (True, False):
        queue.push(time.now_s + 1, Item(is_wrong), time.now_s)
    time.advance(2)
    assert len(ran) == 1
    assert "a deadline could not be processed" in caplog.text
