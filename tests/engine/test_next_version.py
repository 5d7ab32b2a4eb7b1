"""The next version of a model is looked up by what was compiled of the one before it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pooled import Tables, collection
from reference import assert_same, expected, sample, stored_rows, to_kjt
from torchrec import (
    EmbeddingCollection,
    EmbeddingConfig,
    PoolingType,
)

from embedserve.engine.engine import Engine
from embedserve.engine.restore import restore
from embedserve.engine.script import SCRIPTED, TRACED
from embedserve_store import ModelStore, ModelVersion, StoreError, publish

SUM, MEAN = PoolingType.SUM, PoolingType.MEAN
TABLES: Tables = (
    ("movie", 1001, 64, ["history", "candidate"], MEAN),
    ("genre", 3, 16, ["genres"], SUM),
    ("recent", 77, 8, ["recent"], MEAN),
)
GROWN: Tables = tuple((name, rows + 13, *rest) for name, rows, *rest in TABLES)


def publish_next(store: Path, tables: Tables, **options: object) -> ModelVersion:
    """Rows are others each time."""
    options = {"sharding": "row_wise", "layout_changed": True} | options
    published = publish(collection(tables), store, model="m", **options)  # type: ignore[arg-type]
    return ModelStore(store).load("m", published.version)


def check(engine: Engine, version: ModelVersion) -> None:
    """That it answers from the rows of ``version``, with weights and without."""
    bags = sample(version)
    ids, lengths = to_kjt(bags, version.manifest.features)
    rows = stored_rows(version)
    assert_same(engine.lookup(ids, lengths), expected(rows, version.manifest, bags))
    if version.manifest.is_pooled:
        weights = {f: [[0.5] * len(bag) for bag in bags[f]] for f in bags}
        halves = np.full(ids.size, 0.5, np.float32)
        answer = engine.lookup(ids, lengths, halves)
        assert_same(answer, expected(rows, version.manifest, bags, weights))


def sharded_anew(*args: object, **options: object) -> None:
    raise AssertionError("was sharded anew")


@pytest.mark.parametrize(
    ("tables", "options"),
    [(TABLES, {}), (GROWN, {"dtype": "int8"}), (GROWN, {"sharding": "table_wise"})],
    ids=["as large", "with more rows, int8", "with more rows, table-wise"],
)
def test_a_version_of_the_same_layout_needs_nothing_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tables: Tables, options: dict[str, str]
) -> None:
    versions = [publish_next(tmp_path, one, **options) for one in (TABLES, tables)]
    first = restore(versions[0], "cpu:1")
    monkeypatch.setattr("embedserve.engine.restore.shard", sharded_anew)
    second = restore(versions[1], "cpu:1", before=first)
    assert (first.lookup_kind, second.lookup_kind) == (TRACED, TRACED)
    for engine, version in zip((first, second), versions, strict=True):
        check(engine, version)  # each from its own rows, side by side


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
def test_a_version_of_another_layout_is_sharded_anew(tmp_path: Path, changed: Tables) -> None:
    versions = [publish_next(tmp_path, tables) for tables in (TABLES, changed)]
    first = restore(versions[0], "cpu:1")
    second = restore(versions[1], "cpu:1", before=first)
    for engine, version in zip((first, second), versions, strict=True):
        check(engine, version)
        assert engine.lookup_kind == TRACED


@pytest.mark.parametrize(
    ("devices", "options"),
    [("cpu:2", {}), ("cpu:1", {"dtype": "float16"}), ("cpu:2", {"sharding": "column_wise"})],
    ids=str,
)
def test_so_is_one_that_is_placed_or_stored_otherwise(
    tmp_path: Path, devices: str, options: dict[str, str]
) -> None:
    first = restore(publish_next(tmp_path, TABLES), "cpu:1")
    version = publish_next(tmp_path, TABLES, **options)
    check(restore(version, devices, before=first), version)


def test_it_is_compared_with_its_goldens_as_any_other(tmp_path: Path) -> None:
    first, second = (publish_next(tmp_path, TABLES) for _ in range(2))
    engine = restore(first, "cpu:1")
    with pytest.raises(StoreError, match="are not the published ones"):
        restore(replace(second, tables=first.tables), "cpu:1", before=engine)


SHARED: Tables = (*TABLES, ("also", 20, 8, ["history"], SUM))
"""One feature on two tables: its ids are repeated, which is no trace."""


@pytest.mark.parametrize(
    ("tables", "devices", "sharding"),
    [(SHARED, "cpu:1", "row_wise"), (TABLES, "cpu:2", "row_wise"), (TABLES, "cpu:2", "table_wise")],
    ids=["a feature on two tables", "rows on two ranks", "tables on two ranks"],
)
def test_what_is_scripted_is_used_again_where_tables_are_as_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tables: Tables, devices: str, sharding: str
) -> None:
    options = {"sharding": sharding, "world_size": int(devices[-1])}
    versions = [publish_next(tmp_path, tables, **options) for _ in range(2)]
    grown = publish_next(tmp_path, [GROWN[0], *tables[1:]], **options)
    first = restore(versions[0], devices)
    later = restore(grown, devices, before=first)
    monkeypatch.setattr("embedserve.engine.restore.shard", sharded_anew)
    second = restore(versions[1], devices, before=first)
    for engine, version in ((first, versions[0]), (second, versions[1]), (later, grown)):
        assert engine.lookup_kind == SCRIPTED
        check(engine, version)
    with pytest.raises(AssertionError, match="sharded anew"):
        restore(grown, devices, before=first)


@pytest.mark.parametrize("rows_of_the_next", [50, 60])
def test_an_unpooled_model_moves_on_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_of_the_next: int
) -> None:
    versions = []
    for rows in (50, rows_of_the_next):
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
    if rows_of_the_next == 50:
        monkeypatch.setattr("embedserve.engine.restore.shard_unpooled", sharded_anew)
    second = restore(versions[1], "cpu:1", before=first)
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
def test_a_version_that_is_dropped_lets_go_of_its_rows_at_once(
    tmp_path: Path, devices: str
) -> None:
    """Also of what it was compiled of: modules that refer to each other stay until they are
    collected, and where objects are frozen that is never."""

    def is_mapped(version: int) -> bool:
        return f"{tmp_path}/m/{version}/tables.safetensors" in Path("/proc/self/maps").read_text()

    options = {"world_size": int(devices[-1])}
    first = restore(publish_next(tmp_path, TABLES, **options), devices)
    gc.collect()  # errors that torch caught as it compiled hold the frames that called it
    second = restore(publish_next(tmp_path, TABLES, **options), devices, before=first)
    assert is_mapped(1)
    del first
    assert not is_mapped(1)
    assert is_mapped(2)
    del second
    assert not is_mapped(2)


def test_kernels_of_one_feature_are_told_apart(tmp_path: Path) -> None:
    """Each on a rank of its own: what stands for their rows as they are scripted is like none of
    their other constants."""
    tables: Tables = (("a", 30, 16, ["a"], SUM), ("b", 30, 16, ["b"], SUM))
    options = {"sharding": "table_wise", "world_size": 2}
    versions = [publish_next(tmp_path, tables, **options) for _ in range(2)]
    first = restore(versions[0], "cpu:2")
    second = restore(versions[1], "cpu:2", before=first)
    for engine, version in zip((first, second), versions, strict=True):
        assert engine.lookup_kind == SCRIPTED
        assert not engine.runs_modules
        check(engine, version)


def test_what_was_column_wise_is_sharded_anew(tmp_path: Path) -> None:
    tables: Tables = (("a", 30, 128, ["a"], SUM),)
    before = publish_next(tmp_path, tables, sharding="column_wise", world_size=2)
    after = publish_next(tmp_path, tables, sharding="column_wise", world_size=1)
    first = restore(before, "cpu:1")
    check(restore(after, "cpu:1", before=first), after)


def test_nothing_is_compiled_beside_lookups_that_run_modules(tmp_path: Path) -> None:
    first = restore(publish_next(tmp_path, TABLES), "cpu:1")
    same, other = publish_next(tmp_path, TABLES), publish_next(tmp_path, TABLES[:2])
    check(restore(same, "cpu:1", before=first, may_compile=False), same)
    with pytest.raises(StoreError, match=r"has to be compiled anew, .*: restart the server"):
        restore(other, "cpu:1", before=first, may_compile=False)
    assert restore(same, "cpu:1", is_eager=True).runs_modules
