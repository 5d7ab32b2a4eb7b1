"""Tests of an engine over live rows: results equal torchrec's over the compacted version.

torchrec's lookup runs eagerly.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from compiled_once import CompiledOnce
from engine.live_stores import (
    GPU,
    MEMORY,
    PUSHES,
    apply_line,
    churn,
    compacted,
    look_up,
    pooled_store,
    push_and_compact,
    reader_of,
    replay,
)
from pooled import collection
from torchrec import PoolingType
from unpooled import unpooled_collection

from embedserve.config import ServeSettings
from embedserve.deltas.live_rows import IDLE, LiveRows
from embedserve.deltas.rows_reader import RowsReader
from embedserve.deltas.rows_writer import RowsWriter
from embedserve.deltas.shared_goldens import CheckedGoldens, LiveGoldens
from embedserve.deltas.status import SharedDeltaState
from embedserve.engine.compile import KINDS
from embedserve.engine.engine import Engine
from embedserve.engine.restore import restore
from embedserve.errors import NotReadyError
from embedserve_store import DeltaWriter, ModelStore, publish
from embedserve_store.errors import GoldensError
from embedserve_store.format.delta_goldens import DeltaGoldens
from embedserve_store.format.table_spec import DTYPES
from embedserve_store.goldens.delta_parity import check_delta_goldens
from embedserve_store.goldens.reference_pooling import RowsOf
from embedserve_store.goldens.sampled_bags import sample_bags
from embedserve_store.plans.plan import Plan, Shard, TablePlan

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
"""Tables that form one group, except user. movie and maker share no feature directly."""
DTYPES_AND_DEVICES = [
    *((dtype, f"cpu:{ranks}") for dtype in DTYPES for ranks in (1, 2)),
    ("float32", "cpu:3"),
    *(pytest.param(dtype, "cuda", marks=GPU) for dtype in DTYPES),
]
UNEQUAL = [*GROUPED[:3], ("maker", 700, 9, ["title"], PoolingType.MEAN)]


@pytest.fixture(scope="module")
def pooled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a store with a model for each dtype, its deltas, and version 2 compacted from them."""
    return pooled_store(tmp_path_factory.mktemp("live") / "store", TABLES, SHARDING)


@pytest.fixture(scope="module")
def row_wise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pooled_store(tmp_path_factory.mktemp("rows") / "store", GROUPED, "row_wise")


@pytest.fixture(scope="module")
def table_wise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pooled_store(tmp_path_factory.mktemp("tables") / "store", UNEQUAL, "table_wise")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a store with a model whose grouped tables are sharded differently."""
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
    """Makes a store of unpooled models: a table per feature, and features of several tables."""
    store = tmp_path_factory.mktemp("unpooled") / "store"
    for model, tables in (("rows", TABLES), ("grouped", GROUPED)):
        source = unpooled_collection([(name, rows, keys) for name, rows, _, keys, _ in tables])
        publish(source, store, model=model, sharding="row_wise", world_size=3)
        push_and_compact(store, model)
    return store


def with_goldens(
    compiled_once: CompiledOnce,
    store: Path,
    model: str,
    weighted: bool = False,
    devices: str = "cpu:2",
) -> tuple[SharedDeltaState, Engine]:
    """Returns the followed state, and an engine over its rows that checks goldens.

    The goldens of the last delta are torchrec's results for the compacted version.
    """
    live = replay(store, model)
    followed = SharedDeltaState(live)
    manifest = live.version.manifest
    bags = sample_bags(replace(manifest, is_weighted=weighted), {})
    reference = restore(compacted(store, model), devices, is_eager=True)
    results = reference.lookup(bags.ids, bags.lengths.reshape(-1), bags.weights)
    goldens = DeltaGoldens(bags.ids, bags.lengths, bags.weights, results, "float32")

    def check(rows_of: RowsOf) -> None:
        bounds = check_delta_goldens(goldens, manifest, rows_of, "delta 4")
        followed.goldens.write(CheckedGoldens(4, goldens, bounds))

    RowsWriter(live).apply(4, [], check)
    engine = compiled_once.restore(live.version, devices)
    engine.rows_reader = RowsReader(live, 0, engine.plan)
    engine.live_goldens = LiveGoldens(followed.goldens, engine.rows_reader, manifest)
    return followed, engine


def check_equal(
    engine: Engine, live: LiveRows, reference: Engine, *, is_changed: bool = False
) -> None:
    """Compares lookups of the live rows with those of ``reference``, and if ``is_changed`` with
    those of the published rows, which differ."""
    for weighted in (False, True):
        expected = look_up(reference, None, weighted)
        assert np.array_equal(look_up(engine, live, weighted), expected)
        if is_changed:
            assert not np.array_equal(look_up(engine, None, weighted), expected)


@pytest.mark.parametrize(("dtype", "devices"), DTYPES_AND_DEVICES)
def test_live_lookups_equal_the_compacted_version(
    compiled_once: CompiledOnce, pooled: Path, dtype: str, devices: str
) -> None:
    live = replay(pooled, dtype)
    stored = compacted(pooled, dtype).plan.tables["shop"]
    assert (stored.sharding_type, len(stored.shards)) == ("column_wise", 2)
    engine = compiled_once.restore(live.version, devices, live=live)
    reference = restore(compacted(pooled, dtype), devices, is_eager=devices != "cuda")
    check_equal(engine, live, reference, is_changed=True)
    engine.check()  # the published rows are unchanged


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_check_compares_goldens_of_the_last_delta(
    compiled_once: CompiledOnce, pooled: Path, dtype: str, weighted: bool
) -> None:
    followed, engine = with_goldens(compiled_once, pooled, dtype, weighted)
    live = followed.live
    engine.check()
    live.rows["user"][...] ^= 0x21  # changes every changed row of the table
    with pytest.raises(GoldensError, match=r"^delta 4 of '\w+': goldens: 'user' \(table 'user'\)"):
        engine.check()
    assert live.lowest_view_read() == IDLE
    live.commit(live.committed[0], 5)
    engine.check()  # the rows belong to a later delta


def test_check_compares_goldens_of_unpooled_rows(
    compiled_once: CompiledOnce, unpooled: Path
) -> None:
    followed, engine = with_goldens(compiled_once, unpooled, "rows", devices="cpu:3")
    engine.check()
    followed.live.rows["genre"][...] ^= 0x21
    with pytest.raises(GoldensError, match=r"goldens: 'genres' \(table 'genre'\), row \d+, column"):
        engine.check()


async def test_server_with_golden_mismatch_is_not_ready(
    compiled_once: CompiledOnce, pooled: Path
) -> None:
    # These need more than a GPU host has.
    from embedserve.processes.next_version import as_restored
    from embedserve.processes.server import build_pipeline, build_version_manager

    followed, engine = with_goldens(compiled_once, pooled, "float32")
    engine.rows_reader = engine.live_goldens = None  # as_restored sets them
    restored = as_restored("m", followed.live.version, engine, followed)
    with ThreadPoolExecutor(1) as executor:
        settings = ServeSettings(store=str(pooled), deltas="follow")
        pipeline = build_pipeline([restored[2]], settings)
        build_version_manager(pipeline, {"m": restored}, settings, executor)
        await pipeline.models.check_integrity()
        pipeline.models.check_ready()
        followed.live.rows["user"][...] ^= 0x21
        await pipeline.models.check_integrity()
        with pytest.raises(NotReadyError, match="delta 4 of 'float32': goldens: 'user'"):
            pipeline.models.check_ready()


@pytest.mark.parametrize("sharding", ["row_wise", "table_wise"])
@pytest.mark.parametrize(("dtype", "devices"), DTYPES_AND_DEVICES)
def test_features_of_several_tables_equal_the_compacted_version(
    request: pytest.FixtureRequest, sharding: str, devices: str, dtype: str
) -> None:
    """Checks lookups after spare rows were reused, and after all deltas were undone.

    All plans are compiled for one dtype, and one plan for the narrowest rows. Compiling takes fifty
    times as long as restoring.
    """
    on_gpu = devices == "cuda"
    is_eager = not on_gpu and dtype != "float32" and (dtype, devices) != ("int4", "cpu:2")
    store: Path = request.getfixturevalue(sharding)
    version = ModelStore(store).load(dtype, 1)
    live = LiveRows(version, MEMORY, readers=1, undo=PUSHES + 1)
    assert live.version.plan.tables == version.plan.tables
    writer = RowsWriter(live)
    churn(live, writer)
    engine = restore(live.version, devices, is_eager=is_eager, live=live)
    reference = restore(compacted(store, dtype), devices, is_eager=not on_gpu)
    before = look_up(engine, live, weighted=False)
    seq = live.seq
    apply_line(store, live, writer)
    check_equal(engine, live, reference)
    assert writer.revert(seq, live.seq + 1)
    assert np.array_equal(look_up(engine, live, weighted=False), before)
    engine.check()


@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_live_lookups_of_resident_rows_equal_the_compacted_version(
    compiled_once: CompiledOnce, pooled: Path, dtype: str
) -> None:
    live = LiveRows(ModelStore(pooled).load(dtype, 1), MEMORY, readers=1)
    engine = compiled_once.restore(live.make_resident(), "cpu:2")
    apply_line(pooled, live, RowsWriter(live))
    reference = restore(compacted(pooled, dtype), "cpu:2", is_eager=True)
    check_equal(engine, live, reference)
    engine.check()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_grouped_tables_with_different_sharding_are_served_table_wise(
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
    engine = restore(live.version, f"cpu:{ranks}", is_eager=ranks != 2)
    reference = restore(
        replace(compacted(mixed, "float32"), plan=plan), f"cpu:{ranks}", is_eager=True
    )
    check_equal(engine, live, reference)


def test_table_with_unequal_row_ranges_is_served_table_wise(tmp_path: Path) -> None:
    """Uses a plan made by hand, as the planner's ranges have equal lengths."""
    dim = 8
    shards = Shard(0, 0, 10, 0, dim), Shard(1, 10, 40, 0, dim)
    plan = Plan(2, {"user": TablePlan("row_wise", shards)}, {})
    source = collection([("user", 50, dim, ["user"], PoolingType.SUM)])
    publish(source, tmp_path, model="m", dtype="float32", sharding=plan)
    values = np.random.default_rng(1).normal(size=(50, dim)).astype(np.float32)
    with DeltaWriter(tmp_path, model="m") as writer:
        writer.push_rows({"user": (np.arange(50), values)})
    live = replay(tmp_path, "m")
    engine = restore(live.version, "cpu:2", is_eager=True)
    reader = reader_of(live, engine)
    view, _ = reader.begin()
    rows = reader.rows_in_view(np.arange(50), np.array([50]), view)
    assert np.array_equal(engine.lookup(rows, np.ones(50, np.int32)), values)
    assert live.version.plan.tables["user"].sharding_type == "table_wise"


@pytest.mark.parametrize("model", ["rows", "grouped"])
@pytest.mark.parametrize(
    ("devices", "is_eager"),
    [("cpu:3", False), ("cpu:3", True), pytest.param("cuda", False, marks=GPU)],
)
def test_unpooled_live_lookups_equal_the_compacted_version(
    compiled_once: CompiledOnce, unpooled: Path, model: str, devices: str, is_eager: bool
) -> None:
    live = replay(unpooled, model)
    engine = compiled_once.restore(live.version, devices, is_eager=is_eager, live=live)
    assert engine.lookup_kind in KINDS
    reference = restore(compacted(unpooled, model), devices, is_eager=devices != "cuda")
    expected = look_up(reference, None, False)
    assert np.array_equal(look_up(engine, live, False), expected)
