"""Tests of a router's calls to the parts: counts of all workers, including replaced ones."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from server.fake_models import model_info
from server.fake_parts import FakeParts, in_parts
from server.metrics.metric_samples import workers_of

from embedserve.config import ServeSettings
from embedserve.lookup_types import Batch
from embedserve.metrics.histogram import SECONDS_BUCKETS
from embedserve.metrics.metrics import CounterRoom, Metrics
from embedserve.metrics.model_metrics import COLUMNS_MIN, NAMES_SPARE
from embedserve.metrics.shard_metrics import (
    NEXT,
    SERVED,
    PartStats,
    RoutedVersions,
    ShardMetrics,
    shard_cells,
)
from embedserve.metrics.shared_counters import SharedCounters, WorkerCounters

SHOP, NAMES = {("shop", 3): SERVED}, 2


class Routers:
    """Two workers of a router."""

    def __init__(self, parts: int = 2) -> None:
        self.slots = SharedCounters(2, shard_cells(parts, NAMES))
        self.parts = parts
        self.workers = [self.start(worker) for worker in range(2)]

    def start(self, worker: int) -> ShardMetrics:
        metrics = ShardMetrics(WorkerCounters(self.slots, worker), self.parts, NAMES)
        metrics.source = FakeParts()
        self.slots.set_ready(worker, True)
        return metrics

    def source(self, worker: int) -> FakeParts:
        source = self.workers[worker].source
        assert isinstance(source, FakeParts)
        return source

    def replace(self, worker: int) -> None:
        self.workers[worker] = self.start(worker)

    def values(self, versions: RoutedVersions = SHOP) -> dict[str, Any]:
        """Returns the samples of the second worker, by name and labels."""
        for worker in self.workers:
            worker.flush(versions)
        return {
            " ".join([name.removeprefix("embedserve_shard_"), *labels]): value
            for name, labels, value in self.workers[1].samples(versions)
        }


def part_stats(hedges: int = 0, **seconds: float) -> PartStats:
    stats = PartStats(hedges=hedges, retries=2, hung=3, bytes_sent=100, bytes_received=10)
    for outcome, took_s in seconds.items():
        stats.count_call(outcome, took_s)
    return stats


def test_shard_calls_are_summed_over_workers() -> None:
    routers = Routers()
    routers.source(0).stats = [(0, part_stats(1, ok=0.001, overloaded=0.5))]
    routers.source(1).stats = [(0, part_stats(ok=0.02)), (0, part_stats(ok=100)), (1, part_stats())]
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


def test_replacement_worker_continues_the_counts() -> None:
    routers = Routers()
    routers.source(0).stats = [(1, part_stats(5, ok=0.001))]
    assert routers.values()["hedges 1"] == 5
    routers.replace(0)
    assert routers.values()["hedges 1"] == 5
    routers.source(0).stats = [(1, part_stats(2, ok=0.001))]
    values = routers.values()
    assert (values["hedges 1"], values["calls 1 ok"]) == (7, 2)
    assert routers.values() == values


def test_parts_added_after_the_start_are_not_counted() -> None:
    routers = Routers(parts=1)
    routers.source(0).stats = [(0, part_stats(1)), (1, part_stats(1))]
    routers.source(0).joined = {("shop", 3): [2, 0]}
    values = routers.values()
    assert (values["hedges 0"], values["replicas 0 shop 3 served"]) == (1, 2)
    assert not [name for name in values if " 1" in name]


def replicas(routers: Routers, versions: RoutedVersions = SHOP) -> dict[str, Any]:
    values = routers.values(versions)
    start = "replicas "
    return {
        name.removeprefix(start): value for name, value in values.items() if name.startswith(start)
    }


def test_minimum_replicas_over_ready_workers_are_exported() -> None:
    routers = Routers()
    assert replicas(routers) == {}
    routers.source(0).joined = {("shop", 3): [2, 2], ("ads", 1): [1]}
    routers.source(1).joined = {("shop", 3): [3, 0], ("ads", 1): [3]}
    assert replicas(routers) == {"0 shop 3 served": 2, "1 shop 3 served": 0}
    assert replicas(routers, {("ads", 1): SERVED}) == {"0 ads 1 served": 1}
    routers.slots.set_ready(1, False)
    assert replicas(routers) == {"0 shop 3 served": 2, "1 shop 3 served": 2}


def test_replicas_of_several_versions_are_exported_in_any_order() -> None:
    """Covers the next version, which only the worker that watches the store expects."""
    routers = Routers()
    versions = {("shop", 4): NEXT, ("shop", 3): SERVED, ("ads", 1): SERVED}
    routers.source(0).joined = {("shop", 4): [1, 0], ("shop", 3): [2, 2], ("ads", 1): [5]}
    routers.source(1).joined = {("ads", 1): [5], ("shop", 3): [2, 2]}
    expected = {
        "0 shop 4 next": 1,
        "1 shop 4 next": 0,
        "0 shop 3 served": 2,
        "1 shop 3 served": 2,
        "0 ads 1 served": 5,
    }
    assert replicas(routers, versions) == expected
    assert replicas(routers, dict(reversed(versions.items()))) == expected
    routers.source(0).joined[("shop", 4)] = [1, 2]
    assert replicas(routers, versions) == expected | {"1 shop 4 next": 2}
    assert replicas(routers) == {"0 shop 3 served": 2, "1 shop 3 served": 2}


def test_replicas_of_served_and_next_version_are_exported() -> None:
    first = model_info()
    metrics = Metrics([first], room=CounterRoom(1, COLUMNS_MIN, parts=2))
    source = metrics.shards.source = FakeParts()
    number = first.version
    source.joined = {(first.name, number): [1, 1], (first.name, number + 1): [1, 0]}

    def exported_replicas() -> dict[tuple[str, ...], float]:
        (family,) = [one for one in metrics.collect() if one.name == "embedserve_shard_replicas"]
        labels = ("part", "version", "state")
        return {tuple(one.labels[name] for name in labels): one.value for one in family.samples}

    served = {("0", str(number), "served"): 1.0, ("1", str(number), "served"): 1.0}
    assert exported_replicas() == served
    metrics.models[first.served_as].store_version = number + 1
    following = str(number + 1)
    assert exported_replicas() == served | {
        ("0", following, "next"): 1.0,
        ("1", following, "next"): 0.0,
    }
    metrics.models[first.served_as].store_version = number
    assert exported_replicas() == served


def batch_in_parts(missing_parts: Sequence[int], cached_count: int) -> Batch:
    batch = Batch(np.zeros(0, np.int64), np.zeros(1, np.int32), None, [1], 1)
    batch.missing_parts, batch.cached_count = missing_parts, cached_count
    return batch


def test_missing_parts_and_cached_ids_are_counted_by_version() -> None:
    """Covers counts of all workers, including replaced ones."""
    model = in_parts(model_info(), FakeParts())
    slots, workers = workers_of(2, model)
    for metrics, parts in zip(workers, ([0, 1], [1, 2]), strict=True):  # there is no part 2
        metrics.models["shop"].version.count_parts(batch_in_parts(parts, 5))
        metrics.flush()
    workers[1] = Metrics([model], WorkerCounters(slots, 1))
    workers[1].models["shop"].version.count_parts(batch_in_parts([1], 2))
    workers[1].flush()
    families = {one.name: one for one in workers[0].collect()}
    (hits,) = families["embedserve_row_cache_hits"].samples
    assert hits.value == 12
    family = families["embedserve_missing_parts"]
    labels = ("model", "version", "part")
    counts = {tuple(one.labels[name] for name in labels): one.value for one in family.samples}
    version = str(model.version)
    assert counts == {("shop", version, "0"): 1, ("shop", version, "1"): 3}


def test_server_that_is_no_router_has_no_shard_cells_or_series() -> None:
    model = model_info()
    assert CounterRoom.of([model], ServeSettings("s")) == CounterRoom(1, COLUMNS_MIN, 0)
    more = CounterRoom(1, 10, 3).cells - CounterRoom(1, 10).cells
    assert more == shard_cells(3, 1 + NAMES_SPARE) > 0
    names = {family.name for family in Metrics([model]).collect() if family.samples}
    assert not [name for name in names if re.search("shard|missing|row_cache", name)]


def test_latencies_of_calls_are_counted_by_upper_bound() -> None:
    stats, (first, second, *_, last) = PartStats(), SECONDS_BUCKETS
    for seconds in (first / 2, first, second, last + 1):
        stats.count_call("ok", seconds)
    assert stats.seconds == [2, 1, *[0] * (len(SECONDS_BUCKETS) - 2), 1]
    assert stats.total_s == pytest.approx(1.5 * first + second + last + 1)
