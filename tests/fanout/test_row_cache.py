"""Tests of the row cache by itself: sums of cached rows, replacement, and bounds."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from fanout.random_ids import random_ids, whole_results
from pooled import collection
from reference import stored_rows
from resident_memory import resident_bytes
from torchrec import PoolingType

from embedserve.fanout import row_cache
from embedserve.fanout.partition import Partition
from embedserve.fanout.pooled_columns import ChunkLayout, PooledColumns
from embedserve.fanout.row_cache import ENTRY_BYTES, WAYS, RowCache
from embedserve_store import Manifest, ModelStore, TableSpec, publish
from embedserve_store.plans.host_plan import HostPlan


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
        sums = whole_results(manifest, rows, ids, lengths, weights)
        sums -= whole_results(manifest, rows, taken.ids, taken.lengths, taken.weights)
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


def test_rows_are_stored_once_no_thread_reads(tmp_path: Path) -> None:
    cache, _, _, rows = make_cache(tmp_path, TABLES, 1 << 20)
    ids, lengths = np.array([7]), np.array([1, 0, 0, 0], np.int32)
    with cache._reading():
        with cache._reading():
            cache.store(0, ids, rows["large"][ids])
        assert cache.take_cached(ids, lengths, None).sums is None
        cache.take_cached(ids, lengths, None)
        assert cache.candidates() is None  # further rows wait until these are stored
    assert cache.take_cached(ids, lengths, None).ids.size == 0
    assert cache.candidates() is not None


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


def test_features_of_the_same_table_share_its_memory(tmp_path: Path) -> None:
    table = [("one", 1000, 4, ["first", "second"], PoolingType.SUM)]
    cache, _, _, rows = make_cache(tmp_path, table, 1000 * (ENTRY_BYTES + 16))
    assert (cache._buckets * WAYS == 1000).all()
    ids, lengths = np.array([7, 7]), np.ones(2, np.int32)
    cache.store(0, ids[:1], rows["one"][ids[:1]])
    assert cache.take_cached(ids, lengths, None).ids.size == 0


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
