"""Tests of the metrics of several workers: sums over workers, replaced workers and versions."""

from dataclasses import replace
from itertools import repeat
from time import perf_counter

import pytest
from server.fake_engine import model_info
from server.metrics.metric_samples import (
    count_unknown_ids,
    families_of,
    sample_value,
    with_version,
    workers_of,
)

from embedserve.metrics.metrics import CounterRoom, Metrics
from embedserve.metrics.model_metrics import COLUMNS_MIN
from embedserve.metrics.shared_counters import SharedCounters, WorkerCounters


@pytest.mark.parametrize("columns", [COLUMNS_MIN, 100 * COLUMNS_MIN])
def test_row_has_cells_for_all_metrics_and_few_more(columns: int) -> None:
    room = CounterRoom(1, columns, parts=3)
    slot = WorkerCounters(SharedCounters(1, room.cells), 0)
    Metrics([model_info()], slot, room=room)
    left = room.cells - slot.taken
    assert 0 <= left < 1000
    with pytest.raises(ValueError, match=f"count is 1000: the row has {left} more cells"):
        slot.allocate(1000)


def test_every_worker_exports_sums_over_all_workers() -> None:
    slots, workers = workers_of(2, model_info())
    for count, metrics in enumerate(workers, 1):
        for _ in range(count):
            metrics.protocols["rest"].count_answered(0.02, 100)
        metrics.protocols["grpc"].count_rejected("INTERNAL", "why", 0.5)
        metrics.models["shop"].count_queue = repeat((count, 10 * count)).__next__
        count_unknown_ids(metrics.models["shop"].version, 1)
        metrics.models["shop"].version.batch_ids.observe_many([5.0] * count)
        metrics.flush()
    one, other = map(families_of, workers)
    for families in (one, other):
        total = "embedserve_requests_total"
        assert sample_value(families, total, protocol="rest", outcome="OK") == 3
        assert sample_value(families, total, protocol="grpc", outcome="INTERNAL") == 2
        assert sample_value(families, "embedserve_response_bytes_total", protocol="rest") == 300
        assert sample_value(families, "embedserve_request_seconds_count", protocol="rest") == 3
        assert sample_value(families, "embedserve_batch_ids_sum", model="shop") == 15
        assert sample_value(families, "embedserve_queue_requests", model="shop") == 3
        assert sample_value(families, "embedserve_queue_examples", model="shop") == 30
        assert sample_value(families, "embedserve_workers") == 2
        assert sample_value(families, "process_open_fds") > 0
        assert not [name for name in families if name.startswith("python_gc")]
    slots.count_restart(1)
    assert sample_value(families_of(workers[0]), "embedserve_worker_restarts_total") == 1


def test_dead_worker_keeps_its_counts_and_has_no_queue() -> None:
    slots, (one, other) = workers_of(2, model_info())
    other.protocols["rest"].count_answered(0.02, 100)
    other.models["shop"].count_queue = lambda: (7, 7)
    count_unknown_ids(other.models["shop"].version, 2)
    other.flush()
    cpu_s = sample_value(families_of(one), "process_cpu_seconds_total")
    slots.set_ready(1, False)
    families = families_of(one)
    assert sample_value(families, "embedserve_queue_requests", model="shop") == 0
    assert sample_value(families, "embedserve_requests_total", protocol="rest", outcome="OK") == 1
    assert sample_value(families, "embedserve_workers") == 1
    assert sample_value(families, "process_cpu_seconds_total") >= cpu_s


def test_replacement_worker_continues_the_counts() -> None:
    slots, (one, other) = workers_of(2, model_info())
    other.protocols["rest"].count_answered(0.02, 100)
    count_unknown_ids(other.models["shop"].version, 2)
    other.flush()
    cpu_s = sample_value(families_of(one), "process_cpu_seconds_total")
    replacement = Metrics([other.models["shop"].model], WorkerCounters(slots, 1))
    replacement.protocols["rest"].count_answered(0.02, 50)
    count_unknown_ids(replacement.models["shop"].version, 1)
    replacement.flush()
    families = families_of(one)
    assert sample_value(families, "embedserve_requests_total", protocol="rest", outcome="OK") == 2
    assert sample_value(families, "embedserve_request_seconds_count", protocol="rest") == 2
    assert sample_value(families, "embedserve_response_bytes_total", protocol="rest") == 150
    shop = one.models["shop"]
    assert shop.version.lookups.unknown_ids().tolist() == [3] * len(shop.model.features)
    assert sample_value(families, "process_cpu_seconds_total") >= cpu_s


def test_next_version_counts_from_zero_under_its_own_number() -> None:
    _, workers = workers_of(2, model_info())
    later = with_version(model_info("shop", {"person": (7, 4), "movie": (11, 3)}), 8)
    for metrics in workers:
        shop = metrics.models["shop"]
        before = shop.version
        count_unknown_ids(before, 2)
        before.batch_ids.observe(5.0)
        metrics.flush()
        shop.switch(later, 1.5)
        # A batch of the previous version counts these, and ends after the switch.
        count_unknown_ids(before, 7)
        before.batch_ids.observe(50.0)
        before.flush()
        count_unknown_ids(shop.version, 1)
        shop.version.batch_ids.observe(3.0)
        shop.store_version = 8
    for metrics in workers:
        metrics.flush()
    assert workers[0].models["shop"].version.lookups.unknown_ids().tolist() == [2, 2]
    for metrics in workers:
        assert sums_by_version(metrics) == {"8": 6.0}
        families = families_of(metrics)
        assert sample_value(families, "embedserve_model_switches_total", model="shop") == 1
        assert sample_value(families, "embedserve_model_load_seconds", model="shop") == 1.5
        assert sample_value(families, "embedserve_model_wanted_version", model="shop") == 8
    _, (fresh, _) = workers_of(2, model_info())
    assert sample_value(families_of(fresh), "embedserve_model_switches_total", model="shop") == 0


def test_pending_version_of_any_worker_is_exported_until_it_is_gone() -> None:
    _, (one, other) = workers_of(2, model_info())

    def exported() -> list[float]:
        other.flush()
        families = families_of(one)
        names = ("behind_seconds", "refused")
        return [sample_value(families, f"embedserve_model_{name}", model="shop") for name in names]

    assert exported() == [0, 0]
    shop = other.models["shop"]
    shop.found_s, shop.is_refused = perf_counter() - 100, True
    behind_s, is_refused = exported()
    assert behind_s >= 100
    assert is_refused
    shop.found_s, shop.is_refused = None, False
    assert exported() == [0, 0]


def test_versions_are_not_exported_while_workers_switch() -> None:
    """Covers the moment in which one worker has switched and the other has not: a sum over one of
    them would be a counter that becomes smaller."""
    slots, (one, other) = workers_of(2, model_info())
    for metrics in (one, other):
        metrics.models["shop"].version.batch_ids.observe(5.0)
        metrics.flush()
    assert sums_by_version(one) == sums_by_version(other) == {"7": 10}
    other.models["shop"].switch(with_version(model_info(), 8), 0.1)
    other.models["shop"].version.batch_ids.observe(3.0)
    other.flush()
    assert sums_by_version(one) == sums_by_version(other) == {}
    slots.set_ready(0, False)  # counts of the worker that is left are not summed with the other's
    assert sums_by_version(other) == {"8": 3}
    slots.set_ready(0, True)
    one.models["shop"].switch(with_version(model_info(), 8), 0.1)
    assert sums_by_version(one) == sums_by_version(other) == {"8": 3}


def sums_by_version(metrics: Metrics) -> dict[str, float]:
    return {
        sample.labels["version"]: sample.value
        for sample in families_of(metrics)["embedserve_batch_ids"].samples
        if sample.name == "embedserve_batch_ids_sum"
    }


def test_added_and_removed_names_are_summed_over_all_workers() -> None:
    _, workers = workers_of(2, model_info())
    canary = replace(model_info(), served_name="shop@canary")
    for metrics in workers:
        metrics.add(canary).version.batch_ids.observe(5.0)
        metrics.flush()
    sums = "embedserve_batch_ids_sum"
    for families in map(families_of, workers):
        assert sample_value(families, sums, model="shop", alias="canary") == 10
        assert sample_value(families, sums, model="shop", alias="") == 0
    for metrics in reversed(workers):
        metrics.remove("shop@canary")
        assert not [
            sample
            for sample in families_of(metrics)["embedserve_batch_ids"].samples
            if sample.labels["alias"] == "canary"
        ]
    for metrics in workers:  # one worker's new name may take any place
        metrics.add(replace(model_info(), served_name="shop@other"))
        metrics.add(canary).version.batch_ids.observe(3.0)
        metrics.flush()
    assert sample_value(families_of(workers[0]), sums, model="shop", alias="canary") == 6


def test_counts_are_summed_if_a_worker_starts_with_other_features() -> None:
    """Checks that its version uses the cells of the version before it, whatever features it has."""
    room = CounterRoom(1, 2000)
    slots = SharedCounters(2, room.cells)
    first = model_info("shop", {f"f{i}": (7, 4) for i in range(2000)})
    for worker, model in enumerate((first, model_info("shop", {"user": (7, 4)}))):
        slots.set_ready(worker, True)
        metrics = Metrics([model], WorkerCounters(slots, worker), room=room)
        metrics.models["shop"].version.batch_ids.observe(5.0)
        metrics.flush()
    assert sample_value(families_of(metrics), "embedserve_batch_ids_sum", model="shop") == 10
