"""Tests of the metrics: a text format that Prometheus reads, and counts that add up."""

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest
from prometheus_client import Metric
from server.fake_engine import FakeEngine, model_info
from server.fake_models import ruled_info
from server.fake_parts import FakeParts, in_parts
from server.live import make_pipeline
from server.metrics.metric_samples import families_of, parse_families, sample_value
from server.pipelines import outcomes_of
from server.raw_http import http_client

from embedserve.config import ServeSettings
from embedserve.metrics.families import FAMILIES
from embedserve.metrics.metrics import CounterRoom, Metrics
from embedserve.metrics.model_metrics import COLUMNS_MIN, NAMES_SPARE
from embedserve_store import StoreError

PREFIX = "embedserve_"


async def scraped(rest: httpx.AsyncClient) -> dict[str, Metric]:
    response = await rest.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return parse_families(response.text)


async def test_counts_add_up_to_the_requests_sent(
    rest: httpx.AsyncClient, engine: FakeEngine
) -> None:
    good = json.dumps({"features": {"user": [[1, 2], [3]]}})
    bodies = [good] * 20 + ["{"] * 3 + ['{"features": {"user": [7]}}'] * 2
    responses = await asyncio.gather(*(rest.post("/embed", content=body) for body in bodies))
    await rest.post("/models/shoes/embed", content=good)
    families = await scraped(rest)
    counted = {
        outcome: sample_value(
            families, "embedserve_requests_total", protocol="rest", outcome=outcome
        )
        for outcome in ("OK", "INVALID_ARGUMENT", "NOT_FOUND")
    }
    assert counted == {"OK": 20, "INVALID_ARGUMENT": 5, "NOT_FOUND": 1}
    assert sample_value(families, "embedserve_request_seconds_count", protocol="rest") == 26
    sent_bytes = sum(len(response.content) for response in responses if response.status_code == 200)
    assert sample_value(families, "embedserve_response_bytes_total", protocol="rest") == sent_bytes
    assert sample_value(families, "embedserve_batch_examples_sum", model="shop") == 40
    assert sample_value(families, "embedserve_batch_ids_sum", model="shop") == 60
    batches = len(engine.lookups)
    assert sample_value(families, "embedserve_batch_examples_count", model="shop") == batches
    assert sample_value(families, "embedserve_lookup_seconds_count", model="shop") == batches
    # Requests that were rejected before the queue have no queue wait.
    assert sample_value(families, "embedserve_queue_wait_seconds_count", model="shop") == 22
    assert sample_value(families, "embedserve_queue_requests", model="shop") == 0
    assert sample_value(families, "embedserve_queue_examples", model="shop") == 0


async def test_unknown_ids_are_counted_by_feature(executor: ThreadPoolExecutor) -> None:
    pipeline = make_pipeline(FakeEngine(ruled_info()), executor=executor)
    async with http_client(pipeline) as rest:
        before = await scraped(rest)
        bags = {"user": [[-1, 5], [7]], "movie": [[11], [1]], "tag": [["war"], ["drama", "war"]]}
        for body in ({"features": bags}, {"features": bags | {"shelf": [[7], []]}}):
            await rest.post("/embed", json=body)  # the second is rejected
        await rest.post("/embed", json={"features": {"user": [6]}})
        after = await scraped(rest)
    name = "embedserve_unknown_ids_total"
    counted = {s.labels["feature"]: s.value for s in after["embedserve_unknown_ids"].samples}
    assert counted == {"user": 3, "movie": 1, "tag": 2}  # day and shelf: in no successful request
    assert sample_value(before, name, model="ruled", feature="user") == 0


async def test_every_histogram_is_cumulative_and_ends_with_its_count(
    rest: httpx.AsyncClient,
) -> None:
    await rest.post("/embed", content='{"features": {"user": [1]}}')
    families = await scraped(rest)
    histograms = [
        family
        for family in families.values()
        if family.type == "histogram" and PREFIX in family.name and family.samples
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
            count = sample_value(families, f"{family.name}_count", **json.loads(named))
            assert pairs[-1][1] == count


async def test_metric_names_and_help_follow_prometheus_conventions(
    rest: httpx.AsyncClient,
) -> None:
    await rest.post("/embed", content='{"features": {"user": [1]}}')
    text = (await rest.get("/metrics")).text
    families = {
        name: family for name, family in parse_families(text).items() if name.startswith(PREFIX)
    }
    assert families
    for name, family in families.items():
        assert re.fullmatch(r"embedserve_[a-z]+(_[a-z]+)*", name)
        assert not re.search(r"_(ms|us|millis\w*|mib|kb|percent)(_|$)", name)
        assert family.documentation.endswith(".")
        is_counter = f"# TYPE {name}_total counter" in text
        assert is_counter == (family.type == "counter")


async def test_served_model_is_described_by_metrics(rest: httpx.AsyncClient) -> None:
    families = await scraped(rest)
    assert sample_value(families, "embedserve_model_version", model="shop") == 7
    assert sample_value(families, "embedserve_model_replanned", model="shop") == 0
    rows_bytes = 4 * (7 * 4 + 11 * 4 + 5 * 4)  # rows of 3 and 2 columns are filled up to 4
    assert sample_value(families, "embedserve_table_bytes", model="shop", rank="0") == rows_bytes


def test_every_sample_has_the_labels_of_its_family() -> None:
    """Guards against missing label names: prometheus_client drops the values of such labels."""
    shards = FakeParts(joined={("shop", 7): [2]})
    shop = in_parts(model_info(), shards, parts=1)
    metrics = Metrics(
        [shop, replace(ruled_info(), served_name="ruled@canary")],
        room=CounterRoom(2, COLUMNS_MIN, 1),
    )
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


def test_unit_of_each_family_matches_its_name() -> None:
    for row in FAMILIES:
        for unit in ("seconds", "bytes"):
            assert (row.unit == unit) == row.name.endswith(f"_{unit}"), row.name


def test_single_process_counts_itself_as_a_worker() -> None:
    families = families_of(Metrics([model_info()]))
    assert sample_value(families, "embedserve_workers") == 1
    assert sample_value(families, "embedserve_worker_restarts_total") == 0
    assert [name for name in families if name.startswith("python_gc")]
    assert sample_value(families, "process_resident_memory_bytes") > 0
    assert sample_value(families, "process_start_time_seconds") > 0


def test_metrics_of_two_servers_are_independent() -> None:
    one, other = Metrics([model_info()]), Metrics([model_info()])
    one.protocols["rest"].count_answered(0.1, 10)
    assert outcomes_of(other.protocols["rest"]).total() == 0
    one.registry()
    other.registry()


def test_number_of_counted_names_is_limited() -> None:
    metrics = Metrics([model_info()])
    for i in range(NAMES_SPARE):
        metrics.add(replace(model_info(), served_name=f"shop@a{i}"))
    message = (
        f"shop@b: this server has room to count {NAMES_SPARE + 1} names since its start: restart"
    )
    with pytest.raises(StoreError, match=message):
        metrics.add(replace(model_info(), served_name="shop@b"))
    metrics.remove("shop@a3")
    metrics.add(replace(model_info(), served_name="shop@b"))


def test_shard_reserves_counters_for_all_versions_held() -> None:
    """Covers a store with few versions at the start. Each version has a name of its own."""
    shop = [replace(model_info(), served_name=f"shop@{i}") for i in range(32)]
    films = [replace(model_info("films"), served_name=f"films@{i}") for i in range(32)]
    settings = ServeSettings("store", part="0/2", versions_held=32)
    room = CounterRoom.of([*shop[:2], films[0]], settings)
    metrics = Metrics(shop[:2], room=room)
    for version in (*shop[2:], *films):
        metrics.check_room(version.served_as)
        metrics.add(version)
    assert CounterRoom.of(shop, replace(settings, versions_held=2)).names == len(shop)
    assert CounterRoom.of(shop[:2], replace(settings, part="")).names == 2
