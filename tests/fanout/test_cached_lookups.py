"""Tests of a router with a row cache: results are the same, and calls are fewer."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from fanout.conftest import Published
from fanout.local_shards import LocalShards, batch_of, on_loop, routed
from fanout.random_ids import Ids, random_ids
from pooled import collection
from reference import assert_same
from torchrec import PoolingType
from unpooled import unpooled_collection

from embedserve.config import Limits
from embedserve.errors import EngineError
from embedserve.fanout import parted_version, row_fetcher
from embedserve.fanout.batch_fanout import Finish
from embedserve.fanout.router_engine import RouterEngine
from embedserve.fanout.row_fetcher import RowFetcher
from embedserve.lookup_types import Batch
from embedserve.shard_client.reply import UNAVAILABLE, Reply, lost
from embedserve_store import ModelStore, publish
from embedserve_store.format.table_spec import DTYPES
from embedserve_store.goldens.goldens_file import Bags
from embedserve_store.goldens.reference_pooling import pool_stored
from embedserve_store.parts.part import LocalTables

PARTS = 3
ENOUGH_BYTES = 64 << 20
TRIES = 100


@pytest.fixture(autouse=True)
def fetch_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets each batch fetch rows."""
    monkeypatch.setattr(row_fetcher, "FETCH_S", 0.0)
    monkeypatch.setattr(row_fetcher, "FAILED_S", 0.0)


def expected(store: Path, ids: Ids) -> np.ndarray:
    """Returns the values of whole tables, with means where tables have them."""
    version = ModelStore(store).load("m")
    flat, lengths, weights = ids
    bags = Bags(flat, lengths.reshape(len(version.manifest.features), -1), weights)
    return pool_stored(version.manifest, bags, flat, version.tables)


def look_up(engine: RouterEngine, ids: Ids) -> np.ndarray:
    batch, values = batch_of(engine, *ids)
    assert not batch.failures
    return values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inline_bytes_max", [1 << 30, 0], ids=["inline", "in a thread"])
@pytest.mark.parametrize("kind", ["sums", "weighted sums", "rows"])
def test_cached_rows_give_the_results_of_whole_tables_without_calls(
    published: Published, dtype: str, inline_bytes_max: int, kind: str
) -> None:
    is_weighted = kind == "weighted sums"
    store = published(kind != "rows", PARTS, dtype)
    shards = LocalShards(store)
    with routed(shards, inline_bytes_max=inline_bytes_max, row_cache_bytes=ENOUGH_BYTES) as engine:
        engine.warm_up()
        ids = random_ids(engine.manifest, 6, np.random.default_rng(1), is_weighted=is_weighted)
        whole = expected(store, ids)
        for _ in range(TRIES):
            shards.called_parts.clear()
            batch, values = batch_of(engine, *ids)
            assert_same(values, whole)
            if not shards.called_parts:  # neither for the batch nor to fetch rows
                break
        assert not shards.called_parts
        assert batch.cached_count == ids[0].size


@pytest.fixture(params=["pooled", "unpooled"])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Makes a store of a table of 30 rows over three parts."""
    torch.manual_seed(0)
    source = (
        collection([("user", 30, 4, ["user"], PoolingType.SUM)])
        if request.param == "pooled"
        else unpooled_collection([("user", 30, ["user"])])
    )
    publish(source, tmp_path, model="m", hosts=PARTS)
    return tmp_path


@pytest.fixture
def engine(shards: LocalShards) -> Iterator[RouterEngine]:
    with routed(shards, row_cache_bytes=ENOUGH_BYTES) as routing:
        yield routing


IDS: Ids = (np.array([0, 10, 11, 20]), np.array([1, 2, 1], np.int32), None)
"""Three examples; example n has ids only of part n."""


def cache_rows(engine: RouterEngine, shards: LocalShards, ids: Ids) -> None:
    """Looks ``ids`` up until no part is called for them."""
    for _ in range(TRIES):
        shards.called_parts.clear()
        look_up(engine, ids)
        if not shards.called_parts:
            return
    pytest.fail(f"{ids[0]} are not cached")


def test_rows_that_are_looked_up_once_are_not_fetched(
    engine: RouterEngine, shards: LocalShards, caplog: pytest.LogCaptureFixture
) -> None:
    ones = np.ones(1, np.int32)
    for row in range(30):
        look_up(engine, (np.array([row]), ones, None))
    assert shards.called_parts == [row // 10 for row in range(30)]
    assert caplog.text == ""


def test_goldens_come_from_the_shards(engine: RouterEngine, shards: LocalShards) -> None:
    cache_rows(engine, shards, (np.arange(30), np.array([30], np.int32), None))
    engine.warm_up()
    assert sorted(set(shards.called_parts)) == [0, 1, 2]


def test_cached_rows_of_a_lost_part_are_answered(
    engine: RouterEngine, shards: LocalShards, store: Path
) -> None:
    cache_rows(engine, shards, IDS)
    shards.replies[1] = Reply(UNAVAILABLE)
    assert_same(look_up(engine, IDS), expected(store, IDS))
    batch, _ = batch_of(engine, np.array([10, 12, 0]), np.array([1, 1, 1], np.int32))
    [(examples, _)] = batch.failures
    assert examples.tolist() == [1]  # row 12 is not cached


@pytest.mark.parametrize("dense_share", [0.01, 2], ids=["with empty bags", "packed"])
def test_cached_rows_are_added_to_those_of_the_parts(
    engine: RouterEngine,
    shards: LocalShards,
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
    dense_share: float,
) -> None:
    monkeypatch.setattr(parted_version, "DENSE_SHARE", dense_share)
    cache_rows(engine, shards, IDS)
    ids = np.array([0, 1, 10, 12, 20, 21]), np.array([2, 2, 2], np.int32), None
    batch, values = batch_of(engine, *ids)
    assert batch.cached_count == 3  # rows 0, 10 and 20
    assert_same(values, expected(store, ids))


def test_rows_are_fetched_again_after_a_failed_fetch(
    engine: RouterEngine, shards: LocalShards, store: Path
) -> None:
    shards.replies[1] = Reply(UNAVAILABLE)
    for _ in range(5):
        batch, _ = batch_of(engine, *IDS)
        assert batch.cached_count == 0  # a fetch that fails in a part stores nothing
    shards.replies.clear()
    cache_rows(engine, shards, IDS)
    assert_same(look_up(engine, IDS), expected(store, IDS))


def test_a_fetch_without_a_replica_of_a_part_stores_the_rows_of_the_others(
    published: Published,
) -> None:
    for is_pooled in (True, False):
        store = published(is_pooled, PARTS, "float32")
        shards = LocalShards(store)
        with routed(shards, row_cache_bytes=ENOUGH_BYTES) as engine:
            ids = random_ids(engine.manifest, 6, np.random.default_rng(1))
            shards.replies[1] = lost("part 1 has no replica")
            for _ in range(TRIES):
                shards.called_parts.clear()
                batch, _ = batch_of(engine, *ids)
                if shards.called_parts == [1, 1]:  # for the batch, and to fetch rows
                    break
            assert shards.called_parts == [1, 1]
            assert 0 < batch.cached_count < ids[0].size
            shards.replies.clear()
            assert_same(look_up(engine, ids), expected(store, ids))


@pytest.mark.parametrize(("bytes_max_in_rows", "rows_max"), [(5, 5), (0.5, 1)])
def test_a_fetch_is_bounded_by_its_bytes(
    engine: RouterEngine,
    shards: LocalShards,
    monkeypatch: pytest.MonkeyPatch,
    bytes_max_in_rows: float,
    rows_max: int,
) -> None:
    row_bytes = 4 * sum(engine.manifest.length_per_key)
    monkeypatch.setattr(row_fetcher, "VALUES_BYTES_MAX", int(bytes_max_in_rows * row_bytes))
    assert engine._cache is not None
    monkeypatch.setattr(engine, "_fetcher", RowFetcher(engine._cache, engine.manifest))
    fetched: list[int] = []
    begin = engine._begin_fetch

    def begin_recorded(batch: Batch, finish: Finish) -> None:
        fetched.append(batch.ids.size)
        begin(batch, finish)

    monkeypatch.setattr(engine, "_begin_fetch", begin_recorded)
    cache_rows(engine, shards, (np.arange(9), np.array([9], np.int32), None))
    assert len(fetched) >= 9 / rows_max
    assert max(fetched) == rows_max


def test_fetches_follow_each_other_at_intervals(
    engine: RouterEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_fetcher, "FETCH_S", 0.05)
    monkeypatch.setattr(row_fetcher, "FAILED_S", 1.0)
    now = Mock(return_value=1000.0)
    monkeypatch.setattr(row_fetcher, "monotonic", now)
    cache = Mock(candidates=lambda: (np.array([0]), np.array([7])))
    fetcher = RowFetcher(cache, engine.manifest)
    row = np.zeros((1, *engine.manifest.length_per_key), np.float32)
    begun: list[tuple[Batch, Finish]] = []

    def fetches_after(seconds: float) -> int:
        now.return_value += seconds
        fetcher.fetch_if_due(lambda batch, finish: begun.append((batch, finish)))
        return len(begun)

    def finish(values: np.ndarray | EngineError) -> None:
        begun[-1][1](values)

    assert fetches_after(0) == 1
    assert fetches_after(60) == 1, "while the first is in flight"
    finish(row)
    assert fetches_after(0) == 2
    finish(row)
    assert fetches_after(0.04) == 2
    assert fetches_after(0.02) == 3
    finish(EngineError("failed"))
    assert fetches_after(0.9) == 3
    assert fetches_after(0.2) == 4
    begun[-1][0].missing_counts = np.array([[1]])
    finish(row)
    assert fetches_after(0.9) == 4
    assert fetches_after(0.2) == 5
    finish(row)
    found, cache.candidates = cache.candidates, Mock(side_effect=MemoryError)
    assert fetches_after(60) == 5
    cache.candidates = found
    assert fetches_after(0.9) == 5, "after an exception"
    assert fetches_after(0.2) == 6


def test_local_tables_are_not_cached(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tables = [
        ("large", 9000, 16, ["seen"], PoolingType.SUM),
        ("small", 5, 8, ["small"], PoolingType.SUM),
    ]
    publish(collection(tables), tmp_path, model="m", hosts=2)
    shards, local = LocalShards(tmp_path), LocalTables(1 << 10)
    ids = np.array([3, 8999, 4]), np.array([1, 1, 0, 1], np.int32), None
    with routed(shards, local=local, row_cache_bytes=ENOUGH_BYTES) as engine:
        assert engine.local_tables == ("small",)
        cache_rows(engine, shards, ids)
        batch, values = batch_of(engine, *ids)
        assert batch.cached_count == 2
        assert_same(values, expected(tmp_path, ids))


def test_a_fetch_that_cannot_begin_is_logged_and_tried_again(
    engine: RouterEngine,
    shards: LocalShards,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    begin = engine._begin_fetch
    monkeypatch.setattr(engine, "_begin_fetch", Mock(side_effect=MemoryError))
    for _ in range(4):
        look_up(engine, IDS)
    assert "rows cannot be fetched for the row cache" in caplog.text
    monkeypatch.setattr(engine, "_begin_fetch", begin)
    cache_rows(engine, shards, IDS)


@pytest.mark.parametrize("row_cache_bytes", [0, ENOUGH_BYTES])
def test_sums_of_cached_rows_count_as_work(
    published: Published, monkeypatch: pytest.MonkeyPatch, row_cache_bytes: int
) -> None:
    """20,000 ids take 0.5 ms to divide, and as cached rows of 64 columns over 2 ms to add."""
    store = published(True, PARTS, "float32")
    shards = LocalShards(store)
    limit = Limits().inline_bytes_max
    with routed(shards, inline_bytes_max=limit, row_cache_bytes=row_cache_bytes) as engine:
        ids, features = np.zeros(20_000, np.int64), len(engine.manifest.features)
        lengths = np.array([ids.size, *[0] * (features - 1)], np.int32)
        threads: list[int] = []
        divide = engine._parted.divide

        def divide_recorded(*arguments: Any) -> Any:
            threads.append(threading.get_ident())
            return divide(*arguments)

        monkeypatch.setattr(engine._parted, "divide", divide_recorded)
        look_up(engine, (ids, lengths, None))
        is_inline = threads == [on_loop(shards, threading.get_ident)]
        assert is_inline == (not row_cache_bytes)


def test_sums_of_cached_rows_count_toward_the_bytes_of_batches(published: Published) -> None:
    store = published(True, PARTS, "float32")
    with routed(LocalShards(store), row_cache_bytes=ENOUGH_BYTES) as engine:
        ids, lengths, _ = random_ids(engine.manifest, 100, np.random.default_rng(1))
        batch = Batch(ids, lengths, None, [100], 100)
        parted, dims = engine._parted, sum(engine.manifest.length_per_key)
        more = parted.values_bytes(batch, engine._cache) - parted.values_bytes(batch, None)
        assert more >= 4 * 100 * dims
