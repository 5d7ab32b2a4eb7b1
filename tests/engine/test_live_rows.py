"""An engine over live rows answers as torchrec itself does over the version that was compacted from
the deltas: its lookup runs eagerly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pooled import Tables, collection
from torchrec import PoolingType
from unpooled import unpooled_collection

from embedserve.deltas.live_rows import LiveRows
from embedserve.deltas.rows_reader import RowsReader
from embedserve.deltas.rows_writer import RowsWriter
from embedserve.engine.compile import KINDS
from embedserve.engine.engine import Engine
from embedserve.engine.restore import restore
from embedserve_store import DeltaWriter, ModelStore, ModelVersion, compact_deltas, publish
from embedserve_store.deltas.delta_line import DeltaLine
from embedserve_store.format.delta_file import ChangedRows
from embedserve_store.format.table_spec import DTYPES

MEMORY = 2 << 20
PUSHES = 3
TABLES = [
    ("movie", 1001, 6, ["history", "candidate"], PoolingType.MEAN),
    ("genre", 3, 16, ["genres"], PoolingType.SUM),
    ("user", 50, 33, ["user"], PoolingType.SUM),
    ("shop", 70, 32, ["shop"], PoolingType.SUM),
]
SHARDING = {
    "movie": "row_wise",
    "genre": "data_parallel",
    "user": "table_wise",
    "shop": "column_wise",
}
GROUPED = [
    ("movie", 1001, 6, ["history", "candidate"], PoolingType.MEAN),
    ("user", 50, 33, ["user"], PoolingType.SUM),
    ("title", 1001, 16, ["candidate", "title"], PoolingType.SUM),
    ("maker", 1001, 9, ["title"], PoolingType.MEAN),
]
"""Tables of which all but user are a group, though movie and maker share no feature."""
UNEQUAL = [*GROUPED[:3], ("maker", 700, 9, ["title"], PoolingType.MEAN)]


@pytest.fixture(scope="module")
def pooled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a model for each dtype, with deltas, and version 2 compacted from them."""
    return pooled_store(tmp_path_factory.mktemp("live") / "store", TABLES, SHARDING)


@pytest.fixture(scope="module")
def row_wise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pooled_store(tmp_path_factory.mktemp("rows") / "store", GROUPED, "row_wise")


@pytest.fixture(scope="module")
def table_wise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pooled_store(tmp_path_factory.mktemp("tables") / "store", UNEQUAL, "table_wise")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a model whose tables of a group are sharded differently."""
    sharding = {
        "movie": "row_wise",
        "user": "row_wise",
        "title": "table_wise",
        "maker": "column_wise",
    }
    store = tmp_path_factory.mktemp("mixed") / "store"
    return pooled_store(store, UNEQUAL, sharding, ["float32"])


@pytest.fixture(scope="module")
def unpooled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a model of a table for each feature, and one of features of several tables."""
    store = tmp_path_factory.mktemp("unpooled") / "store"
    for model, tables in (("rows", TABLES), ("grouped", GROUPED)):
        source = unpooled_collection([(name, rows, keys) for name, rows, _, keys, _ in tables])
        publish(source, store, model=model, sharding="row_wise", world_size=3)
        push_and_compact(store, model)
    return store


def pooled_store(
    store: Path,
    tables: Tables,
    sharding: str | Mapping[str, str],
    dtypes: Sequence[str] = DTYPES,
) -> Path:
    torch.manual_seed(7)
    source = collection(tables)
    for dtype in dtypes:
        publish(source, store, model=dtype, dtype=dtype, sharding=sharding, world_size=2)
        push_and_compact(store, dtype)
    return store


def push_and_compact(store: Path, model: str) -> None:
    random = np.random.default_rng(1)
    tables = ModelStore(store).load(model, 1).manifest.tables
    with DeltaWriter(store, model=model) as writer:
        for _ in range(PUSHES):
            changes = {}
            for table in tables:
                count = max(2, table.num_embeddings // 3)
                numbers = np.sort(random.choice(table.num_embeddings, count, replace=False))
                values = random.normal(size=(count, table.embedding_dim)).astype(np.float32)
                changes[table.name] = (numbers, values)
            writer.push_rows(changes)
    compact_deltas(store, model)


def replay(store: Path, model: str) -> LiveRows:
    live = LiveRows(ModelStore(store).load(model, 1), MEMORY, readers=1)
    apply_line(store, live, RowsWriter(live))
    return live


def apply_line(store: Path, live: LiveRows, writer: RowsWriter) -> None:
    """Applies the deltas of the line after the last seq."""
    line = DeltaLine(ModelStore(store), live.version.manifest)
    first = live.seq
    for delta, _ in line.deltas():
        writer.apply(first + delta.seq, [one for file in line.rows(delta) for one in file])


def churn(live: LiveRows, writer: RowsWriter) -> None:
    """Applies and undoes deltas of the first rows, until spare rows have been used again. The last
    delta has the published rows."""
    random = np.random.default_rng(3)
    written = 0
    for seq in range(1, 30):
        changes = []
        for table in live.version.manifest.tables:
            rows = min(100, table.num_embeddings)
            numbers = np.sort(random.choice(rows, rows // 3, replace=False))
            values = live.tables.rows(table.name)[random.permutation(numbers)]
            changes.append(ChangedRows(table, numbers, values))
        writer.apply(2 * seq, changes)
        written += max(len(change.numbers) for change in changes)
        if not seq % 6:
            assert writer.revert(2 * seq - 4, 2 * seq + 1)
            writer.finish_undo()
    assert live.peaks.sum() < written
    published = []
    for table in live.version.manifest.tables:
        numbers = np.arange(min(100, table.num_embeddings))
        published.append(ChangedRows(table, numbers, live.tables.rows(table.name)[numbers]))
    writer.apply(live.seq + 1, published)


def look_up(engine: Engine, live: LiveRows | None, weighted: bool) -> np.ndarray:
    random = np.random.default_rng(5)
    rows = engine.manifest.rows_per_feature
    lengths = random.integers(0, 5, (len(rows), 200)).astype(np.int32)
    counts = lengths.sum(axis=1, dtype=np.int64)
    ids = np.concatenate([random.integers(0, *one) for one in zip(rows, counts, strict=True)])
    weights = random.normal(size=len(ids)).astype(np.float32) if weighted else None
    if live is None:
        return engine.lookup(ids, lengths.reshape(-1), weights)
    reader = RowsReader(live, 0, engine.plan)
    view, _ = reader.begin()
    found = engine.lookup(reader.newest(ids, counts, view), lengths.reshape(-1), weights)
    reader.end(view)
    return found


def compacted(store: Path, model: str) -> ModelVersion:
    return ModelStore(store).load(model, 2)


@pytest.mark.parametrize(
    ("dtype", "ranks"), [*((dtype, ranks) for dtype in DTYPES for ranks in (1, 2)), ("float32", 3)]
)
def test_changed_rows_are_those_of_the_compacted_version(
    pooled: Path, dtype: str, ranks: int
) -> None:
    live = replay(pooled, dtype)
    stored = compacted(pooled, dtype).plan.tables["shop"]
    assert (stored.sharding_type, len(stored.shards)) == ("column_wise", 2)
    engine = restore(live.version, f"cpu:{ranks}")
    same = restore(compacted(pooled, dtype), f"cpu:{ranks}", is_eager=True)
    for weighted in (False, True):
        expected = look_up(same, None, weighted)
        assert np.array_equal(look_up(engine, live, weighted), expected)
        assert not np.array_equal(look_up(engine, None, weighted), expected)
    engine.check()  # the published rows are as they were


@pytest.mark.parametrize("sharding", ["row_wise", "table_wise"])
@pytest.mark.parametrize(
    ("dtype", "ranks"), [*((dtype, ranks) for dtype in DTYPES for ranks in (1, 2)), ("float32", 3)]
)
def test_features_of_several_tables(
    request: pytest.FixtureRequest, sharding: str, ranks: int, dtype: str
) -> None:
    """Spare rows are used again before, and all is undone in the end."""
    store: Path = request.getfixturevalue(sharding)
    version = ModelStore(store).load(dtype, 1)
    live = LiveRows(version, MEMORY, readers=1, undo=PUSHES + 1)
    assert live.version.plan.tables == version.plan.tables
    writer = RowsWriter(live)
    churn(live, writer)
    engine = restore(live.version, f"cpu:{ranks}")
    same = restore(compacted(store, dtype), f"cpu:{ranks}", is_eager=True)
    before = look_up(engine, live, weighted=False)
    seq = live.seq
    apply_line(store, live, writer)
    for weighted in (False, True):
        expected = look_up(same, None, weighted)
        assert np.array_equal(look_up(engine, live, weighted), expected)
    assert writer.revert(seq, live.seq + 1)
    assert np.array_equal(look_up(engine, live, weighted=False), before)
    engine.check()


@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_resident_rows(pooled: Path, dtype: str) -> None:
    live = LiveRows(ModelStore(pooled).load(dtype, 1), MEMORY, readers=1)
    engine = restore(live.make_resident(), "cpu:2")
    apply_line(pooled, live, RowsWriter(live))
    same = restore(compacted(pooled, dtype), "cpu:2", is_eager=True)
    for weighted in (False, True):
        expected = look_up(same, None, weighted)
        assert np.array_equal(look_up(engine, live, weighted), expected)
    engine.check()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_tables_of_a_group_that_are_sharded_differently_are_served_whole(
    mixed: Path, ranks: int
) -> None:
    live = replay(mixed, "float32")
    plan = live.version.plan
    assert [plan.tables[name].sharding_type for name in ("movie", "user", "title", "maker")] == [
        "table_wise",
        "row_wise",
        "table_wise",
        "table_wise",
    ]
    engine = restore(live.version, f"cpu:{ranks}")
    same = restore(replace(compacted(mixed, "float32"), plan=plan), f"cpu:{ranks}", is_eager=True)
    for weighted in (False, True):
        expected = look_up(same, None, weighted)
        assert np.array_equal(look_up(engine, live, weighted), expected)


@pytest.mark.parametrize("model", ["rows", "grouped"])
@pytest.mark.parametrize("is_eager", [False, True])
def test_unpooled_rows_on_three_ranks(unpooled: Path, model: str, is_eager: bool) -> None:
    live = replay(unpooled, model)
    engine = restore(live.version, "cpu:3", is_eager=is_eager)
    assert engine.lookup_kind in KINDS
    same = restore(compacted(unpooled, model), "cpu:3", is_eager=True)
    expected = look_up(same, None, False)
    assert np.array_equal(look_up(engine, live, False), expected)
