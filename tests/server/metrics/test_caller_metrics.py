"""Tests of requests by caller: sums over workers, and a bound on the number of names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from embedserve.metrics.caller_metrics import CALLERS_MAX, OTHERS, CallerMetrics, caller_cells
from embedserve.metrics.shared_counters import SharedCounters, WorkerCounters

OUTCOMES = ("OK", "INTERNAL")


class Asking:
    """Callers, and their request counts since the last flush."""

    def __init__(self) -> None:
        self.known: frozenset[str] = frozenset()
        self.counts: dict[str, Counter[str]] = {}

    def ask(self, name: str, outcome: str = "OK", times: int = 1) -> None:
        if name not in self.known:
            self.known |= {name}
        self.counts.setdefault(name, Counter())[outcome] += times

    def names(self) -> frozenset[str]:
        return self.known

    def take_counts(self) -> list[tuple[str, Mapping[str, int]]]:
        counts, self.counts = self.counts, {}
        return list(counts.items())


class CountedName(str):
    """A name that counts how often it is encoded, which happens when it is hashed for a key."""

    encoded = 0

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        CountedName.encoded += 1
        return super().encode(encoding, errors)


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
    asking.known -= {"caller-7"}
    asking.ask("new")
    found = totals(metrics)
    assert found["new", "OK"] == 1
    assert ("new", "INTERNAL") not in found
    assert ("caller-7", "INTERNAL") not in found
    assert found["caller-8", "INTERNAL"] == 1
    assert OTHERS not in {name for name, _ in found}


def test_names_past_the_most_are_hashed_once_for_each_token_file() -> None:
    """Checks that the cost of a flush, which runs on the event loop, is not names times callers."""
    metrics, asking = counting(SharedCounters(1, caller_cells(OUTCOMES)), 0)
    names = [CountedName(f"caller-{number}") for number in range(1000)]
    asking.known = frozenset(names)

    def hashed_by_flush() -> int:
        for name in names:
            asking.ask(name)
        before = CountedName.encoded
        metrics.flush()
        return CountedName.encoded - before

    assert hashed_by_flush() <= 3 * len(names)  # to adopt, to find and to claim
    assert hashed_by_flush() == 0
    asking.known = frozenset(names)  # the file was read again
    assert hashed_by_flush() <= 3 * len(names)
    assert totals(metrics)[OTHERS, "OK"] == 3 * (len(names) - CALLERS_MAX)


def test_a_name_past_the_most_gets_an_entry_once_others_are_gone() -> None:
    metrics, asking = counting(SharedCounters(1, caller_cells(OUTCOMES)), 0)
    names = [f"caller-{number}" for number in range(CALLERS_MAX + 1)]
    for name in names:
        asking.ask(name)
    assert totals(metrics)[OTHERS, "OK"] == 1
    late = names[-1]
    asking.ask(late)
    assert totals(metrics)[OTHERS, "OK"] == 2
    asking.known -= {*names[:100]}
    asking.ask(late, times=5)
    found = totals(metrics)
    assert found[late, "OK"] == 5
    assert found[OTHERS, "OK"] == 2
    assert len(found) == CALLERS_MAX + 1 - 100 + 1
