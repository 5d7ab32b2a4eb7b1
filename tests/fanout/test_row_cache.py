"""Tests of the rows that a router keeps of its shards: sums are the same, and calls are fewer."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fanout.local_shards import LocalShards, batch_of, routed
from lookup_cases import pooled_source, unpooled_source
from pooled import collection
from reference import assert_same, stored_rows
from torchrec import PoolingType
from unpooled import unpooled_collection

from embedserve.fanout import row_cache, row_fetcher
from embedserve.fanout.batch_fanout import Finish
from embedserve.fanout.partition import Partition
from embedserve.fanout.pooled_columns import ChunkLayout, PooledColumns
from embedserve.fanout.router_engine import RouterEngine
from embedserve.fanout.row_cache import ENTRY_BYTES, WAYS, RowCache
from embedserve.lookup_types import Batch
from embedserve.shard_client.reply import UNAVAILABLE, Reply
from embedserve_store import Manifest, ModelStore, TableSpec, publish
from embedserve_store.format.table_spec import DTYPES
from embedserve_store.goldens.goldens_file import Bags
from embedserve_store.goldens.reference_pooling import pool_stored
from embedserve_store.parts.part import LocalTables
from embedserve_store.plans.host_plan import HostPlan

PARTS = 3
ENOUGH_BYTES = 64 << 20
TRIES = 100


@pytest.fixture(autouse=True)
def fetch_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets each batch fetch rows."""
    monkeypatch.setattr(row_fetcher, "FETCH_S", 0.0)
    monkeypatch.setattr(row_fetcher, "FAILED_S", 0.0)


Ids = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def random_ids(
    manifest: Manifest, examples: int, random: np.random.Generator, *, is_weighted: bool = False
) -> Ids:
    """Returns (ids, lengths, weights) of a batch; about a third of the bags are empty."""
    features = len(manifest.features)
    lengths = np.maximum(0, random.integers(-2, 5, features * examples)).astype(np.int32)
    rows = np.repeat(np.repeat(manifest.rows_per_feature, examples), lengths)
    weights = random.normal(size=rows.size).astype(np.float32) if is_weighted else None
    return random.integers(0, rows), lengths, weights


def expected(store: Path, ids: Ids) -> np.ndarray:
    """Returns the values of whole tables, with means where tables have them."""
    version = ModelStore(store).load("m")
    flat, lengths, weights = ids
    bags = Bags(flat, lengths.reshape(len(version.manifest.features), -1), weights)
    return pool_stored(version.manifest, bags, flat, version.tables)


def look_up(engine: RouterEngine, ids: Ids) -> np.ndarray:
    batch, values = batch_of(engine, *ids)
    assert not batch.failures
    assert isinstance(values, np.ndarray)
    return values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inline_bytes_max", [1 << 30, 0], ids=["inline", "in a thread"])
@pytest.mark.parametrize("kind", ["sums", "weighted sums", "rows"])
def test_cached_rows_give_the_results_of_whole_tables_without_calls(
    tmp_path: Path, dtype: str, inline_bytes_max: int, kind: str
) -> None:
    is_weighted = kind == "weighted sums"
    source = unpooled_source() if kind == "rows" else pooled_source()
    publish(source, tmp_path, model="m", dtype=dtype, hosts=PARTS)
    shards = LocalShards(tmp_path, "m", PARTS)
    options: dict[str, Any] = {"row_cache_bytes": ENOUGH_BYTES}
    with routed(shards, tmp_path, "m", inline_bytes_max=inline_bytes_max, **options) as engine:
        engine.warm_up()
        ids = random_ids(engine.manifest, 6, np.random.default_rng(1), is_weighted=is_weighted)
        whole = expected(tmp_path, ids)
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
def shards(store: Path) -> LocalShards:
    return LocalShards(store, "m", PARTS)


@pytest.fixture
def engine(store: Path, shards: LocalShards) -> Iterator[RouterEngine]:
    with routed(shards, store, "m", row_cache_bytes=ENOUGH_BYTES) as routing:
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
    engine: RouterEngine, shards: LocalShards
) -> None:
    ones = np.ones(1, np.int32)
    for row in range(30):
        look_up(engine, (np.array([row]), ones, None))
    assert shards.called_parts == [row // 10 for row in range(30)]


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


def test_rows_are_fetched_again_after_a_failed_fetch(
    engine: RouterEngine, shards: LocalShards, store: Path
) -> None:
    shards.replies[1] = Reply(UNAVAILABLE)
    for _ in range(5):
        batch, _ = batch_of(engine, *IDS)
        assert batch.cached_count == 0  # a fetch that lacks a part stores nothing
    shards.replies.clear()
    cache_rows(engine, shards, IDS)
    assert_same(look_up(engine, IDS), expected(store, IDS))


def test_a_fetch_is_bounded_by_its_bytes(
    engine: RouterEngine, shards: LocalShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine._fetcher is not None
    monkeypatch.setattr(engine._fetcher, "_rows_max", 2)
    fetched: list[int] = []
    begin = engine._begin_exact

    def begin_recorded(batch: Batch, finish: Finish) -> None:
        fetched.append(batch.ids.size)
        begin(batch, finish)

    monkeypatch.setattr(engine, "_begin_exact", begin_recorded)
    cache_rows(engine, shards, (np.arange(9), np.array([9], np.int32), None))
    assert len(fetched) >= 5
    assert max(fetched) == 2


def test_local_tables_are_not_cached(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tables = [
        ("large", 9000, 16, ["seen"], PoolingType.SUM),
        ("small", 5, 8, ["small"], PoolingType.SUM),
    ]
    publish(collection(tables), tmp_path, model="m", hosts=2)
    shards, local = LocalShards(tmp_path, "m", 2), LocalTables(1 << 10)
    options: dict[str, Any] = {"local": local, "row_cache_bytes": ENOUGH_BYTES}
    ids = np.array([3, 8999, 4]), np.array([1, 1, 0, 1], np.int32), None
    with routed(shards, tmp_path, "m", **options) as engine:
        assert engine.local_tables == ("small",)
        cache_rows(engine, shards, ids)
        batch, values = batch_of(engine, *ids)
        assert batch.cached_count == 2
        assert_same(values, expected(tmp_path, ids))


def make_cache(
    tmp_path: Path, tables: Sequence[tuple[str, int, int, list[str], PoolingType]], nbytes: int
) -> tuple[RowCache, ChunkLayout, Manifest, dict[str, np.ndarray]]:
    """Returns a cache of a version, its columns, its manifest and the rows of its tables."""
    torch.manual_seed(0)
    publish(collection(list(tables)), tmp_path, model="m", hosts=2)
    version = ModelStore(tmp_path).load("m")
    assert version.plan.hosts is not None
    columns = PooledColumns(Partition(version.manifest, version.plan.hosts))
    cache = RowCache(version.manifest, columns, (), nbytes)
    return cache, columns.whole, version.manifest, stored_rows(version)


TABLES = [
    ("large", 500, 8, ["seen", "liked"], PoolingType.SUM),
    ("odd", 90, 3, ["odd"], PoolingType.SUM),
    ("more", 700, 5, ["odd"], PoolingType.SUM),
    ("small", 4, 1, ["small"], PoolingType.SUM),
]


@pytest.mark.parametrize("nbytes", [3_000, 20_000, 1 << 20])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_sums_equal_those_of_the_rows_while_rows_replace_others(
    tmp_path: Path, nbytes: int, is_weighted: bool
) -> None:
    """Random batches, and every row that is missed twice is stored."""
    cache, whole, manifest, rows = make_cache(tmp_path, TABLES, nbytes)
    random, examples = np.random.default_rng(4), 5
    features, found = len(manifest.features), 0
    for _ in range(300):
        ids, lengths, weights = random_ids(manifest, examples, random, is_weighted=is_weighted)
        taken = cache.take_cached(ids, lengths, weights)
        # The sums of all rows, less those of the rows that are left, are those of the cached rows.
        sums = sums_of(manifest, rows, ids, lengths, weights)
        sums -= sums_of(manifest, rows, taken.ids, taken.lengths, taken.weights)
        assert taken.lengths.sum() == taken.ids.size
        assert taken.lengths.dtype == np.int32
        if taken.sums is None:
            assert taken.ids is ids
        else:
            found += ids.size - taken.ids.size
            np.testing.assert_allclose(whole.without_padding(taken.sums), sums, atol=1e-5)
        if (candidates := cache.candidates()) is not None:
            for feature in range(features):
                own = candidates[1][candidates[0] == feature]
                columns = [one for one in manifest.columns if one.feature == feature]
                vectors = np.concatenate([rows[one.table.name][own] for one in columns], axis=1)
                cache.store(feature, own, vectors)
    assert found > 100


def sums_of(
    manifest: Manifest,
    rows: dict[str, np.ndarray],
    ids: np.ndarray,
    lengths: np.ndarray,
    weights: np.ndarray | None,
) -> np.ndarray:
    """Returns the sums of rows in float64."""
    examples = lengths.size // len(manifest.features)
    bags = np.repeat(np.arange(lengths.size), lengths)
    factors = np.ones(ids.size) if weights is None else weights.astype(np.float64)
    sums = np.zeros((examples, sum(manifest.length_per_key)))
    for one in manifest.columns:
        own = bags // examples == one.feature
        vectors = rows[one.table.name][ids[own]] * factors[own, None]
        np.add.at(sums[:, one.start : one.end], bags[own] % examples, vectors)
    return sums


def test_rows_are_not_stored_while_a_thread_reads(tmp_path: Path) -> None:
    cache, _, _, rows = make_cache(tmp_path, TABLES, 1 << 20)
    ids, lengths = np.array([7]), np.array([1, 0, 0, 0], np.int32)
    with cache._reading():
        cache.store(0, ids, rows["large"][ids])
    assert cache.take_cached(ids, lengths, None).sums is None
    cache.store(0, ids, rows["large"][ids])
    assert cache.take_cached(ids, lengths, None).ids.size == 0


def test_a_full_bucket_keeps_the_rows_that_are_looked_up(tmp_path: Path) -> None:
    table = [("one", 1000, 4, ["one"], PoolingType.SUM)]
    bucket_bytes = WAYS * (ENTRY_BYTES + 16)
    cache, _, _, rows = make_cache(tmp_path, table, 10 * bucket_bytes)
    lengths = np.ones(1, np.int32)

    def is_cached(row: int) -> bool:
        return not cache.take_cached(np.array([row]), lengths, None).ids.size

    def store(row: int) -> None:
        cache.store(0, np.array([row]), rows["one"][[row]])

    own = [10 * i + 3 for i in range(50)]  # rows of one of ten buckets
    first, later = own[:WAYS], own[WAYS:]
    for row in first:
        store(row)
    for row in later[:10]:  # a row is stored only if one was not looked up since the last
        assert all(map(is_cached, first))
        store(row)
    assert all(map(is_cached, first))
    store(later[0])  # clears the marks
    kept = first[::2]
    assert all(map(is_cached, kept))
    store(later[1])
    assert [row for row in own if is_cached(row)] == [*kept, *first[3::2], later[1]]


@pytest.mark.parametrize("nbytes", [0, 100, 1000, 12_345, 1 << 20])
def test_memory_is_divided_within_its_bound(tmp_path: Path, nbytes: int) -> None:
    cache, _, manifest, _ = make_cache(tmp_path, TABLES, nbytes)
    arrays = [cache._keys, cache._missed, cache._is_used, cache._chunk_rows.numpy()]
    empty_bucket_bytes = WAYS * ENTRY_BYTES
    assert sum(one.nbytes for one in arrays) <= nbytes + empty_bucket_bytes
    if nbytes == 1 << 20:  # all rows have a place
        slots = cache._buckets * WAYS
        assert (slots >= manifest.rows_per_feature).all()


def test_candidates_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_cache, "CANDIDATES_MAX", 25)
    cache, _, _, _ = make_cache(tmp_path, TABLES, 1 << 20)
    for first in range(0, 100, 10):
        ids, lengths = np.arange(first, first + 10), np.array([10, 0, 0, 0], np.int32)
        cache.take_cached(ids, lengths, None)
        cache.take_cached(ids, lengths, None)
    found = cache.candidates()
    assert found is not None
    assert sorted(found[1].tolist()) == list(range(25))
    assert cache.candidates() is None


def test_rows_have_equal_chances_to_be_fetched(tmp_path: Path) -> None:
    """Only some of many candidates are fetched at once."""
    cache, _, _, _ = make_cache(tmp_path, TABLES, 1 << 20)
    ids, lengths = np.arange(100), np.array([100, 0, 0, 0], np.int32)
    first = set()
    cache.take_cached(ids, lengths, None)
    for _ in range(60):
        cache.take_cached(ids, lengths, None)
        found = cache.candidates()
        assert found is not None
        first.add(int(found[1][0]))
    assert len(first) > 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_memory_is_used_as_rows_come() -> None:
    rows = 1 << 22
    table = TableSpec("one", rows, 64, ("one",), "sum", "float32")
    manifest = Manifest("m", 1, (table,), is_weighted=False)
    hosts = HostPlan(2, {"one": (0, rows // 2, rows)})
    columns = PooledColumns(Partition(manifest, hosts))
    before = resident_bytes()
    cache = RowCache(manifest, columns, (), 1 << 30)
    assert cache._chunk_rows.nbytes > 900 << 20
    assert resident_bytes() < before + (300 << 20)


def test_a_fetch_that_cannot_begin_is_logged_and_tried_again(
    engine: RouterEngine,
    shards: LocalShards,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    begin = engine._begin_exact

    def fail(batch: Batch, finish: Finish) -> None:
        raise MemoryError

    monkeypatch.setattr(engine, "_begin_exact", fail)
    for _ in range(4):
        look_up(engine, IDS)
    assert "rows cannot be fetched for the row cache" in caplog.text
    monkeypatch.setattr(engine, "_begin_exact", begin)
    cache_rows(engine, shards, IDS)


def test_sums_of_cached_rows_count_toward_the_bytes_of_batches(tmp_path: Path) -> None:
    publish(pooled_source(), tmp_path, model="m", hosts=PARTS)
    shards = LocalShards(tmp_path, "m", PARTS)
    with routed(shards, tmp_path, "m", row_cache_bytes=ENOUGH_BYTES) as engine:
        ids, lengths, _ = random_ids(engine.manifest, 100, np.random.default_rng(1))
        batch = Batch(ids, lengths, None, [100], 100)
        parted, dims = engine._parted, sum(engine.manifest.length_per_key)
        more = parted.values_bytes(batch, engine._cache) - parted.values_bytes(batch, None)
        assert more >= 4 * 100 * dims
