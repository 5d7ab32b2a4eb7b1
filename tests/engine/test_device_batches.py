"""Tests of batches on their way to GPUs and back, with the CPU as the device.

Results equal those of torchrec, whose lookup runs eagerly.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.conftest import Publish
from lookup_cases import unpooled_source
from pooled import collection
from reference import check_concurrent_lookups, sample, to_kjt
from torchrec import PoolingType
from unpooled import write_version

from embedserve.engine.attach_weights import attach_weights, share_rows
from embedserve.engine.compile import EAGER, Compiled, RowLookup, TensorLookup, compile_lookup
from embedserve.engine.device_batches import DeviceBatches
from embedserve.engine.gpus import LOOKUP_OPERATOR
from embedserve.engine.restore import restore
from embedserve.engine.sharded import shard_without_rows
from embedserve.engine.unpooled import shard_unpooled_without_rows
from embedserve_store import ModelStore, ModelVersion, publish

CPU = torch.device("cpu")
PLANS = [("table_wise", 1), ("row_wise", 2), ("column_wise", 2)]


def compiled(version: ModelVersion, *, is_eager: bool = False) -> list[Compiled]:
    """Compiles lookups as for GPUs: they take offsets and int32 ids."""
    manifest, plan = version.manifest, version.plan
    features, keys, dims = manifest.features, manifest.keys, manifest.length_per_key
    if not manifest.is_pooled:
        rows = shard_unpooled_without_rows(version, plan, "cpu").module
        attach_weights(rows, version, "cpu")
        lookups: list[Any] = [RowLookup(rows, features, keys, dims[0], CPU, takes_offsets=True)]
    else:
        plain, weighted = (
            shard_without_rows(version, plan, "cpu", is_weighted=one).module
            for one in (False, True)
        )
        attach_weights(plain, version, "cpu")
        share_rows(weighted, plain)
        lookups = [
            TensorLookup(one, features, keys, dims, CPU, takes_offsets=True)
            for one in (plain, weighted)
        ]
    if is_eager:
        return [Compiled(one, EAGER) for one in lookups]
    return [
        compile_lookup(one, CPU, ranks=plan.world_size, is_weighted=is_weighted)
        for one, is_weighted in zip(lookups, (False, True), strict=False)
    ]


def batches_of(version: ModelVersion, lookups: list[Compiled]) -> DeviceBatches:
    weighted = lookups[1].lookup if len(lookups) > 1 else None
    return DeviceBatches(
        version.manifest, CPU, version.plan.world_size, lookups[0].lookup, weighted
    )


@pytest.mark.parametrize(("sharding", "world_size"), PLANS)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_pooled_batches_equal_engine_lookups(
    published: Publish, dtype: str, sharding: str, world_size: int
) -> None:
    """Checks sums and means, without weights and with, also for empty bags alone.

    Lookups are compiled for one dtype only: compiling takes fifty times as long as the rest of the
    test.
    """
    version = published(dtype=dtype, sharding=sharding, world_size=world_size)
    lookups = compiled(version, is_eager=dtype == "int8")
    batches, engine = batches_of(version, lookups), restore(version, is_eager=True)
    features = version.manifest.features
    empty = np.zeros(0, np.int64), np.zeros(3 * len(features), np.int32)
    for ids, lengths in (to_kjt(sample(version, 7), features), empty):
        weights = np.random.default_rng(1).normal(size=ids.size).astype(np.float32)
        for given in (None, weights):
            expected = engine.lookup(ids, lengths, given)
            values = batches.lookup(ids, lengths, given, as_float16=False)
            assert values.dtype == np.float32
            np.testing.assert_array_equal(values, expected)
            rounded = batches.lookup(ids, lengths, given, as_float16=True)
            assert rounded.dtype == np.float16
            np.testing.assert_array_equal(rounded, engine.to_float16(expected))


@pytest.mark.parametrize(("sharding", "world_size"), PLANS[:2])
def test_unpooled_batches_equal_engine_lookups(
    tmp_path: Path, sharding: str, world_size: int
) -> None:
    version = write_version(tmp_path, unpooled_source(), sharding=sharding, world_size=world_size)
    batches, engine = batches_of(version, compiled(version)), restore(version, is_eager=True)
    ids, lengths = to_kjt(sample(version, 7), version.manifest.features)
    values = batches.lookup(ids, lengths, None, as_float16=False)
    np.testing.assert_array_equal(values, engine.lookup(ids, lengths))


def test_single_device_lookup_runs_only_the_kernel(tmp_path: Path) -> None:
    """Checks that the kernel reads its input as it is: no operator runs before it.

    The lookup returns sums, and DeviceBatches divides them for means.
    """
    tables = [("t", 101, 8, ["a"], PoolingType.SUM), ("u", 30, 16, ["b"], PoolingType.MEAN)]
    publish(collection(tables), tmp_path, model="m")
    version = ModelStore(tmp_path).load("m")
    lookups = compiled(version)
    program = lookups[0].program
    assert program is not None
    run: Any = program.run
    operators = {node.kind() for node in run.graph.nodes()}
    assert {one for one in operators if one.startswith("fbgemm")} == {LOOKUP_OPERATOR}
    assert not any("cumsum" in one for one in operators)
    ids, lengths = to_kjt(sample(version, 7), version.manifest.features)
    values = batches_of(version, lookups).lookup(ids, lengths, None, as_float16=False)
    np.testing.assert_array_equal(values, restore(version, is_eager=True).lookup(ids, lengths))


@pytest.fixture(scope="module")
def table_wise(published: Publish) -> tuple[ModelVersion, DeviceBatches]:
    version = published(sharding="table_wise")
    return version, batches_of(version, compiled(version, is_eager=True))


def test_concurrent_lookups_equal_sequential_lookups(
    table_wise: tuple[ModelVersion, DeviceBatches],
) -> None:
    version, batches = table_wise
    features = version.manifest.features
    requests = [to_kjt(sample(version, size), features) for size in (1, 7, 100)]
    check_concurrent_lookups(batches.lookup, requests, 100)


def test_result_is_unchanged_by_the_next_lookup(
    table_wise: tuple[ModelVersion, DeviceBatches],
) -> None:
    version, batches = table_wise
    ids, lengths = to_kjt(sample(version, 7), version.manifest.features)
    values = batches.lookup(ids, lengths, None, as_float16=False)
    before = values.copy()
    batches.lookup(np.zeros_like(ids), lengths, None, as_float16=False)
    np.testing.assert_array_equal(values, before)
