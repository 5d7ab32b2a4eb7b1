"""Tests of batches that are divided over parts: their sums equal those of whole tables."""

from dataclasses import replace
from itertools import pairwise, permutations, product
from typing import cast

import numpy as np
import pytest
from fanout.random_ids import whole_results
from hypothesis import given, settings
from hypothesis import strategies as st

from embedserve.fanout.parted_version import PartedBatch
from embedserve.fanout.partition import Partition, PartLookup
from embedserve.fanout.pooled_batch import DenseBatch, PackedBatch
from embedserve.fanout.pooled_columns import PooledColumns, chunk_width
from embedserve.fanout.unpooled_batch import UnpooledBatch
from embedserve_store import Manifest, TableSpec
from embedserve_store.plans.host_plan import HostPlan

Tables = dict[str, np.ndarray]
Pooled = type[PackedBatch] | type[DenseBatch]
POOLED_KINDS: list[Pooled] = [PackedBatch, DenseBatch]
both_pooled = pytest.mark.parametrize("pooled", POOLED_KINDS)


class PartitionedModel:
    """A model with random rows, and its parts."""

    def __init__(self, tables: list[TableSpec], hosts: HostPlan) -> None:
        random = np.random.default_rng(0)
        self.rows = {
            one.name: random.standard_normal((one.num_embeddings, one.embedding_dim), np.float32)
            for one in tables
        }
        self.manifest, self.hosts = Manifest("m", 1, tuple(tables), False), hosts
        self.partition = Partition(self.manifest, hosts)

    def batch(
        self,
        kind: type[PartedBatch],
        ids: np.ndarray,
        lengths: np.ndarray,
        weights: np.ndarray | None = None,
    ) -> PartedBatch:
        """Returns a batch of ``kind``."""
        partition = self.partition
        if kind is UnpooledBatch:
            return UnpooledBatch(partition, ids, lengths)
        divided = partition.divide(ids, lengths, weights)
        return cast(Pooled, kind)(partition, PooledColumns(partition), divided)

    def merged(self, batch: PartedBatch) -> np.ndarray:
        """Returns the results of ``batch`` after those of its parts."""
        lookups = batch.lookups()
        parts = [lookup.part for lookup in lookups]
        return batch.merge(dict(zip(parts, self.part_results(lookups), strict=True)))

    def whole_results(
        self, ids: np.ndarray, lengths: np.ndarray, weights: np.ndarray | None = None
    ) -> np.ndarray:
        """Returns the sums, or the rows of an unpooled model, from whole tables."""
        pooling = "sum" if self.manifest.is_pooled else "none"
        tables = tuple(replace(table, pooling=pooling) for table in self.manifest.tables)
        manifest = replace(self.manifest, tables=tables)
        return whole_results(manifest, self.rows, ids, lengths, weights)

    def part_results(self, lookups: list[PartLookup]) -> list[np.ndarray]:
        """Returns the results of the parts, whose feature order may differ from that of the ids."""
        part_values = []
        for lookup in lookups:
            part = self.partition.manifests[lookup.part]
            sent = self.partition.sent_features(lookup.part)
            lengths = lookup.lengths.reshape(len(sent), -1)
            ends = np.append(0, lengths.sum(axis=1).cumsum())
            order = [sent.index(name) for name in part.features]
            spans = [slice(ends[i], ends[i + 1]) for i in order]
            ids = np.concatenate([lookup.ids[span] for span in spans])
            weights = lookup.weights
            if weights is not None:
                weights = np.concatenate([weights[span] for span in spans])
            rows = {
                name: self.rows[name][slice(*bounds[lookup.part : lookup.part + 2])]
                for name, bounds in self.hosts.rows.items()
            }
            found = whole_results(part, rows, ids, lengths[order].reshape(-1), weights)
            assert found.shape == lookup.shape
            part_values.append(found)
        return part_values


POOLED = [
    TableSpec("movie", 100, 12, ("history", "candidate"), "mean", "float32"),
    TableSpec("genre", 3, 4, ("genres",), "sum", "float32"),
    TableSpec("user", 50, 8, ("user",), "sum", "float32"),
    TableSpec("recent", 77, 8, ("history",), "sum", "float32"),
]
HOSTS = HostPlan(
    4,
    {
        "movie": (0, 20, 40, 90, 100),
        "genre": (0, 0, 0, 3, 3),
        "user": (0, 13, 26, 39, 50),
        "recent": (0, 20, 40, 77, 77),
    },
)


def random_batch(
    manifest: Manifest, counts: list[list[int]], seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    lengths = np.array(counts, np.int32).reshape(-1)
    totals = np.array(counts).sum(axis=1)
    ids = np.concatenate(
        [
            random.integers(0, rows, n)
            for rows, n in zip(manifest.rows_per_feature, totals, strict=True)
        ]
    )
    return ids.astype(np.int64), lengths, random.standard_normal(ids.size).astype(np.float32)


COUNTS = st.integers(1, 6).flatmap(
    lambda examples: st.lists(
        st.lists(st.integers(0, 5), min_size=examples, max_size=examples), min_size=4, max_size=4
    )
)


@both_pooled
@settings(deadline=None)
@given(counts=COUNTS, seed=st.integers(0, 2**32), is_weighted=st.booleans())
def test_merged_part_sums_equal_sums_of_whole_tables(
    pooled: Pooled, counts: list[list[int]], seed: int, is_weighted: bool
) -> None:
    one = PartitionedModel(POOLED, HOSTS)
    ids, lengths, weights = random_batch(one.manifest, counts, seed)
    given_weights = weights if is_weighted else None
    found = one.batch(pooled, ids, lengths, given_weights)
    for lookup in found.lookups():
        features = one.partition.has_feature[lookup.part].sum()
        assert lookup.lengths.size == features * lookup.shape[0]
        if pooled is PackedBatch:
            # Each feature's bags are packed: every example has an id of some feature.
            assert lookup.lengths.reshape(-1, lookup.shape[0]).any(axis=0).all()
    merged = one.merged(found)
    expected = one.whole_results(ids, lengths, given_weights)
    assert merged.dtype == np.float32
    np.testing.assert_allclose(merged, expected, rtol=0, atol=1e-5)


UNPOOLED = [replace(table, embedding_dim=8, pooling="none") for table in POOLED]


@settings(deadline=None)
@given(COUNTS, st.integers(0, 2**32))
def test_merged_part_rows_equal_rows_of_whole_tables(counts: list[list[int]], seed: int) -> None:
    one = PartitionedModel(UNPOOLED, HOSTS)
    ids, lengths, _ = random_batch(one.manifest, counts, seed)
    found = one.batch(UnpooledBatch, ids, lengths)
    for lookup in found.lookups():  # each row is requested once
        ends = np.append(0, lookup.lengths.cumsum())
        for start, end in pairwise(ends.tolist()):
            assert len(set(lookup.ids[start:end].tolist())) == end - start
    assert np.array_equal(one.merged(found), one.whole_results(ids, lengths))


@pytest.mark.parametrize("kind", [*POOLED_KINDS, UnpooledBatch])
def test_ids_on_a_part_are_counted_by_feature_and_example(kind: type[PartedBatch]) -> None:
    one = PartitionedModel(UNPOOLED if kind is UnpooledBatch else POOLED, HOSTS)
    # history, candidate, genres, user; two examples
    lengths = np.array([1, 0, 0, 1, 0, 0, 0, 0], np.int32)
    found = one.batch(kind, np.array([19, 40]), lengths)
    assert [lookup.part for lookup in found.lookups()] == [0, 2]
    counts = [found.count_ids_on(part).tolist() for part in range(3)]
    nothing = [[0, 0]] * 4
    assert counts == [[[1, 0], *nothing[1:]], nothing, [[0, 0], [0, 1], *nothing[2:]]]


def test_skipped_ids_are_counted_on_no_part() -> None:
    partition = PartitionedModel(UNPOOLED, HOSTS).partition
    lengths = np.array([2, 1, 0, 1, 0, 0, 0, 0], np.int32)
    found = UnpooledBatch(partition, np.array([0, 19, 0, 40]), lengths, np.array([0, 2]))
    assert found.count_ids_on(0).tolist() == [[1, 0], [0, 0], [0, 0], [0, 0]]
    assert found.count_ids_on(2).tolist() == [[0, 0], [0, 1], [0, 0], [0, 0]]


def test_merged_sums_are_bitwise_equal_in_any_response_order_and_packed_or_not() -> None:
    one = PartitionedModel(POOLED, HOSTS)
    ids, lengths, weights = random_batch(one.manifest, [[9, 4, 7]] * 4, 5)
    results = set()
    for order, pooled in product(permutations(range(4)), POOLED_KINDS):
        found = one.batch(pooled, ids, lengths, weights)
        lookups = found.lookups()
        part_values = one.part_results(lookups)
        values = {lookups[i].part: part_values[i] for i in order}
        results.add(found.merge(values).tobytes())
        assert not values  # no response stays in memory
    assert len(results) == 1


@both_pooled
@pytest.mark.parametrize(
    ("dims", "width"),
    [
        ((64, 64), 64),
        ((12, 4, 8, 8), 4),
        ((64, 33), 64),
        ((64, 64, 64, 1), 64),
        ((128, 4), 64),
        ((10, 16, 24, 32, 7), 32),
        ((128, *[1] * 25), 4),
    ],
)
def test_vectors_of_any_width_are_added_in_few_chunks(
    pooled: Pooled, dims: tuple[int, ...], width: int
) -> None:
    """Checks that a table of width 1 does not split every vector into a chunk per column."""
    assert chunk_width(dims) == width
    chunks = sum(-(-dim // width) for dim in dims)
    assert chunks * width <= 2 * sum(dims)
    assert chunks <= 4 * len(dims)
    counts, bounds = [[3, 1, 0, 2, 5]] * len(dims), (0, 20, 40, 60)
    tables = [
        TableSpec(f"t{i}", 60, dim, (f"f{i}",), "sum", "float32") for i, dim in enumerate(dims)
    ]
    hosts = HostPlan(3, {table.name: bounds for table in tables})
    one = PartitionedModel(tables, hosts)
    ids, lengths, _ = random_batch(one.manifest, counts, 3)
    found = one.merged(one.batch(pooled, ids, lengths))
    np.testing.assert_allclose(found, one.whole_results(ids, lengths), rtol=0, atol=1e-5)


@both_pooled
def test_batch_without_ids_calls_no_part_and_returns_zeros(pooled: Pooled) -> None:
    one = PartitionedModel(POOLED, HOSTS)
    found = one.batch(pooled, np.empty(0, np.int64), np.zeros(8, np.int32))
    assert found.lookups() == []
    assert np.array_equal(found.merge({}), np.zeros((2, 44), np.float32))
