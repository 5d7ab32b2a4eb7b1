"""Calls of a router to the parts: of all workers, also of those that were replaced."""

from __future__ import annotations

from typing import Any

import pytest
from server.fake_models import model_info
from server.fake_parts import FakeParts

from embedserve.metrics.metrics import CounterRoom, Metrics, cells_per_worker
from embedserve.metrics.model_metrics import COLUMNS_MIN
from embedserve.metrics.shard_metrics import PART_CELLS, SHARD_OUTCOMES, ShardMetrics
from embedserve.metrics.shared_counters import SharedCounters, WorkerCounters
from embedserve.shard_client.part_stats import OUTCOMES, PartStats

SERVED = [("shop", 3)]


class Routers:
    """Two workers of a router."""

    def __init__(self, parts: int = 2) -> None:
        self.slots = SharedCounters(2, parts * PART_CELLS)
        self.parts = parts
        self.workers = [self.start(worker) for worker in range(2)]

    def start(self, worker: int) -> ShardMetrics:
        metrics = ShardMetrics(WorkerCounters(self.slots, worker), self.parts)
        metrics.source = FakeParts()
        self.slots.set_ready(worker, True)
        return metrics

    def source(self, worker: int) -> FakeParts:
        source = self.workers[worker].source
        assert isinstance(source, FakeParts)
        return source

    def replace(self, worker: int) -> None:
        self.workers[worker] = self.start(worker)

    def values(self, served: list[tuple[str, int]] = SERVED) -> dict[str, Any]:
        """Samples of the second worker, by the name and the labels."""
        for worker in self.workers:
            worker.flush(served)
        return {
            " ".join([name.removeprefix("embedserve_shard_"), *labels]): value
            for name, labels, value in self.workers[1].samples()
        }


def counted(hedges: int = 0, **seconds: float) -> PartStats:
    stats = PartStats(hedges=hedges, retries=2, hung=3, bytes_sent=100, bytes_received=10)
    for outcome, took_s in seconds.items():
        stats.seconds[outcome].observe(took_s)
    return stats


def test_calls_of_all_workers_are_added() -> None:
    routers = Routers()
    routers.source(0).stats = [(0, counted(1, ok=0.001, overloaded=0.5))]
    routers.source(1).stats = [(0, counted(ok=0.02)), (0, counted(ok=100)), (1, counted())]
    values = routers.values()
    buckets, total_s = values.pop("seconds 0")
    by_bound = dict(buckets)
    assert [by_bound[one] for one in ("0.00075", "0.001", "0.015", "0.02", "7.5", "+Inf")] == [
        *(0, 1, 1, 2, 3, 4)
    ]
    assert total_s == pytest.approx(100.521)
    assert values.pop("seconds 1")[1] == 0
    assert values == {
        "calls 0 ok": 3,
        "calls 0 overloaded": 1,
        "hedges 0": 1,
        "retries 0": 6,
        "hung 0": 9,
        "bytes 0 sent": 300,
        "bytes 0 received": 30,
        "calls 1 ok": 0,
        "hedges 1": 0,
        "retries 1": 2,
        "hung 1": 3,
        "bytes 1 sent": 100,
        "bytes 1 received": 10,
    }


def test_a_replaced_worker_goes_on_with_the_counts_of_the_former() -> None:
    routers = Routers()
    routers.source(0).stats = [(1, counted(5, ok=0.001))]
    assert routers.values()["hedges 1"] == 5
    routers.replace(0)
    assert routers.values()["hedges 1"] == 5
    routers.source(0).stats = [(1, counted(2, ok=0.001))]
    values = routers.values()
    assert (values["hedges 1"], values["calls 1 ok"]) == (7, 2)
    assert routers.values() == values


def test_parts_that_came_later_are_not_counted() -> None:
    routers = Routers(parts=1)
    routers.source(0).stats = [(0, counted(1)), (1, counted(1))]
    routers.source(0).joined = {SERVED[0]: [2, 0]}
    values = routers.values()
    assert (values["hedges 0"], values["replicas 0"]) == (1, 2)
    assert not [name for name in values if " 1" in name]


def test_the_fewest_replicas_of_served_versions_and_ready_workers_are_shown() -> None:
    routers = Routers()
    assert "replicas 0" not in routers.values()
    routers.source(0).joined = {("shop", 3): [2, 2], ("shop", 4): [0, 0], ("ads", 1): [1]}
    routers.source(1).joined = {("shop", 3): [3, 0], ("ads", 1): [3]}

    def replicas(*served: tuple[str, int]) -> list[Any]:
        values = routers.values(list(served))
        return [values.get(f"replicas {part}") for part in range(2)]

    assert replicas(("shop", 3)) == [2, 0]
    assert replicas(("shop", 3), ("ads", 1)) == [1, 0]
    assert replicas(("ads", 1)) == [1, None]
    assert replicas(("shop", 4)) == [0, 0]
    routers.slots.set_ready(1, False)
    assert replicas(("shop", 3)) == [2, 2]


def test_a_server_that_is_no_router_has_no_cells_and_no_series() -> None:
    model = model_info()
    assert CounterRoom.of([model], is_router=False) == CounterRoom(1, COLUMNS_MIN, 0)
    assert cells_per_worker(1, 10, 3) - cells_per_worker(1, 10) == 3 * PART_CELLS
    names = {family.name for family in Metrics([model]).collect() if family.samples}
    assert not [name for name in names if "shard" in name]


def test_the_outcomes_are_those_of_the_client() -> None:
    assert OUTCOMES == SHARD_OUTCOMES
