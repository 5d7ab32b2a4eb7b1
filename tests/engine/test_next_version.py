"""Tests of compiled programs that are reused for the next version of a model."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pooled import Tables, collection
from reference import assert_same, expected, sample, stored_rows, to_kjt
from server.python import run_warm_python
from torchrec import EmbeddingCollection, EmbeddingConfig, PoolingType

from embedserve.deltas.live_rows import LiveRows
from embedserve.engine.compile import SCRIPTED, TRACED
from embedserve.engine.engine import Engine
from embedserve.engine.programs import SCRIPTED_MAX, Programs
from embedserve.engine.restore import restore
from embedserve_store import ModelStore, ModelVersion, StoreError, publish

SUM, MEAN = PoolingType.SUM, PoolingType.MEAN


@pytest.fixture(scope="module", autouse=True)
def compilation_unit() -> None:
    """Leaves each engine its own compilation unit, as in a server."""


TABLES: Tables = (
    ("movie", 1001, 64, ["history", "candidate"], MEAN),
    ("genre", 3, 16, ["genres"], SUM),
    ("recent", 77, 8, ["recent"], MEAN),
)
GROWN: Tables = tuple((name, rows + 13, *rest) for name, rows, *rest in TABLES)


def publish_next(store: Path, tables: Tables, **options: object) -> ModelVersion:
    """Publishes the next version, with other rows each time."""
    options = {"sharding": "row_wise", "layout_changed": True} | options
    published = publish(collection(tables), store, model="m", **options)  # type: ignore[arg-type]
    return ModelStore(store).load("m", published.version)


def check(engine: Engine, version: ModelVersion) -> None:
    """Checks that lookups return the rows of ``version``, with weights and without."""
    bags = sample(version)
    ids, lengths = to_kjt(bags, version.manifest.features)
    rows = stored_rows(version)
    assert_same(engine.lookup(ids, lengths), expected(rows, version.manifest, bags))
    if version.manifest.is_pooled:
        weights = {f: [[0.5] * len(bag) for bag in bags[f]] for f in bags}
        halves = np.full(ids.size, 0.5, np.float32)
        result = engine.lookup(ids, lengths, halves)
        assert_same(result, expected(rows, version.manifest, bags, weights))


def fail_if_sharded(*args: object, **options: object) -> None:
    raise AssertionError("was sharded anew")


@pytest.mark.parametrize(
    ("tables", "options"),
    [(TABLES, {}), (GROWN, {"dtype": "int8"}), (GROWN, {"sharding": "table_wise"})],
    ids=["as large", "with more rows, int8", "with more rows, table-wise"],
)
def test_version_with_same_layout_reuses_compiled_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tables: Tables, options: dict[str, str]
) -> None:
    versions = [publish_next(tmp_path, one, **options) for one in (TABLES, tables)]
    first = restore(versions[0], "cpu:1")
    monkeypatch.setattr("embedserve.engine.restore.shard_without_rows", fail_if_sharded)
    second = restore(versions[1], "cpu:1", programs=Programs([first]))
    assert (first.lookup_kind, second.lookup_kind) == (TRACED, TRACED)
    for engine, version in zip((first, second), versions, strict=True):
        check(engine, version)  # each uses its own rows


@pytest.mark.parametrize(
    "changed",
    [
        (("movie", 1001, 32, ["history", "candidate"], MEAN), *TABLES[1:]),
        (("movie", 1001, 64, ["candidate", "history"], MEAN), *TABLES[1:]),
        (TABLES[1], TABLES[0], TABLES[2]),
        (*TABLES, ("user", 50, 32, ["user"], SUM)),
    ],
    ids=["dims", "features", "order", "more"],
)
def test_version_with_changed_layout_serves_its_own_rows(tmp_path: Path, changed: Tables) -> None:
    versions = [publish_next(tmp_path, tables) for tables in (TABLES, changed)]
    first = restore(versions[0], "cpu:1")
    second = restore(versions[1], "cpu:1", programs=Programs([first]))
    for engine, version in zip((first, second), versions, strict=True):
        check(engine, version)
        assert engine.lookup_kind == TRACED


@pytest.mark.parametrize(
    ("devices", "options"),
    [("cpu:2", {}), ("cpu:1", {"dtype": "float16"}), ("cpu:2", {"sharding": "column_wise"})],
    ids=str,
)
def test_version_with_changed_devices_dtype_or_sharding_serves_its_own_rows(
    tmp_path: Path, devices: str, options: dict[str, str]
) -> None:
    first = restore(publish_next(tmp_path, TABLES), "cpu:1")
    version = publish_next(tmp_path, TABLES, **options)
    check(restore(version, devices, programs=Programs([first])), version)


def test_restore_with_reused_program_compares_goldens(tmp_path: Path) -> None:
    first, second = (publish_next(tmp_path, TABLES) for _ in range(2))
    engine = restore(first, "cpu:1")
    with pytest.raises(StoreError, match="are not the published ones"):
        restore(replace(second, tables=first.tables), "cpu:1", programs=Programs([engine]))


SHARED: Tables = (*TABLES, ("also", 20, 8, ["history"], SUM))
"""Tables with one feature on two tables. Its ids are repeated, which cannot be traced."""


@pytest.mark.parametrize(
    ("tables", "devices", "sharding", "is_grown_compiled"),
    [
        (SHARED, "cpu:1", "row_wise", False),
        (TABLES, "cpu:2", "row_wise", True),
        (TABLES, "cpu:2", "table_wise", False),
    ],
    ids=["a feature on two tables", "rows on two ranks", "tables on two ranks"],
)
def test_scripted_program_is_reused_only_for_tables_of_equal_size(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tables: Tables,
    devices: str,
    sharding: str,
    is_grown_compiled: bool,
) -> None:
    """Checks that a scripted program is reused for tables of equal size, and not for larger ones.

    Only one case compiles a program for the larger tables.
    """
    options = {"sharding": sharding, "world_size": int(devices[-1])}
    versions = [publish_next(tmp_path, tables, **options) for _ in range(2)]
    grown = publish_next(tmp_path, [GROWN[0], *tables[1:]], **options)
    first = restore(versions[0], devices)
    with monkeypatch.context() as patched:
        patched.setattr("embedserve.engine.restore.shard_without_rows", fail_if_sharded)
        second = restore(versions[1], devices, programs=Programs([first]))
        with pytest.raises(AssertionError, match="sharded anew"):
            restore(grown, devices, programs=Programs([first]))
    engines = [(first, versions[0]), (second, versions[1])]
    if is_grown_compiled:
        engines.append((restore(grown, devices, programs=Programs([first])), grown))
    for engine, version in engines:
        assert engine.lookup_kind == SCRIPTED
        check(engine, version)


def test_versions_with_spare_rows_share_a_separate_program(tmp_path: Path) -> None:
    """Checks versions with spare rows, whose tables are further apart than without them."""
    versions = [publish_next(tmp_path, SHARED) for _ in range(2)]
    live = [LiveRows(version, 1 << 20, 1, 1).version for version in versions]
    programs, compiled = Programs(), []
    for version in (*live, *versions):
        engine = restore(version, "cpu:1", programs=programs)
        assert engine.lookup_kind == SCRIPTED
        compiled.append(programs.add(engine))
    assert compiled == [True, False, True, False]


@pytest.mark.parametrize("next_rows", [50, 60])
def test_next_version_of_unpooled_model_serves_its_own_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, next_rows: int
) -> None:
    versions = []
    for rows in (50, next_rows):
        source = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name="t", num_embeddings=rows, embedding_dim=16, feature_names=["a", "b"]
                )
            ]
        )
        published = publish(source, tmp_path, model="u", layout_changed=True)
        versions.append(ModelStore(tmp_path).load("u", published.version))
    first = restore(versions[0], "cpu:1")
    if next_rows == 50:
        monkeypatch.setattr(
            "embedserve.engine.restore.shard_unpooled_without_rows", fail_if_sharded
        )
    second = restore(versions[1], "cpu:1", programs=Programs([first]))
    ids, lengths = np.arange(6), np.array([1, 2, 3, 0], np.int32)
    for engine, version in zip((first, second), versions, strict=True):
        assert np.array_equal(engine.lookup(ids, lengths), stored_rows(version)["t"][:6])


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
def test_dropped_version_is_unmapped_immediately(tmp_path: Path, devices: str) -> None:
    """Checks that a dropped engine releases its rows and its modules without a garbage collection.

    Modules that refer to each other stay until they are collected, which never happens to frozen
    objects.
    """

    def is_mapped(version: int) -> bool:
        return f"{tmp_path}/m/{version}/tables.safetensors" in Path("/proc/self/maps").read_text()

    options = {"world_size": int(devices[-1])}
    first = restore(publish_next(tmp_path, TABLES, **options), devices)
    gc.collect()  # torch's errors of compilation hold frames
    second = restore(publish_next(tmp_path, TABLES, **options), devices, programs=Programs([first]))
    assert is_mapped(1)
    del first
    assert not is_mapped(1)
    assert is_mapped(2)
    del second
    assert not is_mapped(2)


def test_kernels_with_one_feature_each_are_distinguished(tmp_path: Path) -> None:
    """Checks kernels on two ranks, whose placeholder rows must differ from other constants."""
    tables: Tables = (("a", 30, 16, ["a"], SUM), ("b", 30, 16, ["b"], SUM))
    options = {"sharding": "table_wise", "world_size": 2}
    versions = [publish_next(tmp_path, tables, **options) for _ in range(2)]
    first = restore(versions[0], "cpu:2")
    second = restore(versions[1], "cpu:2", programs=Programs([first]))
    for engine, version in zip((first, second), versions, strict=True):
        assert engine.lookup_kind == SCRIPTED
        assert not engine.runs_modules
        check(engine, version)


LAYOUTS: dict[str, tuple[Tables, dict[str, Any]]] = {
    "one rank": (TABLES, {"world_size": 1}),
    "rows on two ranks": (TABLES[:2], {"sharding": "row_wise", "world_size": 2}),
    "columns on two ranks": (TABLES[:2], {"sharding": "column_wise", "world_size": 2}),
    "columns of int8": (TABLES[:2], {"sharding": "column_wise", "world_size": 2, "dtype": "int8"}),
    "other tables": (TABLES[:2], {"world_size": 1}),
}


def test_previously_served_layout_reuses_compiled_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, kinds = Programs(), {}
    for name, (tables, options) in LAYOUTS.items():
        version = publish_next(tmp_path, tables, **options)
        engine = restore(version, f"cpu:{options['world_size']}", programs=programs)
        check(engine, version)
        assert programs.add(engine)
        kinds[name] = engine.lookup_kind
    assert set(kinds.values()) == {TRACED, SCRIPTED}
    monkeypatch.setattr("embedserve.engine.restore.shard_without_rows", fail_if_sharded)
    for name, (tables, options) in [*LAYOUTS.items(), *reversed(LAYOUTS.items())]:
        version = publish_next(tmp_path, tables, **options)
        engine = restore(version, f"cpu:{options['world_size']}", programs=programs)
        assert engine.lookup_kind == kinds[name]
        check(engine, version)
        assert not programs.add(engine)


@pytest.mark.parametrize(
    ("bound", "ranks", "kind"), [("LAYOUTS_MAX", 1, TRACED), ("SCRIPTED_MAX", 2, SCRIPTED)]
)
def test_least_recently_used_layout_is_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, ranks: int, kind: str
) -> None:
    """Checks that the least recently used layout is removed once no engine uses it."""
    monkeypatch.setattr(f"embedserve.engine.programs.{bound}", 2)
    tables = [[("t", 50, dim, ["t"], SUM)] for dim in (4, 8, 16)]
    versions = [publish_next(tmp_path, one, world_size=ranks) for one in tables]
    engines = [restore(version, f"cpu:{ranks}") for version in versions]
    assert {engine.lookup_kind for engine in engines} == {kind}
    plans = [engine.plan for engine in engines]
    programs = Programs(engines[:2])

    def are_cached() -> list[bool]:
        found = zip(versions, plans, strict=True)
        return [programs.find(one, plan) is not None for one, plan in found]

    assert not programs.add(engines[0])  # becomes the last used
    assert programs.add(engines[2])
    assert are_cached() == [True, True, True]
    engines.clear()
    gc.collect()
    assert are_cached() == [True, False, True]


CHANGES = """
import ctypes, gc, sys
import numpy as np
from embedserve.engine.programs import SCRIPTED_MAX, Programs
from embedserve.engine.restore import restore
from embedserve_store import ModelStore

store, count, changes = ModelStore(sys.argv[1]), *map(int, sys.argv[2:])
programs = Programs()
for change in range(changes):
    version = store.load("m", change % count + 1)
    engine = restore(version, programs=programs, devices="cpu")
    programs.add(engine)
    lengths = np.ones(len(version.manifest.features), np.int32)
    engine.lookup(np.zeros(lengths.size, np.int64), lengths)
    del engine
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/smaps_rollup") as file:
        fields = dict(line.split()[:2] for line in file if line.startswith("Private_Dirty"))
    print(fields["Private_Dirty:"])
"""
"""Script that prints the KiB of private memory after each change."""
GROWN_KIB_MAX = 8 << 10


def memory_after_changes(store: Path, versions: int, changes: int) -> list[int]:
    """Returns the KiB of private memory after each change, measured in a process.

    Args:
        versions: number of versions that the changes cycle through.
    """
    done = run_warm_python("-c", CHANGES, store, str(versions), str(changes))
    assert done.returncode == 0, done.stderr
    used = [int(line) for line in done.stdout.split()]
    assert len(used) == changes
    return used


def test_memory_is_flat_while_two_scripted_layouts_alternate(tmp_path: Path) -> None:
    """Checks the last third of 60 changes between rows over four ranks and rows on one rank."""
    for ranks in (4, 1):
        publish_next(tmp_path / "store", TABLES, world_size=ranks)
    used = memory_after_changes(tmp_path / "store", 2, 60)
    assert max(used[40:]) <= 1.02 * used[39], used


def test_memory_is_bounded_while_every_version_has_a_new_scripted_layout(tmp_path: Path) -> None:
    """Checks versions whose tables grow, so that each has another layout.

    Memory is flat once the maximum number of layouts is kept. The compilation unit of the process
    would keep 2 MB per layout, so that memory would grow by 12 MB.
    """
    count = SCRIPTED_MAX + 8
    for rows in range(count):
        table = ("t", 50 + rows, 16, ["t"], SUM)
        publish_next(tmp_path / "store", [table], world_size=2)
    used = memory_after_changes(tmp_path / "store", count, count)
    assert max(used[SCRIPTED_MAX + 2 :]) <= used[SCRIPTED_MAX + 1] + GROWN_KIB_MAX, used


def test_column_wise_version_with_fewer_ranks_serves_its_own_rows(tmp_path: Path) -> None:
    tables: Tables = (("a", 30, 128, ["a"], SUM),)
    before = publish_next(tmp_path, tables, sharding="column_wise", world_size=2)
    after = publish_next(tmp_path, tables, sharding="column_wise", world_size=1)
    first = restore(before, "cpu:1")
    check(restore(after, "cpu:1", programs=Programs([first])), after)


def test_restore_without_compilation_reuses_programs_or_fails(tmp_path: Path) -> None:
    first = restore(publish_next(tmp_path, TABLES), "cpu:1")
    same, other = publish_next(tmp_path, TABLES), publish_next(tmp_path, TABLES[:2])
    check(restore(same, "cpu:1", programs=Programs([first]), may_compile=False), same)
    with pytest.raises(StoreError, match=r"has to be compiled anew, .*: restart the server"):
        restore(other, "cpu:1", programs=Programs([first]), may_compile=False)
    assert restore(same, "cpu:1", is_eager=True).runs_modules
