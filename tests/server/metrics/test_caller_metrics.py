"""Tests of requests by caller: sums over workers, and a bound on the number of names."""

from collections import Counter
from collections.abc import Mapping

from embedserve.metrics.caller_metrics import CALLERS_MAX, OTHERS, CallerMetrics
from embedserve.metrics.shared_counters import SharedCounters, WorkerCounters


class FakeCallers:
    """Callers, and their request counts since the last flush."""

    def __init__(self) -> None:
        self.names: frozenset[str] = frozenset()
        self.counts: dict[str, Counter[str]] = {}

    def count_request(self, name: str, outcome: str = "OK", times: int = 1) -> None:
        if name not in self.names:
            self.names |= {name}
        self.counts.setdefault(name, Counter())[outcome] += times

    def take_counts(self) -> list[tuple[str, Mapping[str, int]]]:
        counts, self.counts = self.counts, {}
        return list(counts.items())


class CountedName(str):
    """A name that counts how often it is encoded, which happens when it is hashed for a key."""

    encoded = 0

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        CountedName.encoded += 1
        return super().encode(encoding, errors)


def make_metrics(shared_counters: SharedCounters, worker: int) -> tuple[CallerMetrics, FakeCallers]:
    metrics = CallerMetrics(WorkerCounters(shared_counters, worker))
    callers = metrics.callers = FakeCallers()
    return metrics, callers


def totals(metrics: CallerMetrics) -> dict[tuple[str, str], object]:
    metrics.flush()
    return {(labels[0], labels[1]): count for _, labels, count in metrics.samples()}


def test_counts_are_summed_over_workers_in_any_caller_order() -> None:
    slots = SharedCounters(2)
    first, callers_of_first = make_metrics(slots, 0)
    second, callers_of_second = make_metrics(slots, 1)
    callers_of_first.count_request("a", times=2)
    callers_of_first.count_request("b", "INTERNAL")
    callers_of_second.count_request("b", times=5)
    callers_of_second.count_request("a")
    second.flush()
    assert totals(first) == {("a", "OK"): 3, ("b", "INTERNAL"): 1, ("b", "OK"): 5}
    callers_of_first.count_request("a")
    assert totals(first)["a", "OK"] == 4


def test_replacement_worker_continues_the_counts() -> None:
    slots = SharedCounters(1)
    before, callers_before = make_metrics(slots, 0)
    callers_before.count_request("a")
    callers_before.count_request("b")
    before.flush()
    after, callers_after = make_metrics(slots, 0)
    callers_after.count_request("b")
    callers_after.count_request("a")
    assert totals(after) == {("a", "OK"): 2, ("b", "OK"): 2}


def test_callers_beyond_the_limit_are_counted_together() -> None:
    metrics, callers = make_metrics(SharedCounters(1), 0)
    for number in range(CALLERS_MAX + 100):
        callers.count_request(f"caller-{number}", times=2)
    found = totals(metrics)
    assert len(found) == CALLERS_MAX + 1
    assert found.pop((OTHERS, "OK")) == 200
    assert set(found.values()) == {2}


def test_entries_of_removed_callers_are_reused_from_zero() -> None:
    metrics, callers = make_metrics(SharedCounters(1), 0)
    for number in range(CALLERS_MAX):
        callers.count_request(f"caller-{number}", "INTERNAL")
    metrics.flush()
    callers.names -= {"caller-7", "caller-9"}
    callers.count_request("new")
    callers.count_request("newer", times=2)
    found = totals(metrics)
    assert (found["new", "OK"], found["newer", "OK"]) == (1, 2)
    assert ("new", "INTERNAL") not in found
    assert ("caller-7", "INTERNAL") not in found
    assert found["caller-8", "INTERNAL"] == 1
    assert OTHERS not in {name for name, _ in found}


def test_callers_beyond_the_limit_are_hashed_once_per_token_file() -> None:
    """Checks that the cost of a flush, which runs on the event loop, is not names times callers."""
    metrics, callers = make_metrics(SharedCounters(1), 0)
    names = [CountedName(f"caller-{number}") for number in range(1000)]
    callers.names = frozenset(names)

    def hashed_by_flush() -> int:
        for name in names:
            callers.count_request(name)
        before = CountedName.encoded
        metrics.flush()
        return CountedName.encoded - before

    assert hashed_by_flush() <= 3 * len(names)  # to adopt, to find and to claim
    assert hashed_by_flush() == 0
    callers.names = frozenset(names)  # the file was read again
    assert hashed_by_flush() <= 3 * len(names)
    assert totals(metrics)[OTHERS, "OK"] == 3 * (len(names) - CALLERS_MAX)


def test_caller_beyond_the_limit_gets_an_entry_once_callers_are_removed() -> None:
    metrics, callers = make_metrics(SharedCounters(1), 0)
    names = [f"caller-{number}" for number in range(CALLERS_MAX + 1)]
    for name in names:
        callers.count_request(name)
    assert totals(metrics)[OTHERS, "OK"] == 1
    late = names[-1]
    callers.count_request(late)
    assert totals(metrics)[OTHERS, "OK"] == 2
    callers.names -= {*names[:100]}
    callers.count_request(late, times=5)
    found = totals(metrics)
    assert found[late, "OK"] == 5
    assert found[OTHERS, "OK"] == 2
    assert len(found) == CALLERS_MAX + 1 - 100 + 1
