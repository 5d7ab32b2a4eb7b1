"""Tests of restored engines: results equal the source model and the stored rows, for every plan."""

import dataclasses
import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from compiled_once import CompiledOnce
from engine.conftest import Publish
from pooled import collection
from reference import (
    assert_same,
    check_concurrent_lookups,
    check_vectors,
    dequantized_int8,
    expected,
    sample,
    source_rows,
    stored_rows,
    to_kjt,
)
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor, PoolingType
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints
from writable import writable

from embedserve.batching.split import split_by_examples
from embedserve.engine.compile import EAGER, SCRIPTED, TRACED
from embedserve.engine.cuda_limits import check_fits_cuda
from embedserve.engine.engine import Engine
from embedserve.engine.restore import restore
from embedserve.lookup_types import Batch
from embedserve_store import (
    ModelStore,
    ModelVersion,
    Plan,
    Shard,
    StoreError,
    TablePlan,
    TableSpec,
    publish,
)
from embedserve_store.goldens.goldens_file import Goldens
from embedserve_store.plans import planner

Sharding = str | dict[str, str]

MIXED = {
    "movie": "row_wise",
    "genre": "data_parallel",
    "user": "column_wise",
    "recent": "table_wise",
}
PLANS: list[tuple[Sharding, int]] = [
    *[(s, n) for s in ("table_wise", "row_wise") for n in (1, 2, 4)],
    ("column_wise", 2),
    ("column_wise", 4),
    ("data_parallel", 2),
    (MIXED, 2),
]


def plan_name(plan: tuple[Sharding, int]) -> str:
    sharding, world_size = plan
    return f"{sharding if isinstance(sharding, str) else 'mixed'}-{world_size}"


@pytest.fixture(scope="module", params=PLANS, ids=plan_name)
def float32(
    request: pytest.FixtureRequest, published: Publish, compiled_once: CompiledOnce
) -> tuple[Engine, ModelVersion]:
    """Restores an engine once for the tests of the same plan; pytest groups them."""
    sharding, world_size = request.param
    version = published(sharding=sharding, world_size=world_size)
    engine = restore(version)
    compiled_once.keep(engine)
    return engine, version


def test_float32_equals_embedding_bag(
    ebc: EmbeddingBagCollection, float32: tuple[Engine, ModelVersion]
) -> None:
    engine, version = float32
    assert engine.lookup_kind in (TRACED, SCRIPTED)
    assert engine.plan == version.plan
    check_vectors(engine.lookup, version, source_rows(ebc))


@pytest.mark.parametrize("is_eager", [False, True])
def test_chunks_of_single_examples_equal_the_whole_batch(tmp_path: Path, is_eager: bool) -> None:
    """Splits a batch whose first lengths add up to the ids of its first example, too, so that a
    kernel which read them in place of the example's own would raise no error."""
    features = ["a", "b", "c"]
    source = collection([("t", 9, 4, features, PoolingType.SUM)])
    publish(source, tmp_path, model="m", sharding="row_wise", world_size=2)
    engine = restore(ModelStore(tmp_path).load("m"), is_eager=is_eager)
    lengths = np.array([1, 2, 0, 1, 2, 0], np.int32)  # of a, b and c: two examples each
    batch = Batch(np.arange(lengths.sum(), dtype=np.int64), lengths, None, [2], 2)
    chunks = split_by_examples(batch, len(features), 2)
    assert [chunk.batch_size for chunk in chunks] == [1, 1]
    values = [engine.lookup(chunk.ids, chunk.lengths) for chunk in chunks]
    assert np.array_equal(np.concatenate(values), engine.lookup(batch.ids, lengths))


@pytest.mark.parametrize("is_eager", [False, True])
def test_concurrent_lookups_equal_sequential_lookups(
    published: Publish, compiled_once: CompiledOnce, is_eager: bool
) -> None:
    version = published(sharding="row_wise", world_size=2)
    engine = compiled_once.restore(version, is_eager=is_eager)
    bags = [sample(version, size) for size in (1, 7, 100, 1000)]
    requests = [to_kjt(one, version.manifest.features) for one in bags]
    check_concurrent_lookups(engine.lookup, requests, 200)


@pytest.mark.parametrize(
    ("sharding", "world_size"), [("table_wise", 1), ("row_wise", 2), (MIXED, 4)]
)
def test_eager_lookups_call_distributed_model_parallel(
    ebc: EmbeddingBagCollection,
    published: Publish,
    monkeypatch: pytest.MonkeyPatch,
    sharding: Sharding,
    world_size: int,
) -> None:
    version = published(sharding=sharding, world_size=world_size)
    engine = restore(version, is_eager=True)
    forward = DistributedModelParallel.forward
    passed_features: list[object] = []

    def recording_forward(self: DistributedModelParallel, *features: object) -> object:
        passed_features.extend(features)
        return forward(self, *features)

    monkeypatch.setattr(DistributedModelParallel, "forward", recording_forward)
    check_vectors(engine.lookup, version, source_rows(ebc))
    assert engine.lookup_kind == EAGER
    assert [type(one) for one in passed_features] == [KeyedJaggedTensor]


@pytest.mark.parametrize(
    ("sharding", "world_size"), [("table_wise", 2), ("row_wise", 2), ("column_wise", 4)]
)
def test_int8_lookups_equal_dequantized_rows(
    ebc: EmbeddingBagCollection, published: Publish, sharding: Sharding, world_size: int
) -> None:
    """Restores without compilation, which takes fifty times as long.

    test_widths.py compiles lookups of each dtype.
    """
    version = published(dtype="int8", sharding=sharding, world_size=world_size)
    tables = {name: dequantized_int8(rows) for name, rows in source_rows(ebc).items()}
    check_vectors(restore(version, is_eager=True).lookup, version, tables)


@pytest.mark.parametrize(
    ("dtype", "sharding", "world_size"),
    [
        ("float16", "row_wise", 2),
        ("float16", MIXED, 4),
        ("int4", "table_wise", 2),
        ("int4", "column_wise", 2),
    ],
)
def test_float16_and_int4_lookups_equal_stored_rows(
    published: Publish, dtype: str, sharding: Sharding, world_size: int
) -> None:
    """Restores without compilation, like the test of int8."""
    version = published(dtype=dtype, sharding=sharding, world_size=world_size)
    check_vectors(restore(version, is_eager=True).lookup, version, stored_rows(version))


def test_mixed_dtypes_and_sharding_return_expected_rows(
    ebc: EmbeddingBagCollection, published: Publish
) -> None:
    version = published(
        dtype={"movie": "int8", "genre": "float32", "user": "float16", "recent": "float32"},
        sharding=MIXED,
        world_size=2,
    )
    tables = source_rows(ebc)
    tables["movie"] = dequantized_int8(tables["movie"])
    tables["user"] = tables["user"].astype(np.float16).astype(np.float32)
    check_vectors(restore(version, is_eager=True).lookup, version, tables)


def test_weights_multiply_rows(
    ebc: EmbeddingBagCollection, float32: tuple[Engine, ModelVersion]
) -> None:
    engine, version = float32
    bags = sample(version)
    rng = np.random.default_rng(6)
    weights = {f: [rng.normal(size=len(bag)).tolist() for bag in bags[f]] for f in bags}
    ids, lengths = to_kjt(bags, version.manifest.features)
    flat = np.array(
        [w for f in version.manifest.features for bag in weights[f] for w in bag], np.float32
    )
    assert_same(
        engine.lookup(ids, lengths, flat),
        expected(source_rows(ebc), version.manifest, bags, weights),
    )


def test_empty_bags_return_zeros(float32: tuple[Engine, ModelVersion]) -> None:
    engine, version = float32
    features = len(version.manifest.features)
    values = engine.lookup(np.zeros(0, np.int64), np.zeros(features * 3, np.int32))
    assert values.shape == (3, sum(version.manifest.length_per_key))
    assert not values.any()


def test_tables_are_mapped_not_copied(float32: tuple[Engine, ModelVersion]) -> None:
    """Checks that only split columns are copied."""
    engine, version = float32
    mapped = version.tables.data
    copied_bytes = version.plan.column_shard_bytes(version.manifest.tables)
    for compiled in engine.compiled:
        assert not engine.runs_modules
        sizes = {data.data_ptr(): data.numel() for data, _ in compiled.rows}
        mapped_bytes = sizes.pop(mapped.ctypes.data, None)
        assert mapped_bytes == mapped.size or (mapped_bytes is None and copied_bytes)
        assert sum(sizes.values()) == copied_bytes


@pytest.mark.parametrize("sharding", ["row_wise", MIXED])
def test_plan_is_recreated_for_another_number_of_ranks(
    ebc: EmbeddingBagCollection,
    published: Publish,
    caplog: pytest.LogCaptureFixture,
    sharding: Sharding,
) -> None:
    version = published(sharding=sharding, world_size=2)
    with caplog.at_level(logging.WARNING):
        engine = restore(version, "cpu:3", is_eager=True)
    assert engine.replanned
    assert "stored plan is for 2 ranks" in caplog.text
    assert engine.plan.world_size == 3
    stored = {name: table.sharding_type for name, table in version.plan.tables.items()}
    assert {n: table.sharding_type for n, table in engine.plan.tables.items()} == stored
    check_vectors(engine.lookup, version, source_rows(ebc))


def test_handwritten_plan_with_uneven_shards_is_served(
    ebc: EmbeddingBagCollection, published: Publish
) -> None:
    """Checks uneven ranges of rows (one is empty) and uneven columns (two shards on one rank)."""
    plan = Plan(
        3,
        {
            "movie": TablePlan(
                "column_wise",
                (Shard(2, 0, 1001, 0, 4), Shard(0, 0, 1001, 4, 40), Shard(2, 0, 1001, 44, 20)),
            ),
            "genre": TablePlan("table_wise", (Shard(2, 0, 3, 0, 16),)),
            "user": TablePlan(
                "row_wise", (Shard(0, 0, 3, 0, 32), Shard(1, 3, 47, 0, 32), Shard(2, 50, 0, 0, 32))
            ),
            "recent": TablePlan("column_wise", (Shard(1, 0, 77, 0, 4), Shard(1, 0, 77, 4, 4))),
        },
        {},
    )
    version = published(sharding=plan, dtype={"movie": "int8"})
    tables = source_rows(ebc) | {"movie": stored_rows(version)["movie"]}
    engine = restore(version)
    assert engine.plan == plan
    check_vectors(engine.lookup, version, tables)


def test_strict_plan_rejects_another_number_of_ranks(published: Publish) -> None:
    version = published(sharding="row_wise", world_size=2)
    with pytest.raises(StoreError, match="stored plan is for 2 ranks, one for 1 is needed here"):
        restore(version, "cpu:1", strict_plan=True)


def test_table_name_invalid_for_torch_raises_store_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "check_table_names", lambda tables: None)
    tables = [TableSpec("type", 10, 4, ("type",), "sum", "float32")]
    state = {"embedding_bags.type.weight": torch.ones(10, 4)}
    publish(state, tmp_path, model="m", tables=tables, sharding="data_parallel")
    version = ModelStore(tmp_path).load("m")
    with pytest.raises(StoreError, match="table 'type': torch's modules cannot hold a table of"):
        restore(version, "cpu:1")


def test_restore_rejects_rows_that_do_not_match_goldens(
    compiled_once: CompiledOnce, published: Publish
) -> None:
    version = published()
    goldens = version.goldens()
    wrong = dataclasses.replace(goldens, stored_answers=goldens.stored_answers * 1.01)
    with pytest.raises(StoreError, match="'history@movie' are not the published ones"):
        compiled_once.restore(_with_goldens(version, wrong))


def test_check_detects_overwritten_rows(compiled_once: CompiledOnce, published: Publish) -> None:
    version = published()
    engine = compiled_once.restore(version)
    engine.check()
    path = writable(version.path / "tables.safetensors")
    state = path.stat()
    with path.open("r+b") as file:
        file.seek(state.st_size // 2)
        file.write(bytes(state.st_size - file.tell()))
    with pytest.raises(StoreError, match=r"changed in place .* written over"):
        engine.check()
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    with pytest.raises(StoreError, match="goldens are answered otherwise now"):
        engine.check()


def _with_goldens(version: ModelVersion, goldens: Goldens) -> ModelVersion:
    class VersionWithOtherGoldens(ModelVersion):
        def goldens(self) -> Goldens:
            return goldens

    fields = {field.name: getattr(version, field.name) for field in dataclasses.fields(version)}
    return VersionWithOtherGoldens(**fields)


def test_a_model_that_cannot_be_scripted_runs_eagerly(
    ebc: EmbeddingBagCollection,
    published: Publish,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail_to_compile(*args: object, **options: object) -> None:
        raise RuntimeError("cannot be compiled")

    monkeypatch.setattr(torch.jit, "script", fail_to_compile)
    version = published(sharding="row_wise", world_size=2)
    engine = restore(version)
    assert engine.lookup_kind == EAGER
    assert "TorchScript failed: cannot be compiled" in caplog.text
    check_vectors(engine.lookup, version, source_rows(ebc))


def test_tables_with_more_rows_than_int32_are_rejected_on_cuda(published: Publish) -> None:
    version = published()
    manifest, plan = version.manifest, version.plan
    huge = TableSpec("huge", 2**31, 64, ("f",), "sum", "int8")
    with pytest.raises(StoreError, match="'huge' has 2147483648 rows: on CUDA"):
        check_fits_cuda(dataclasses.replace(manifest, tables=(huge,)), plan)
    check_fits_cuda(manifest, plan)


def test_compute_kernel_constraints_are_kept_and_served_on_the_cpu(
    ebc: EmbeddingBagCollection, published: Publish
) -> None:
    kernels = {
        "movie": ParameterConstraints(compute_kernels=["quant_uvm"]),
        "user": {"compute_kernels": ["quant_uvm_caching", "quant"]},
    }
    version = published(sharding="row_wise", world_size=2, constraints=kernels)
    kept = {name: one.compute_kernels for name, one in version.plan.constraints.items()}
    assert kept["movie"] == ("quant_uvm",)
    assert kept["user"] == ("quant_uvm_caching", "quant")
    for devices in ("auto", "cpu:3"):
        engine = restore(version, devices, is_eager=True)
        assert engine.plan.constraints == version.plan.constraints
        check_vectors(engine.lookup, version, source_rows(ebc))
    with pytest.raises(StoreError, match="'movie': compute_kernels is quant_uvm, but on CUDA"):
        check_fits_cuda(version.manifest, version.plan)
