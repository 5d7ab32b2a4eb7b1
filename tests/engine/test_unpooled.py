"""Tests of an EmbeddingCollection: one row per id, in the order of the ids, under every plan."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compiled_once import CompiledOnce
from lookup_cases import unpooled_source
from reference import (
    check_concurrent_lookups,
    dequantized_int8,
    random_bags,
    sample,
    stored_rows,
    to_kjt,
)
from torchrec import EmbeddingCollection, KeyedJaggedTensor
from unpooled import DIM, rows_of, source_rows, unpooled_collection, write_version

from embedserve.engine.attach_weights import attach_weights
from embedserve.engine.compile import EAGER, SCRIPTED, RowLookup
from embedserve.engine.engine import Engine
from embedserve.engine.restore import restore
from embedserve.engine.unpooled import shard_unpooled_without_rows
from embedserve_store import ModelVersion, StoreError
from embedserve_store.goldens.goldens_file import Goldens

PLANS = [(s, n) for s in ("table_wise", "row_wise") for n in (1, 2, 4)]
MIXED_DTYPES = {"movie": "int8", "genre": "float32", "user": "float16", "recent": "int4"}
MIXED_SHARDING = {
    "movie": "row_wise",
    "genre": "table_wise",
    "user": "row_wise",
    "recent": "table_wise",
}

Write = Callable[..., ModelVersion]


@pytest.fixture(scope="module")
def ec() -> EmbeddingCollection:
    return unpooled_source()


@pytest.fixture(scope="module")
def write(ec: EmbeddingCollection, tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Returns a function: ``write(dtype=…, sharding=…, world_size=…)`` is a version."""
    store = tmp_path_factory.mktemp("store")
    return lambda **options: write_version(store, ec, **options)


def jagged(version: ModelVersion) -> dict[str, list[list[int]]]:
    """Returns bags of all features, some of them empty, and only empty ones for one feature."""
    return sample(version) | {"candidate": [[]] * 7}


def lookup(engine: Engine, bags: dict[str, list[list[int]]]) -> np.ndarray:
    return engine.lookup(*to_kjt(bags, engine.manifest.features))


def check_rows(
    engine: Engine, version: ModelVersion, tables: dict[str, np.ndarray], tolerance: float = 0
) -> None:
    """Compares the result of ``jagged`` with the rows of ``tables``."""
    bags = jagged(version)
    expected = rows_of(tables, version.manifest, bags)
    np.testing.assert_allclose(lookup(engine, bags), expected, rtol=0, atol=tolerance)


@pytest.fixture(scope="module", params=PLANS, ids=lambda plan: f"{plan[0]}-{plan[1]}")
def float32(
    request: pytest.FixtureRequest, write: Write, compiled_once: CompiledOnce
) -> tuple[Engine, ModelVersion]:
    """Restores an engine once for the tests of the same plan; pytest groups them."""
    sharding, world_size = request.param
    version = write(sharding=sharding, world_size=world_size)
    engine = restore(version)
    compiled_once.keep(engine)
    return engine, version


def test_float32_equals_the_source_collection(
    ec: EmbeddingCollection, float32: tuple[Engine, ModelVersion]
) -> None:
    engine, version = float32
    assert engine.lookup_kind == SCRIPTED
    assert engine.plan == version.plan
    bags = jagged(version)
    ids, lengths = to_kjt(bags, version.manifest.features)
    jagged_tensors = ec(
        KeyedJaggedTensor(
            keys=list(version.manifest.features),
            values=torch.from_numpy(ids),
            lengths=torch.from_numpy(lengths),
        )
    )
    expected = torch.cat([jagged_tensors[key].values() for key in version.manifest.keys])
    np.testing.assert_array_equal(engine.lookup(ids, lengths), expected.detach().numpy())


@pytest.mark.parametrize("is_eager", [False, True])
def test_concurrent_lookups_equal_sequential_lookups(
    write: Write, compiled_once: CompiledOnce, is_eager: bool
) -> None:
    version = write(sharding="row_wise", world_size=2)
    engine = compiled_once.restore(version, is_eager=is_eager)
    bags = [sample(version, size) for size in (1, 7, 100, 1000)]
    requests = [to_kjt(one, version.manifest.features) for one in bags]
    check_concurrent_lookups(engine.lookup, requests, 200)


@pytest.mark.parametrize(("sharding", "world_size"), [("table_wise", 2), ("row_wise", 4)])
@pytest.mark.parametrize("dtype", ["float16", "int8", "int4"])
def test_float16_int8_and_int4_lookups_equal_stored_rows(
    write: Write, compiled_once: CompiledOnce, dtype: str, sharding: str, world_size: int
) -> None:
    """Compiles each dtype for one plan: compiling takes fifty times as long as restoring.

    Compiled lookups of other dtypes differ only in constants.
    """
    is_eager = (dtype == "int8") != (sharding == "row_wise")
    version = write(dtype=dtype, sharding=sharding, world_size=world_size)
    engine = compiled_once.restore(version, is_eager=is_eager)
    check_rows(engine, version, stored_rows(version), tolerance=1e-7)


def test_int8_lookups_equal_dequantized_rows(
    ec: EmbeddingCollection, write: Write, compiled_once: CompiledOnce
) -> None:
    version = write(dtype="int8", sharding="row_wise", world_size=4)
    tables = {name: dequantized_int8(rows) for name, rows in source_rows(ec).items()}
    engine = compiled_once.restore(version)
    check_rows(engine, version, tables, tolerance=1e-7)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_mixed_dtypes_and_sharding_return_stored_rows(
    write: Write, compiled_once: CompiledOnce, world_size: int
) -> None:
    version = write(dtype=MIXED_DTYPES, sharding=MIXED_SHARDING, world_size=world_size)
    engine = compiled_once.restore(version, is_eager=world_size != 2)
    check_rows(engine, version, stored_rows(version), tolerance=1e-7)


def test_data_parallel_table_is_looked_up_once(ec: EmbeddingCollection, write: Write) -> None:
    version = write(sharding={**MIXED_SHARDING, "genre": "data_parallel"}, world_size=2)
    check_rows(restore(version), version, source_rows(ec))


def test_feature_of_two_tables_returns_rows_of_both(
    ec: EmbeddingCollection, float32: tuple[Engine, ModelVersion]
) -> None:
    engine, version = float32
    assert version.manifest.keys[0] == "history@movie"
    assert version.manifest.keys[-1] == "history@recent"
    bags: dict[str, list[list[int]]]
    bags = {"history": [[5, 70], [5]], "candidate": [[], []], "genres": [[], []], "user": [[], []]}
    tables = source_rows(ec)
    expected = [*tables["movie"][[5, 70, 5]], *tables["recent"][[5, 70, 5]]]
    np.testing.assert_array_equal(lookup(engine, bags), expected)


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
def test_rows_are_in_order_of_ids_if_each_feature_has_one_table(
    tmp_path: Path, sharding: str
) -> None:
    ec = unpooled_collection([("a", 11, ["x", "y"]), ("b", 6, ["z"])])
    with torch.no_grad():
        for first, table in ((0, ec.embeddings["a"]), (100, ec.embeddings["b"])):
            rows = torch.arange(first, first + table.num_embeddings)
            table.weight.copy_(rows[:, None].expand(-1, DIM))
    engine = restore(write_version(tmp_path, ec, sharding=sharding, world_size=2), is_eager=True)
    ids = np.array([10, 0, 10, 3, 9, 5, 0, 5], np.int64)
    lengths = np.array([3, 0, 1, 1, 0, 3], np.int32)
    values = engine.lookup(ids, lengths)
    assert values.shape == (len(ids), DIM)
    assert values[:, 0].tolist() == [10, 0, 10, 3, 9, 105, 100, 105]


def test_batch_without_ids_returns_no_rows(float32: tuple[Engine, ModelVersion]) -> None:
    engine, version = float32
    features = len(version.manifest.features)
    for batch_size in (1, 3):
        values = engine.lookup(np.zeros(0, np.int64), np.zeros(features * batch_size, np.int32))
        assert values.shape == (0, DIM)
        assert values.dtype == np.float32


def test_consecutive_batches_of_different_sizes_return_stored_rows(
    write: Write, compiled_once: CompiledOnce
) -> None:
    """Checks that TorchScript's specialization for earlier batches does not affect later ones."""
    version = write(dtype=MIXED_DTYPES, sharding=MIXED_SHARDING, world_size=2)
    engine = compiled_once.restore(version)
    tables, manifest = stored_rows(version), version.manifest
    rows = dict(zip(manifest.features, manifest.rows_per_feature, strict=True))
    rng = np.random.default_rng(8)
    for _ in range(40):
        bags = random_bags(rng, rows, int(rng.integers(1, 40)), ids_max=int(rng.integers(0, 30)))
        expected = rows_of(tables, manifest, bags)
        np.testing.assert_allclose(lookup(engine, bags), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "is_whole"),
    [
        ({"sharding": "table_wise"}, True),
        ({"sharding": "row_wise", "world_size": 2}, True),
        ({"dtype": MIXED_DTYPES}, True),
        # Several ranks or kinds of sharding are looked up one after another.
        ({"sharding": "table_wise", "world_size": 2}, False),
        ({"sharding": MIXED_SHARDING, "world_size": 2}, False),
    ],
)
def test_rows_already_in_key_order_are_not_copied(
    write: Write, options: dict[str, Any], is_whole: bool
) -> None:
    version = write(**options)
    manifest = version.manifest
    sharded = shard_unpooled_without_rows(version, version.plan, "cpu").module
    attach_weights(sharded, version, "cpu")
    rows = RowLookup(sharded, manifest.features, manifest.keys, DIM, torch.device("cpu"))
    assert rows.is_whole == is_whole
    bags = jagged(version)
    with torch.inference_mode():
        ids, lengths = map(torch.from_numpy, to_kjt(bags, manifest.features))
        values = rows(ids, lengths, None).numpy()
    expected = rows_of(stored_rows(version), manifest, bags)
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-7)
    backwards = RowLookup(sharded, manifest.features, manifest.keys[::-1], DIM, ids.device)
    assert not backwards.is_whole


def test_tables_are_mapped_not_copied(float32: tuple[Engine, ModelVersion]) -> None:
    engine, version = float32
    mapped = version.tables.data
    for compiled in engine.compiled:
        assert not engine.runs_modules
        assert {data.data_ptr() for data, _ in compiled.rows} == {mapped.ctypes.data}
        assert {data.numel() for data, _ in compiled.rows} == {mapped.size}


def test_plan_is_recreated_for_another_number_of_ranks(
    ec: EmbeddingCollection, write: Write
) -> None:
    version = write(sharding="row_wise", world_size=2)
    engine = restore(version, "cpu:3", is_eager=True)
    assert engine.replanned
    assert engine.plan.world_size == 3
    check_rows(engine, version, source_rows(ec))


def test_a_model_that_cannot_be_scripted_runs_eagerly(
    ec: EmbeddingCollection,
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail_to_compile(*args: object, **options: object) -> None:
        raise RuntimeError("cannot be compiled")

    monkeypatch.setattr(torch.jit, "script", fail_to_compile)
    version = write(sharding=MIXED_SHARDING, world_size=2)
    with caplog.at_level(logging.WARNING):
        engine = restore(version)
    assert engine.lookup_kind == EAGER
    assert "TorchScript failed: cannot be compiled" in caplog.text
    check_rows(engine, version, source_rows(ec))


def test_weights_are_rejected_for_unpooled_tables(write: Write) -> None:
    engine = restore(write(), is_eager=True)
    with pytest.raises(ValueError, match="no weights"):
        engine.lookup(np.zeros(1, np.int64), np.array([1, 0, 0, 0], np.int32), np.ones(1))


def test_restore_rejects_rows_that_do_not_match_goldens(
    compiled_once: CompiledOnce, write: Write
) -> None:
    class VersionWithOtherGoldens(ModelVersion):
        def goldens(self) -> Goldens:
            goldens = super().goldens()
            results = goldens.stored_answers.copy()
            results[-1] *= 1.01
            return dataclasses.replace(goldens, stored_answers=results)

    version = write()
    fields = {field.name: getattr(version, field.name) for field in dataclasses.fields(version)}
    with pytest.raises(StoreError, match="'history@recent' are not the published ones"):
        compiled_once.restore(VersionWithOtherGoldens(**fields))


def test_column_wise_plan_is_rejected_for_unpooled_tables(write: Write) -> None:
    with pytest.raises(StoreError, match="column_wise is for pooled tables"):
        write(sharding={**MIXED_SHARDING, "movie": "column_wise"})
