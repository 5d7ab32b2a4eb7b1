"""Tests of an engine over live rows: results equal torchrec's over the compacted version.

torchrec's lookup runs eagerly.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from compiled_once import CompiledOnce
from pooled import Tables, collection
from torchrec import PoolingType
from unpooled import unpooled_collection

from embedserve.config import ServeSettings
from embedserve.deltas.live_rows import IDLE, LiveRows
from embedserve.deltas.memory import RowsFullError
from embedserve.deltas.rows_reader import RowsReader
from embedserve.deltas.rows_writer import RowsWriter
from embedserve.deltas.shared_goldens import CheckedGoldens, LiveGoldens
from embedserve.deltas.status import DeltaStatus, SharedDeltaState
from embedserve.engine.compile import KINDS
from embedserve.engine.engine import Engine
from embedserve.engine.restore import restore
from embedserve.errors import NotReadyError
from embedserve_store import DeltaWriter, ModelStore, ModelVersion, compact_deltas, publish
from embedserve_store.deltas.delta_line import DeltaLine
from embedserve_store.errors import GoldensError
from embedserve_store.format.delta_file import ChangedRows
from embedserve_store.format.delta_goldens import DeltaGoldens
from embedserve_store.format.table_spec import DTYPES, TableSpec
from embedserve_store.goldens.delta_parity import check_rows
from embedserve_store.goldens.reference_pooling import RowsOf
from embedserve_store.goldens.sampled_bags import sample_bags
from embedserve_store.plans.plan import Plan, Shard, TablePlan

MEMORY = 2 << 20
WAIT_S_MAX = 300.0
PUSHES = 3
GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
)
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
    """Applies and undoes deltas of the first rows until spare rows are reused.

    The last delta has the published rows.
    """
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
    reader = reader_of(live, engine)
    view, _ = reader.begin()
    found = engine.lookup(reader.newest(ids, counts, view), lengths.reshape(-1), weights)
    reader.end(view)
    return found


def reader_of(live: LiveRows, engine: Engine) -> RowsReader:
    upload = None if engine.spare_rows is None else engine.spare_rows.upload
    return RowsReader(live, 0, engine.plan, upload)


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
    followed = SharedDeltaState(live, DeltaStatus(live.start))
    manifest = live.version.manifest
    bags = sample_bags(replace(manifest, is_weighted=weighted), {})
    same = restore(compacted(store, model), devices, is_eager=True)
    answers = same.lookup(bags.ids, bags.lengths.reshape(-1), bags.weights)
    goldens = DeltaGoldens(bags.ids, bags.lengths, bags.weights, answers, "float32")

    def check(rows_of: RowsOf) -> None:
        bounds = check_rows(goldens, manifest, rows_of, "delta 4")
        followed.goldens.write(CheckedGoldens(4, goldens, bounds))

    RowsWriter(live).apply(4, [], check)
    engine = compiled_once.restore(live.version, devices)
    engine.rows_reader = RowsReader(live, 0, engine.plan)
    engine.live_goldens = LiveGoldens(followed.goldens, engine.rows_reader, manifest)
    return followed, engine


def compacted(store: Path, model: str) -> ModelVersion:
    return ModelStore(store).load(model, 2)


@pytest.mark.parametrize(
    ("dtype", "ranks"), [*((dtype, ranks) for dtype in DTYPES for ranks in (1, 2)), ("float32", 3)]
)
def test_changed_rows_are_those_of_the_compacted_version(
    compiled_once: CompiledOnce, pooled: Path, dtype: str, ranks: int
) -> None:
    live = replay(pooled, dtype)
    stored = compacted(pooled, dtype).plan.tables["shop"]
    assert (stored.sharding_type, len(stored.shards)) == ("column_wise", 2)
    engine = compiled_once.restore(live.version, f"cpu:{ranks}")
    same = restore(compacted(pooled, dtype), f"cpu:{ranks}", is_eager=True)
    for weighted in (False, True):
        expected = look_up(same, None, weighted)
        assert np.array_equal(look_up(engine, live, weighted), expected)
        assert not np.array_equal(look_up(engine, None, weighted), expected)
    engine.check()  # the published rows are unchanged


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_goldens_of_the_last_delta_are_compared(
    compiled_once: CompiledOnce, pooled: Path, dtype: str, weighted: bool
) -> None:
    followed, engine = with_goldens(compiled_once, pooled, dtype, weighted)
    live = followed.live
    engine.check()
    live.rows["user"][...] ^= 0x21  # changes every changed row of the table
    with pytest.raises(GoldensError, match=r"^delta 4 of '\w+': goldens: 'user' \(table 'user'\)"):
        engine.check()
    assert live.oldest_read() == IDLE
    live.commit(live.committed[0], 5)
    engine.check()  # the rows belong to a later delta


def test_goldens_of_unpooled_rows_are_compared(compiled_once: CompiledOnce, unpooled: Path) -> None:
    followed, engine = with_goldens(compiled_once, unpooled, "rows", devices="cpu:3")
    engine.check()
    followed.live.rows["genre"][...] ^= 0x21
    with pytest.raises(GoldensError, match=r"goldens: 'genres' \(table 'genre'\), row \d+, column"):
        engine.check()


async def test_a_server_whose_goldens_get_other_results_is_not_ready(
    compiled_once: CompiledOnce, pooled: Path
) -> None:
    from embedserve.processes.server import build_pipeline  # needs more than a GPU host has

    followed, engine = with_goldens(compiled_once, pooled, "float32")
    engine.rows_reader = engine.live_goldens = None  # the pipeline sets them
    with ThreadPoolExecutor(1) as executor:
        settings = ServeSettings(store=str(pooled), deltas="follow")
        pipeline = build_pipeline({"m": engine}, settings, executor, deltas={"m": followed})
        await pipeline.models.check_integrity()
        pipeline.models.check_ready()
        followed.live.rows["user"][...] ^= 0x21
        await pipeline.models.check_integrity()
        with pytest.raises(NotReadyError, match="delta 4 of 'float32': goldens: 'user'"):
            pipeline.models.check_ready()


@pytest.mark.parametrize("sharding", ["row_wise", "table_wise"])
@pytest.mark.parametrize(
    ("dtype", "ranks"), [*((dtype, ranks) for dtype in DTYPES for ranks in (1, 2)), ("float32", 3)]
)
def test_features_of_several_tables(
    request: pytest.FixtureRequest, sharding: str, ranks: int, dtype: str
) -> None:
    """Checks lookups after spare rows were reused, and after all deltas were undone.

    All plans are compiled for one dtype, and one plan for the narrowest rows. Compiling takes fifty
    times as long as restoring.
    """
    is_eager = dtype != "float32" and (dtype, ranks) != ("int4", 2)
    store: Path = request.getfixturevalue(sharding)
    version = ModelStore(store).load(dtype, 1)
    live = LiveRows(version, MEMORY, readers=1, undo=PUSHES + 1)
    assert live.version.plan.tables == version.plan.tables
    writer = RowsWriter(live)
    churn(live, writer)
    engine = restore(live.version, f"cpu:{ranks}", is_eager=is_eager)
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
def test_resident_rows(compiled_once: CompiledOnce, pooled: Path, dtype: str) -> None:
    live = LiveRows(ModelStore(pooled).load(dtype, 1), MEMORY, readers=1)
    engine = compiled_once.restore(live.make_resident(), "cpu:2")
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
    engine = restore(live.version, f"cpu:{ranks}", is_eager=ranks != 2)
    same = restore(replace(compacted(mixed, "float32"), plan=plan), f"cpu:{ranks}", is_eager=True)
    for weighted in (False, True):
        expected = look_up(same, None, weighted)
        assert np.array_equal(look_up(engine, live, weighted), expected)


def test_a_table_with_unequal_ranges_of_rows_is_served_whole(tmp_path: Path) -> None:
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
    rows = reader.newest(np.arange(50), np.array([50]), view)
    assert np.array_equal(engine.lookup(rows, np.ones(50, np.int32)), values)
    assert live.version.plan.tables["user"].sharding_type == "table_wise"


@pytest.mark.parametrize("model", ["rows", "grouped"])
@pytest.mark.parametrize("is_eager", [False, True])
def test_unpooled_rows_on_three_ranks(
    compiled_once: CompiledOnce, unpooled: Path, model: str, is_eager: bool
) -> None:
    live = replay(unpooled, model)
    engine = compiled_once.restore(live.version, "cpu:3", is_eager=is_eager)
    assert engine.lookup_kind in KINDS
    same = restore(compacted(unpooled, model), "cpu:3", is_eager=True)
    expected = look_up(same, None, False)
    assert np.array_equal(look_up(engine, live, False), expected)


@pytest.mark.parametrize("dtype", [pytest.param(one, marks=GPU) for one in DTYPES])
def test_changed_rows_on_a_gpu(pooled: Path, dtype: str) -> None:
    live = replay(pooled, dtype)
    engine = restore(live.version, "cuda", live=live)
    same = restore(compacted(pooled, dtype), "cuda")
    for weighted in (False, True):
        expected = look_up(same, None, weighted)
        assert np.array_equal(look_up(engine, live, weighted), expected)
        assert not np.array_equal(look_up(engine, None, weighted), expected)
    engine.check()


@pytest.mark.parametrize("dtype", [pytest.param(one, marks=GPU) for one in DTYPES])
def test_features_of_several_tables_on_a_gpu(table_wise: Path, dtype: str) -> None:
    live = LiveRows(ModelStore(table_wise).load(dtype, 1), MEMORY, readers=1, undo=PUSHES + 1)
    writer = RowsWriter(live)
    churn(live, writer)
    engine = restore(live.version, "cuda", live=live)
    before = look_up(engine, live, weighted=False)
    seq = live.seq
    apply_line(table_wise, live, writer)
    same = restore(compacted(table_wise, dtype), "cuda")
    for weighted in (False, True):
        assert np.array_equal(look_up(engine, live, weighted), look_up(same, None, weighted))
    assert writer.revert(seq, live.seq + 1)
    assert np.array_equal(look_up(engine, live, weighted=False), before)


@pytest.mark.parametrize("devices", [pytest.param("cuda", marks=GPU)])
def test_unpooled_rows_on_a_gpu(unpooled: Path, devices: str) -> None:
    live = replay(unpooled, "rows")
    engine = restore(live.version, devices, live=live)
    same = restore(compacted(unpooled, "rows"), devices)
    expected = look_up(same, None, False)
    assert np.array_equal(look_up(engine, live, False), expected)


@pytest.mark.parametrize("devices", ["cpu:1", pytest.param("cuda", marks=GPU)])
def test_every_lookup_has_the_rows_of_its_seq(tmp_path: Path, devices: str) -> None:
    """Checks threads that look up while a writer applies and undoes deltas.

    Spare rows are reused many times.
    """
    rows, dim = 5000, 8
    source = collection([(name, rows, dim, [name], PoolingType.SUM) for name in "ab"])
    publish(source, tmp_path, model="m", dtype="float32")
    version = ModelStore(tmp_path).load("m")
    live = LiveRows(version, 2 << 20, readers=1, undo=4)
    engine = restore(live.version, devices, live=live)
    reader = reader_of(live, engine)
    always, ended = np.arange(200), threading.Event()
    value_of = {0: np.nan}
    found: list[set[int]] = [set() for _ in range(3)]

    def look_up_always(seqs: set[int]) -> None:
        random = np.random.default_rng()
        while not ended.is_set():
            ids = np.concatenate([random.choice(always, 300) for _ in "ab"])
            view, seq = reader.begin()
            try:
                numbers = reader.newest(ids, np.array([300, 300]), view)
                values = engine.lookup(numbers, np.ones(600, np.int32))
            finally:
                reader.end(view)
            if seq:
                assert np.unique(values).tolist() == [value_of[seq]]
            seqs.add(seq)

    def upload_always() -> None:
        while not ended.wait(0.001):
            reader.advance()

    writer, random = RowsWriter(live), np.random.default_rng(3)
    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(look_up_always, seqs) for seqs in found]
        uploads = threads.submit(upload_always)
        try:
            for seq in range(1, 10_000):
                is_enough = seq >= 400 and all(len(seqs) > 20 for seqs in found)
                if is_enough or any(one.done() for one in running):
                    break
                target = seq - int(random.integers(1, 4))
                if seq % 7 == 0 and target >= 1:
                    value_of[seq] = value_of[target]
                    if writer.revert(target, seq):
                        writer.finish_undo()
                        continue
                value_of[seq] = float(seq)
                rows_of = [changed(t, seq, always, random) for t in version.manifest.tables]
                apply_when_there_is_room(writer, seq, rows_of)
        finally:
            ended.set()
        for one in (*running, uploads):
            one.result()
    assert all(len(seqs) > 20 for seqs in found)
    assert 0 < live.peaks.sum() < 100_000  # more than 300,000 rows were written


def apply_when_there_is_room(writer: RowsWriter, seq: int, changes: Sequence[ChangedRows]) -> None:
    """Applies changes like a follower does: retries while a slow lookup keeps older rows."""
    ends_s = time.monotonic() + WAIT_S_MAX
    while True:
        try:
            writer.apply(seq, changes)
        except RowsFullError:
            assert time.monotonic() < ends_s
            time.sleep(0.001)
        else:
            return


def changed(
    table: TableSpec, seq: int, always: np.ndarray, random: np.random.Generator
) -> ChangedRows:
    """Returns rows of ``table`` whose values are all ``seq``; they include those of ``always``."""
    some = random.choice(table.num_embeddings, int(random.integers(1, 500)))
    numbers = np.unique(np.concatenate([always, some]))
    values = np.full((len(numbers), table.row_bytes // 4), seq, np.float32)
    return ChangedRows(table, numbers, values.view(np.uint8))
