"""A restored engine answers what the source model and its stored rows say, whatever the plan."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys

import numpy as np
import pytest
import torch
from reference import (
    assert_same,
    dequantized_int8,
    expected,
    sample,
    stored_rows,
    to_kjt,
)
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType

from embedserve.engine import restore as restore_module
from embedserve.engine.restore import check_fits_cuda, resolve_devices, restore
from embedserve_store import ModelVersion, StoreError, TableSpec, publish

RESTORE_WITHIN = """
import resource, sys
from embedserve.engine.restore import restore
from embedserve_store import ModelStore

version = ModelStore(sys.argv[1]).load("large")
assert version.manifest.nbytes == 512 << 20
own_kib = next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmData"))
limit = own_kib * 1024 + (256 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
restore(version)
print("restored")
"""

PLANS = [(s, n) for s in ("table_wise", "row_wise") for n in (1, 2, 4)]


def source_rows(ebc: EmbeddingBagCollection) -> dict[str, np.ndarray]:
    return {name: bag.weight.detach().numpy() for name, bag in ebc.embedding_bags.items()}


@pytest.mark.parametrize(("sharding", "world_size"), PLANS)
def test_float32_equals_embedding_bag(ebc, published, sharding, world_size) -> None:
    version = published(sharding=sharding, world_size=world_size)
    engine = restore(version)
    assert engine.is_scripted
    assert engine.plan == version.plan
    bags = sample(version)
    ids, lengths = to_kjt(bags, version.manifest.features)
    assert_same(engine.lookup(ids, lengths), expected(source_rows(ebc), version.manifest, bags))


@pytest.mark.parametrize(("sharding", "world_size"), PLANS)
def test_int8_equals_dequantizing_by_hand(ebc, published, sharding, world_size) -> None:
    version = published(dtype="int8", sharding=sharding, world_size=world_size)
    tables = {name: dequantized_int8(rows) for name, rows in source_rows(ebc).items()}
    bags = sample(version)
    ids, lengths = to_kjt(bags, version.manifest.features)
    assert_same(restore(version).lookup(ids, lengths), expected(tables, version.manifest, bags))


@pytest.mark.parametrize("dtype", ["float16", "int4"])
@pytest.mark.parametrize(("sharding", "world_size"), [("table_wise", 2), ("row_wise", 2)])
def test_other_dtypes_equal_their_stored_rows(published, dtype, sharding, world_size) -> None:
    version = published(dtype=dtype, sharding=sharding, world_size=world_size)
    tables = stored_rows(version)
    bags = sample(version)
    ids, lengths = to_kjt(bags, version.manifest.features)
    assert_same(restore(version).lookup(ids, lengths), expected(tables, version.manifest, bags))


def test_every_table_its_own_dtype_and_sharding(ebc, published) -> None:
    version = published(
        dtype={"movie": "int8", "genre": "float32", "user": "float16", "recent": "float32"},
        sharding={
            "movie": "row_wise",
            "genre": "table_wise",
            "user": "row_wise",
            "recent": "table_wise",
        },
        world_size=2,
    )
    tables = source_rows(ebc)
    tables["movie"] = dequantized_int8(tables["movie"])
    tables["user"] = tables["user"].astype(np.float16).astype(np.float32)
    bags = sample(version)
    ids, lengths = to_kjt(bags, version.manifest.features)
    assert_same(restore(version).lookup(ids, lengths), expected(tables, version.manifest, bags))


@pytest.mark.parametrize(("sharding", "world_size"), [("table_wise", 1), ("row_wise", 2)])
def test_weights_multiply_rows(ebc, published, sharding, world_size) -> None:
    version = published(sharding=sharding, world_size=world_size)
    bags = sample(version)
    rng = np.random.default_rng(6)
    weights = {f: [rng.normal(size=len(bag)).tolist() for bag in bags[f]] for f in bags}
    ids, lengths = to_kjt(bags, version.manifest.features)
    flat = np.array(
        [w for f in version.manifest.features for bag in weights[f] for w in bag], np.float32
    )
    assert_same(
        restore(version).lookup(ids, lengths, flat),
        expected(source_rows(ebc), version.manifest, bags, weights),
    )


def test_nothing_but_empty_bags_is_zeros(published) -> None:
    version = published(sharding="row_wise", world_size=2)
    features = len(version.manifest.features)
    values = restore(version).lookup(np.zeros(0, np.int64), np.zeros(features * 3, np.int32))
    assert values.shape == (3, sum(version.manifest.length_per_key))
    assert not values.any()


def test_tables_are_mapped_not_copied(published) -> None:
    engine = restore(published(sharding="row_wise", world_size=2))
    mapped = engine._version.tables.data
    for lookup in (engine._lookup, engine._weighted_lookup):
        tensors = [
            node.t("value")
            for node in lookup.graph.findAllNodes("prim::Constant")
            if node.hasAttribute("value") and node.kindOf("value") == "t"
        ]
        rows = [tensor for tensor in tensors if tensor.numel() == mapped.size]
        assert rows
        assert {tensor.data_ptr() for tensor in rows} == {mapped.ctypes.data}


def test_restoring_takes_no_memory_of_the_size_of_the_tables(tmp_path) -> None:
    """Tables of 512 MiB are restored while the process may add no 256 MiB of its own."""
    torch_tables = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=1 << 20,
            embedding_dim=64,
            feature_names=[name],
            pooling=PoolingType.SUM,
        )
        for name in ("a", "b")
    ]
    publish(EmbeddingBagCollection(tables=torch_tables), tmp_path, model="large")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RESTORE_WITHIN, str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "restored\n"


def test_another_number_of_ranks_is_planned_anew(ebc, published, caplog) -> None:
    version = published(sharding="row_wise", world_size=2)
    with caplog.at_level(logging.WARNING):
        engine = restore(version, "cpu:3")
    assert engine.replanned
    assert "stored plan is for 2 ranks" in caplog.text
    assert engine.plan.world_size == 3
    assert {table.sharding_type for table in engine.plan.tables.values()} == {"row_wise"}
    bags = sample(version)
    ids, lengths = to_kjt(bags, version.manifest.features)
    assert_same(engine.lookup(ids, lengths), expected(source_rows(ebc), version.manifest, bags))


def test_strict_plan_refuses_another_number_of_ranks(published) -> None:
    version = published(sharding="row_wise", world_size=2)
    with pytest.raises(StoreError, match="stored plan is for 2 ranks, here there are 1"):
        restore(version, "cpu:1", strict_plan=True)


def test_wrong_rows_never_become_ready(published) -> None:
    version = published()
    goldens = version.goldens()
    wrong = dataclasses.replace(goldens, stored_answers=goldens.stored_answers * 1.01)
    with pytest.raises(StoreError, match="'history@movie' are not the published ones"):
        restore(_with_goldens(version, wrong))


def _with_goldens(version: ModelVersion, goldens: object) -> ModelVersion:
    class Changed(ModelVersion):
        def goldens(self):  # noqa: ANN202
            return goldens

    return Changed(version.path, version.manifest, version.plan, version.tables)


def test_a_model_that_cannot_be_scripted_runs_eagerly(ebc, published, monkeypatch, caplog) -> None:
    def refuse(*args: object) -> None:
        raise RuntimeError("cannot be compiled")

    monkeypatch.setattr(torch.jit, "script", refuse)
    version = published(sharding="row_wise", world_size=2)
    engine = restore(version)
    assert not engine.is_scripted
    assert "TorchScript failed: cannot be compiled" in caplog.text
    bags = sample(version)
    ids, lengths = to_kjt(bags, version.manifest.features)
    assert_same(engine.lookup(ids, lengths), expected(source_rows(ebc), version.manifest, bags))


@pytest.mark.parametrize("devices", ["cpu", "cpu:0", "cpu:-1", "gpu", "", "cuda:1"])
def test_unknown_devices_are_named(devices) -> None:
    with pytest.raises(ValueError, match=f"devices is '{devices}'"):
        resolve_devices(devices, 1)


def test_auto_takes_the_stored_ranks_without_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(restore_module.torch.cuda, "device_count", lambda: 0)
    assert resolve_devices("auto", 4) == ("cpu", 4)
    with pytest.raises(ValueError, match="no CUDA GPU"):
        resolve_devices("cuda", 4)
    monkeypatch.setattr(restore_module.torch.cuda, "device_count", lambda: 2)
    assert resolve_devices("auto", 4) == resolve_devices("cuda", 4) == ("cuda", 2)


def test_tables_past_int32_are_refused_on_cuda(published) -> None:
    manifest = published().manifest
    huge = TableSpec("huge", 2**31, 64, ("f",), "sum", "int8")
    with pytest.raises(StoreError, match="'huge' has 2147483648 rows: on CUDA"):
        check_fits_cuda(dataclasses.replace(manifest, tables=(huge,)))
    check_fits_cuda(manifest)
