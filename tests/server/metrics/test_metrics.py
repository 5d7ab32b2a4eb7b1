"""Tests of the metrics: buckets, a text format that Prometheus reads, and counts that add up."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import repeat

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from server.fake_engine import FakeEngine, model_info
from server.fake_models import ruled_info
from server.fake_parts import FakeParts, in_parts
from server.live import make_pipeline
from server.pipelines import outcomes_of
from server.raw_http import http_client

from embedserve.config import ServeSettings
from embedserve.errors import EmbedServeError
from embedserve.metrics.families import FAMILIES
from embedserve.metrics.histogram import PENDING_MAX, Histogram
from embedserve.metrics.metrics import CounterRoom, Metrics, cells_per_worker
from embedserve.metrics.model_metrics import COLUMNS_MIN, NAMES_SPARE
from embedserve.metrics.request_metrics import OUTCOMES
from embedserve.metrics.shared_counters import SharedCounters, WorkerCounters
from embedserve.model_info import ModelInfo
from embedserve.pipeline import RequestPipeline
from embedserve_store import StoreError

OURS = "embedserve_"


def read(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(families: dict[str, Metric], sample_name: str, **labels: str) -> float:
    """Returns the one sample with this name and these labels."""
    found = [
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name == sample_name and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, f"{sample_name} {labels}: {found}"
    return float(found[0])


@pytest.fixture
def pipeline(engine: FakeEngine, executor: ThreadPoolExecutor) -> RequestPipeline:
    return make_pipeline(engine, executor=executor)


@pytest.fixture
async def client(pipeline: RequestPipeline) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(pipeline) as client:
        yield client


async def scraped(client: httpx.AsyncClient) -> dict[str, Metric]:
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return read(answer.text)


def test_a_value_equal_to_a_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    histogram.observe_many([0.5, 1.0, 1.5, 2.0, 4.0, 4.1])
    buckets, total = histogram.samples()
    assert buckets == [("1.0", 2), ("2.0", 4), ("4.0", 5), ("+Inf", 6)]
    assert total == pytest.approx(13.1)


@given(values=st.lists(st.floats(0, 10), max_size=40), cut=st.integers(0, 40))
def test_buckets_count_what_the_definition_says(values: list[float], cut: int) -> None:
    bounds = (0.1, 1.0, 5.0)
    histogram = Histogram(bounds)
    histogram.observe_many(values[:cut])
    histogram.samples()  # a scrape in between changes nothing
    for single in values[cut:]:
        histogram.observe(single)
    counts = [count for _, count in histogram.samples()[0]]
    assert counts == [sum(v <= bound for v in values) for bound in (*bounds, float("inf"))]


def test_many_observations_are_kept_between_scrapes() -> None:
    histogram = Histogram((1.0,))
    for _ in range(2 * PENDING_MAX + 3):
        histogram.observe(0.5)
    assert histogram.samples() == (
        [("1.0", 2 * PENDING_MAX + 3), ("+Inf", 2 * PENDING_MAX + 3)],
        0.5 * (2 * PENDING_MAX + 3),
    )


async def test_counts_add_up_to_the_requests_sent(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    good = json.dumps({"features": {"user": [[1, 2], [3]]}})
    bodies = [good] * 20 + ["{"] * 3 + ['{"features": {"user": [7]}}'] * 2
    answers = await asyncio.gather(*(client.post("/embed", content=body) for body in bodies))
    await client.post("/models/shoes/embed", content=good)
    families = await scraped(client)
    counted = {
        outcome: value(families, "embedserve_requests_total", protocol="rest", outcome=outcome)
        for outcome in ("OK", "INVALID_ARGUMENT", "NOT_FOUND")
    }
    assert counted == {"OK": 20, "INVALID_ARGUMENT": 5, "NOT_FOUND": 1}
    assert value(families, "embedserve_request_seconds_count", protocol="rest") == 26
    sent_bytes = sum(len(answer.content) for answer in answers if answer.status_code == 200)
    assert value(families, "embedserve_response_bytes_total", protocol="rest") == sent_bytes
    assert value(families, "embedserve_batch_examples_sum", model="shop") == 40
    assert value(families, "embedserve_batch_ids_sum", model="shop") == 60
    batches = len(engine.lookups)
    assert value(families, "embedserve_batch_examples_count", model="shop") == batches
    assert value(families, "embedserve_lookup_seconds_count", model="shop") == batches
    # Requests that were rejected before the queue have no queue wait.
    assert value(families, "embedserve_queue_wait_seconds_count", model="shop") == 22
    assert value(families, "embedserve_queue_requests", model="shop") == 0
    assert value(families, "embedserve_queue_examples", model="shop") == 0


async def test_unknown_ids_are_counted_by_feature(executor: ThreadPoolExecutor) -> None:
    pipeline = make_pipeline(FakeEngine(ruled_info()), executor=executor)
    async with http_client(pipeline) as client:
        before = await scraped(client)
        bags = {"user": [[-1, 5], [7]], "movie": [[11], [1]], "tag": [["war"], ["drama", "war"]]}
        for body in ({"features": bags}, {"features": bags | {"shelf": [[7], []]}}):
            await client.post("/embed", json=body)  # the second is rejected
        await client.post("/embed", json={"features": {"user": [6]}})
        after = await scraped(client)
    name = "embedserve_unknown_ids_total"
    counted = {s.labels["feature"]: s.value for s in after["embedserve_unknown_ids"].samples}
    assert counted == {"user": 3, "movie": 1, "tag": 2}  # day and shelf: in no successful request
    assert value(before, name, model="ruled", feature="user") == 0


async def test_every_histogram_is_cumulative_and_ends_with_its_count(
    client: httpx.AsyncClient,
) -> None:
    await client.post("/embed", content='{"features": {"user": [1]}}')
    families = await scraped(client)
    histograms = [
        family
        for family in families.values()
        if family.type == "histogram" and OURS in family.name and family.samples
    ]
    assert len(histograms) == 6
    for family in histograms:
        buckets: dict[str, list[tuple[float, float]]] = {}
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                labels = {k: v for k, v in sample.labels.items() if k != "le"}
                bound = float(sample.labels["le"])
                buckets.setdefault(json.dumps(labels), []).append((bound, sample.value))
        for named, pairs in buckets.items():
            assert pairs == sorted(pairs)
            assert pairs[-1][0] == float("inf")
            count = value(families, f"{family.name}_count", **json.loads(named))
            assert pairs[-1][1] == count


async def test_names_and_help_follow_prometheus_conventions(client: httpx.AsyncClient) -> None:
    await client.post("/embed", content='{"features": {"user": [1]}}')
    text = (await client.get("/metrics")).text
    families = {name: family for name, family in read(text).items() if name.startswith(OURS)}
    assert families
    for name, family in families.items():
        assert re.fullmatch(r"embedserve_[a-z]+(_[a-z]+)*", name)
        assert not re.search(r"_(ms|us|millis\w*|mib|kb|percent)(_|$)", name)
        assert family.documentation.endswith(".")
        is_counter = f"# TYPE {name}_total counter" in text
        assert is_counter == (family.type == "counter")


async def test_the_served_models_are_described(client: httpx.AsyncClient) -> None:
    families = await scraped(client)
    assert value(families, "embedserve_model_version", model="shop") == 7
    assert value(families, "embedserve_model_replanned", model="shop") == 0
    rows_bytes = 4 * (7 * 4 + 11 * 4 + 5 * 4)  # rows of 3 and 2 columns are filled up to 4
    assert value(families, "embedserve_table_bytes", model="shop", rank="0") == rows_bytes


def samples_of(metrics: Metrics) -> dict[str, Metric]:
    return read(generate_latest(metrics.registry()).decode())


def two_workers() -> tuple[SharedCounters, list[Metrics]]:
    model = model_info()
    slots = SharedCounters(2, cells_per_worker(1, COLUMNS_MIN))
    for worker in (0, 1):
        slots.set_ready(worker, True)
    return slots, [Metrics([model], WorkerCounters(slots, worker)) for worker in (0, 1)]


def test_a_slot_has_just_the_cells_that_the_metrics_take() -> None:
    model = model_info()
    cells = cells_per_worker(1, COLUMNS_MIN)
    slot = WorkerCounters(SharedCounters(1, cells), 0)
    Metrics([model], slot)
    assert slot.taken == cells
    with pytest.raises(ValueError, match="count is 1: a slot has 0 more cells"):
        slot.allocate(1)


def test_workers_are_added_up_wherever_they_are_asked() -> None:
    slots, workers = two_workers()
    for count, metrics in enumerate(workers, 1):
        for _ in range(count):
            metrics.protocols["rest"].count_answered(0.02, 100)
        metrics.protocols["grpc"].count_rejected("INTERNAL", "why", 0.5)
        metrics.models["shop"].count_queue = repeat((count, 10 * count)).__next__
        metrics.models["shop"].version.unknown_ids += 1
        metrics.models["shop"].version.batch_ids.observe_many([5.0] * count)
        metrics.flush()
    one, other = map(samples_of, workers)
    for families in (one, other):
        total = "embedserve_requests_total"
        assert value(families, total, protocol="rest", outcome="OK") == 3
        assert value(families, total, protocol="grpc", outcome="INTERNAL") == 2
        assert value(families, "embedserve_response_bytes_total", protocol="rest") == 300
        assert value(families, "embedserve_request_seconds_count", protocol="rest") == 3
        assert value(families, "embedserve_batch_ids_sum", model="shop") == 15
        assert value(families, "embedserve_queue_requests", model="shop") == 3
        assert value(families, "embedserve_queue_examples", model="shop") == 30
        assert value(families, "embedserve_workers") == 2
        assert value(families, "process_open_fds") > 0
        assert not [name for name in families if name.startswith("python_gc")]
    slots.count_restart(1)
    assert value(samples_of(workers[0]), "embedserve_worker_restarts_total") == 1


def test_a_dead_worker_keeps_its_counts_and_has_no_queue() -> None:
    slots, (one, other) = two_workers()
    other.protocols["rest"].count_answered(0.02, 100)
    other.models["shop"].count_queue = lambda: (7, 7)
    other.models["shop"].version.unknown_ids += 2
    other.flush()
    cpu_s = value(samples_of(one), "process_cpu_seconds_total")
    slots.set_ready(1, False)
    families = samples_of(one)
    assert value(families, "embedserve_queue_requests", model="shop") == 0
    assert value(families, "embedserve_requests_total", protocol="rest", outcome="OK") == 1
    assert value(families, "embedserve_workers") == 1
    assert value(families, "process_cpu_seconds_total") >= cpu_s


def test_the_replacement_counts_on() -> None:
    slots, (one, other) = two_workers()
    other.protocols["rest"].count_answered(0.02, 100)
    other.models["shop"].version.unknown_ids += 2
    other.flush()
    cpu_s = value(samples_of(one), "process_cpu_seconds_total")
    replacement = Metrics([other.models["shop"].model], WorkerCounters(slots, 1))
    replacement.protocols["rest"].count_answered(0.02, 50)
    replacement.models["shop"].version.unknown_ids += 1
    replacement.flush()
    families = samples_of(one)
    assert value(families, "embedserve_requests_total", protocol="rest", outcome="OK") == 2
    assert value(families, "embedserve_request_seconds_count", protocol="rest") == 2
    assert value(families, "embedserve_response_bytes_total", protocol="rest") == 150
    shop = one.models["shop"]
    assert shop.version.total_unknown_ids().tolist() == [3] * len(shop.model.features)
    assert value(families, "process_cpu_seconds_total") >= cpu_s


def test_every_sample_has_the_labels_of_its_row() -> None:
    """Guards against missing label names: prometheus_client drops the values of such labels."""
    shards = FakeParts(joined={("shop", 7): [2]})
    shop = in_parts(model_info(), shards, parts=1)
    metrics = Metrics([shop, replace(ruled_info(), served_name="ruled@canary")], parts=1)
    metrics.shards.source = shards
    metrics.protocols["rest"].count_answered(0.02, 100)
    metrics.models["shop"].version.shadow.begin(6)
    rows = {row.name: row for row in FAMILIES}
    metrics.flush()
    seen = set()
    for name, labels, _ in metrics.samples():
        assert len(labels) == len(rows[name].labels), name
        seen.add(name)
    unused = {"embedserve_caller_requests", "embedserve_row_wise_lookups"}
    unused |= {name for name in rows if "_tls_" in name or "_delta_" in name}
    assert seen == set(rows) - unused
    assert len(rows) == len(FAMILIES)


def test_the_unit_of_a_row_is_that_of_its_name() -> None:
    for row in FAMILIES:
        for unit in ("seconds", "bytes"):
            assert (row.unit == unit) == row.name.endswith(f"_{unit}"), row.name


def test_every_error_has_an_outcome() -> None:
    errors = EmbedServeError.__subclasses__()
    assert {error.code for error in errors} <= set(OUTCOMES)


def test_one_process_counts_itself_as_a_worker() -> None:
    families = samples_of(Metrics([model_info()]))
    assert value(families, "embedserve_workers") == 1
    assert value(families, "embedserve_worker_restarts_total") == 0
    assert [name for name in families if name.startswith("python_gc")]
    assert value(families, "process_resident_memory_bytes") > 0
    assert value(families, "process_start_time_seconds") > 0


def test_two_servers_share_no_metric() -> None:
    one, other = Metrics([model_info()]), Metrics([model_info()])
    one.protocols["rest"].count_answered(0.1, 10)
    assert outcomes_of(other.protocols["rest"]).total() == 0
    one.registry()
    other.registry()


def test_the_next_version_counts_from_zero_under_its_own_number() -> None:
    _, workers = two_workers()
    later = replace_version(model_info("shop", {"person": (7, 4), "movie": (11, 3)}), 8)
    for metrics in workers:
        shop = metrics.models["shop"]
        before = shop.version
        before.unknown_ids += 2
        before.batch_ids.observe(5.0)
        metrics.flush()
        shop.switch(later, 1.5)
        # A batch of the previous version counts these, and ends after the switch.
        before.unknown_ids += 7
        before.batch_ids.observe(50.0)
        before.flush()
        shop.version.unknown_ids += 1
        shop.version.batch_ids.observe(3.0)
        shop.wanted_version = 8
    for metrics in workers:
        metrics.flush()
    assert workers[0].models["shop"].version.total_unknown_ids().tolist() == [2, 2]
    for families in map(samples_of, workers):
        sums = {
            sample.labels["version"]: sample.value
            for sample in families["embedserve_batch_ids"].samples
            if sample.name == "embedserve_batch_ids_sum"
        }
        assert sums == {"8": 6.0}
        assert value(families, "embedserve_model_switches_total", model="shop") == 1
        assert value(families, "embedserve_model_load_seconds", model="shop") == 1.5
        assert value(families, "embedserve_model_wanted_version", model="shop") == 8
    _, (fresh, _) = two_workers()
    assert value(samples_of(fresh), "embedserve_model_switches_total", model="shop") == 0


def test_a_worker_with_another_version_is_not_added_to_it() -> None:
    """Covers the switch of a version, which workers do not make in the same instant."""
    _, (one, other) = two_workers()
    for metrics in (one, other):
        metrics.models["shop"].version.batch_ids.observe(5.0)
        metrics.flush()
    other.models["shop"].switch(replace_version(model_info(), 8), 0.1)
    other.models["shop"].version.batch_ids.observe(3.0)
    other.flush()
    assert value(samples_of(one), "embedserve_batch_ids_sum", model="shop", version="7") == 5
    assert value(samples_of(other), "embedserve_batch_ids_sum", model="shop", version="8") == 3


def replace_version(model: ModelInfo, number: int) -> ModelInfo:
    return replace(model, manifest=replace(model.manifest, version=number))


def test_names_come_and_go_in_the_same_place_for_all_workers() -> None:
    _, workers = two_workers()
    canary = replace(model_info(), served_name="shop@canary")
    for metrics in workers:
        metrics.add(canary).version.batch_ids.observe(5.0)
        metrics.flush()
    sums = "embedserve_batch_ids_sum"
    for families in map(samples_of, workers):
        assert value(families, sums, model="shop", alias="canary") == 10
        assert value(families, sums, model="shop", alias="") == 0
    for metrics in reversed(workers):
        metrics.remove("shop@canary")
        assert not [
            sample
            for sample in samples_of(metrics)["embedserve_batch_ids"].samples
            if sample.labels["alias"] == "canary"
        ]
    for metrics in workers:  # one worker's new name may take any place
        metrics.add(replace(model_info(), served_name="shop@other"))
        metrics.add(canary).version.batch_ids.observe(3.0)
        metrics.flush()
    assert value(samples_of(workers[0]), sums, model="shop", alias="canary") == 6


def test_there_are_places_for_so_many_names() -> None:
    metrics = Metrics([model_info()])
    for i in range(NAMES_SPARE):
        metrics.add(replace(model_info(), served_name=f"shop@a{i}"))
    said = f"shop@b: this server has room to count {NAMES_SPARE + 1} names since its start: restart"
    with pytest.raises(StoreError, match=said):
        metrics.add(replace(model_info(), served_name="shop@b"))
    metrics.remove("shop@a3")
    metrics.add(replace(model_info(), served_name="shop@b"))


def test_a_shard_has_places_for_all_versions_that_it_may_hold() -> None:
    """Covers a store with few versions at the start. Each version has a name of its own."""
    shop = [replace(model_info(), served_name=f"shop@{i}") for i in range(32)]
    films = [replace(model_info("films"), served_name=f"films@{i}") for i in range(32)]
    settings = ServeSettings("store", part="0/2", versions_held=32)
    room = CounterRoom.of([*shop[:2], films[0]], settings)
    metrics = Metrics(shop[:2], None, "mapped", *room)
    for version in (*shop[2:], *films):
        metrics.check_room(version.served_as)
        metrics.add(version)
    assert CounterRoom.of(shop, replace(settings, versions_held=2)).names == len(shop)
    assert CounterRoom.of(shop[:2], replace(settings, part="")).names == 2


def test_a_worker_that_starts_with_a_later_version_counts_where_the_others_do() -> None:
    """Checks that its version uses the cells of the version before it, whatever features it has."""
    slots = SharedCounters(2, cells_per_worker(1, 2000))
    first = model_info("shop", {f"f{i}": (7, 4) for i in range(2000)})
    for worker, model in enumerate((first, model_info("shop", {"user": (7, 4)}))):
        slots.set_ready(worker, True)
        metrics = Metrics([model], WorkerCounters(slots, worker), names=1, columns_max=2000)
        metrics.models["shop"].version.batch_ids.observe(5.0)
        metrics.flush()
    assert value(samples_of(metrics), "embedserve_batch_ids_sum", model="shop") == 10
