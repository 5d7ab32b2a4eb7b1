"""Requests by caller: sums over workers, bounded whatever names there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from embedserve.metrics.caller_metrics import CALLERS_MAX, OTHERS, CallerMetrics, caller_cells
from embedserve.metrics.shared_counters import SharedCounters, WorkerCounters

OUTCOMES = ("OK", "INTERNAL")


class Asking:
    """Callers, and what they asked since the last time."""

    def __init__(self) -> None:
        self.known: list[str] = []
        self.counts: dict[str, Counter[str]] = {}

    def ask(self, name: str, outcome: str = "OK", times: int = 1) -> None:
        self.known += [] if name in self.known else [name]
        self.counts.setdefault(name, Counter())[outcome] += times

    def names(self) -> list[str]:
        return self.known

    def take_counts(self) -> list[tuple[str, Mapping[str, int]]]:
        counts, self.counts = self.counts, {}
        return list(counts.items())


def counting(shared_counters: SharedCounters, worker: int) -> tuple[CallerMetrics, Asking]:
    metrics, asking = CallerMetrics(WorkerCounters(shared_counters, worker), OUTCOMES), Asking()
    metrics.callers = asking
    return metrics, asking


def totals(metrics: CallerMetrics) -> dict[tuple[str, str], object]:
    metrics.flush()
    return {(labels[0], labels[1]): count for _, labels, count in metrics.samples()}


def test_workers_that_saw_callers_in_another_order_are_summed() -> None:
    slots = SharedCounters(2, caller_cells(OUTCOMES))
    first, of_first = counting(slots, 0)
    second, of_second = counting(slots, 1)
    of_first.ask("a", times=2)
    of_first.ask("b", "INTERNAL")
    of_second.ask("b", times=5)
    of_second.ask("a")
    second.flush()
    assert totals(first) == {("a", "OK"): 3, ("b", "INTERNAL"): 1, ("b", "OK"): 5}
    of_first.ask("a")
    assert totals(first)["a", "OK"] == 4


def test_a_worker_that_is_replaced_counts_on() -> None:
    slots = SharedCounters(1, caller_cells(OUTCOMES))
    before, of_before = counting(slots, 0)
    of_before.ask("a")
    of_before.ask("b")
    before.flush()
    after, of_after = counting(slots, 0)
    of_after.ask("b")
    of_after.ask("a")
    assert totals(after) == {("a", "OK"): 2, ("b", "OK"): 2}


def test_names_past_the_most_are_counted_together() -> None:
    metrics, asking = counting(SharedCounters(1, caller_cells(OUTCOMES)), 0)
    for number in range(CALLERS_MAX + 100):
        asking.ask(f"caller-{number}", times=2)
    found = totals(metrics)
    assert len(found) == CALLERS_MAX + 1
    assert found.pop((OTHERS, "OK")) == 200
    assert set(found.values()) == {2}


def test_the_place_of_a_name_that_is_gone_is_taken_from_zero() -> None:
    metrics, asking = counting(SharedCounters(1, caller_cells(OUTCOMES)), 0)
    for number in range(CALLERS_MAX):
        asking.ask(f"caller-{number}", "INTERNAL")
    metrics.flush()
    asking.known.remove("caller-7")
    asking.ask("new")
    found = totals(metrics)
    assert found["new", "OK"] == 1
    assert ("new", "INTERNAL") not in found
    assert ("caller-7", "INTERNAL") not in found
    assert found["caller-8", "INTERNAL"] == 1
    assert OTHERS not in {name for name, _ in found}
