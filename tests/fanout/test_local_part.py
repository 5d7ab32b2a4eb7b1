"""Tests of small tables that the router looks up itself, without calls to shards."""

import gc
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fanout.local_shards import LocalShards, batch_of, routed
from lookup_cases import check_lookup
from pooled import collection
from torchrec import PoolingType
from torchscript import cache_definitions, shared_compilation_unit
from unpooled import unpooled_collection
from writable import writable

from embedserve.engine.compile import SCRIPTED
from embedserve.engine.programs import Programs
from embedserve.errors import EngineError
from embedserve.fanout.local_part import LocalParts
from embedserve.fanout.router_engine import RouterEngine
from embedserve.shard_client.reply import UNAVAILABLE, Reply
from embedserve_store import ModelStore, StoreError, publish
from embedserve_store.parts.part import LocalTables

PARTS = 3
UNLIMITED = LocalTables(1 << 40)


def publish_small(
    store: Path, *, is_pooled: bool = True, seed: int = 5, movies: int = 9001, **options: Any
) -> None:
    """Publishes a large table and three small tables; two of them share a feature."""
    torch.manual_seed(seed)
    rows = {"genre": 3, "movie": movies, "user": 20, "recent": 7}
    features = {"genre": ["genres"], "movie": ["history", "candidate"]}
    features |= {"user": ["user", "seen"], "recent": ["seen"]}
    dims, means = {"movie": 64, "genre": 16, "user": 8, "recent": 4}, {"user", "movie"}
    source = (
        collection(
            [
                (
                    name,
                    count,
                    dims[name],
                    features[name],
                    PoolingType.MEAN if name in means else PoolingType.SUM,
                )
                for name, count in rows.items()
            ]
        )
        if is_pooled
        else unpooled_collection([(name, count, features[name]) for name, count in rows.items()])
    )
    publish(source, store, model="m", hosts=PARTS, **options)


@pytest.fixture(scope="module", autouse=True)
def torchrec_is_compiled_once() -> Iterator[None]:
    cache_definitions()
    with shared_compilation_unit():
        yield


@pytest.fixture(scope="module")
def programs() -> Programs:
    """Returns programs for tests that are not about compilation, which takes a second each."""
    return Programs()


@pytest.mark.parametrize("is_pooled", [True, False])
def test_results_with_local_tables_equal_those_of_whole_tables(
    tmp_path: Path, is_pooled: bool
) -> None:
    """Checks tables of four dtypes; other tests have local tables of float32."""
    dtypes = {"movie": "float32", "genre": "int8", "user": "int4", "recent": "float16"}
    publish_small(tmp_path, is_pooled=is_pooled, dtype=dtypes)
    with routed(LocalShards(tmp_path), local=UNLIMITED) as engine:
        assert engine.local_tables == ("genre", "user", "recent")
        engine.warm_up()
        check_lookup(engine.lookup, engine, ModelStore(tmp_path).load("m"))
        engine.check()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a store of a model with small tables; tests must not change it."""
    store = tmp_path_factory.mktemp("small") / "store"
    publish_small(store)
    return store


@pytest.fixture(params=[1 << 20, 0], ids=["inline", "in a thread"])
def engine(
    shards: LocalShards, programs: Programs, request: pytest.FixtureRequest
) -> Iterator[RouterEngine]:
    with routed(
        shards, local=UNLIMITED, inline_bytes_max=request.param, programs=programs
    ) as routing:
        yield routing


FEATURES = ("genres", "history", "candidate", "user", "seen")
SMALL = (np.array([2, 0, 19, 3, 6, 6]), np.array([2, 0, 0, 0, 0, 0, 1, 0, 1, 2], np.int32))
"""(ids, lengths) of two examples without ids of the large table."""
MIXED = (np.array([2, 9000, 19, 3]), np.array([1, 0, 0, 1, 0, 0, 1, 0, 1, 0], np.int32))
"""(ids, lengths) where only the second example has an id of the large table."""


def test_batch_with_only_local_ids_calls_no_shard(
    engine: RouterEngine, shards: LocalShards
) -> None:
    assert engine.manifest.features == FEATURES
    for part in range(PARTS):
        shards.replies[part] = Reply(UNAVAILABLE)
    batch, values = batch_of(engine, *SMALL)
    assert list(batch.failures) == []
    assert shards.called_parts == []
    whole = LocalShards(shards.store)
    with routed(whole) as other:
        np.testing.assert_array_equal(values, other.lookup(*SMALL))
    assert whole.called_parts


def test_unavailable_shards_fail_only_examples_with_their_ids(
    engine: RouterEngine, shards: LocalShards
) -> None:
    expected = engine.lookup(*MIXED)
    assert shards.called_parts == [2]
    shards.replies[2] = Reply(UNAVAILABLE)
    batch, values = batch_of(engine, *MIXED)
    [(examples, _)] = batch.failures
    assert examples.tolist() == [1]
    np.testing.assert_array_equal(values[0], expected[0])


def test_a_failed_local_lookup_fails_only_its_examples(
    engine: RouterEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> np.ndarray:
        raise RuntimeError("a secret")

    assert engine._local is not None
    monkeypatch.setattr(engine._local._engine, "lookup", fail)
    ids, lengths = np.array([0, 9000]), np.array([1, 0, 0, 1, 0, 0, 0, 0, 0, 0], np.int32)
    batch, values = batch_of(engine, ids, lengths)
    [(examples, error)] = batch.failures
    assert examples.tolist() == [0]
    assert type(error) is EngineError
    assert "secret" not in error.message
    assert "lookups of 'm' in the router fail" in caplog.text
    assert values[1].any()


@pytest.mark.parametrize("is_pooled", [True, False])
def test_all_tables_may_be_local(tmp_path: Path, is_pooled: bool) -> None:
    """Checks a router that holds all requested tables, so that the shards' parts have none."""
    publish_small(tmp_path, is_pooled=is_pooled, sharding="table_wise")
    shards = LocalShards(tmp_path)
    with routed(shards, local=UNLIMITED) as engine:
        assert engine.local_tables == ("genre", "movie", "user", "recent")
        engine.warm_up()
        check_lookup(engine.lookup, engine, ModelStore(tmp_path).load("m"))
    assert shards.called_parts == []


def test_later_version_with_same_layout_reuses_compiled_programs(tmp_path: Path) -> None:
    parts, engines = LocalParts(0), []
    for seed in (5, 6):
        publish_small(tmp_path, seed=seed)
        local = parts.open(ModelStore(tmp_path, selection=UNLIMITED).load("m"))
        assert local is not None
        engines.append(local._engine)
    first, second = ([one.program for one in engine.compiled] for engine in engines)
    assert all(one is not None for one in first)
    assert all(one is other for one, other in zip(first, second, strict=True))
    ids, lengths = np.arange(3), np.array([3, *[0] * 2], np.int32)
    assert (engines[0].lookup(ids, lengths) != engines[1].lookup(ids, lengths)).any()


@pytest.mark.parametrize("is_pooled", [True, False])
def test_later_version_with_other_table_offsets_matches_its_goldens(
    tmp_path: Path, is_pooled: bool
) -> None:
    """Checks local tables that move in the file behind a table that is not local.

    Opening compares goldens.
    """
    parts, offsets = LocalParts(0), []
    for movies in (9001, 9216):
        publish_small(tmp_path, is_pooled=is_pooled, movies=movies, layout_changed=True)
        version = ModelStore(tmp_path, selection=UNLIMITED).load("m")
        local = parts.open(version)
        assert local is not None
        assert local._engine.lookup_kind == SCRIPTED
        offsets.append(version.tables.offsets)
    assert offsets[0] != offsets[1]


def test_byte_limit_of_zero_keeps_no_table_local(shards: LocalShards) -> None:
    with routed(shards, local=LocalTables(0)) as engine:
        assert engine.local_tables == ()
        engine.lookup(*SMALL)
    assert shards.called_parts


def test_damaged_local_table_is_rejected_before_serving(store: Path, tmp_path: Path) -> None:
    store = writable(shutil.copytree(store, tmp_path / "store"))
    whole, path = ModelStore(store).load("m"), store / "m" / "1" / "tables.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) - whole.tables.nbytes + whole.tables.offsets["user"]] ^= 1
    path.write_bytes(data)
    with (
        pytest.raises(StoreError, match="table 'user': sha256 is "),
        routed(LocalShards(store), local=UNLIMITED),
    ):
        pass


def test_check_detects_rows_changed_after_the_start(
    store: Path, tmp_path: Path, programs: Programs
) -> None:
    store = writable(shutil.copytree(store, tmp_path / "store"))
    with routed(LocalShards(store), local=UNLIMITED, programs=programs) as engine:
        engine.check()
        path = store / "m" / "1" / "tables.safetensors"
        path.write_bytes(path.read_bytes())
        with pytest.raises(StoreError, match="changed in place"):
            engine.check()


def test_released_engine_is_freed_without_garbage_collection(
    shards: LocalShards, programs: Programs
) -> None:
    """Checks references: objects of a server's start are never collected (gc.freeze)."""
    with routed(shards, local=UNLIMITED, programs=programs) as engine:
        engine.warm_up()
        version = weakref.ref(engine._version)
        freed = weakref.ref(engine)
    gc.disable()
    try:
        del engine
        assert freed() is None
        assert version() is None
    finally:
        gc.enable()
