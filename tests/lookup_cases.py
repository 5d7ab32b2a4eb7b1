"""Expected results of lookups on any devices, case by case: every dtype, sharding and pooling.

tests/engine/test_gpu.py runs all cases on GPUs, bench/gpu_check.py the requested ones.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from pooled import collection
from reference import assert_same, expected, sample, stored_rows, to_kjt
from torchrec import EmbeddingBagCollection, EmbeddingCollection, PoolingType
from unpooled import rows_of, unpooled_collection, write_small_files, write_version

from embedserve.engine.cuda_limits import ROWS_MAX
from embedserve.engine.engine import Engine
from embedserve.engine.gpus import gpus_for, resolve_devices
from embedserve.engine.restore import restore
from embedserve.fanout.router_engine import RouterEngine
from embedserve_store import Manifest, ModelStore, ModelVersion, TableSpec, publish
from embedserve_store.format.row_layout import encode_rows
from embedserve_store.format.table_spec import DTYPES
from embedserve_store.format.tables_file import TablesFile, header_bytes
from embedserve_store.goldens.goldens_file import Goldens
from embedserve_store.goldens.reference_pooling import pool_stored
from embedserve_store.goldens.sampled_bags import sample_bags
from embedserve_store.plans.plan import Plan, Shard, TablePlan
from embedserve_store.plans.sharding_types import SHARDING_TYPES, UNPOOLED_SHARDING_TYPES

Look = Callable[..., np.ndarray]
"""The type of Engine.lookup."""
RELATIVE = {"cpu": 1e-6, "cuda": 1e-5}
"""Allowed difference of float32 sums, relative to the largest value. Kernels on GPUs add in other
orders."""


@dataclass(frozen=True)
class Case:
    """Tables of one dtype and sharding: pooled with sum and mean, or not pooled."""

    dtype: str
    sharding: str
    is_pooled: bool

    def __str__(self) -> str:
        return f"{self.dtype} {self.sharding}{'' if self.is_pooled else ' unpooled'}"


CASES = [
    *(Case(dtype, sharding, True) for dtype in DTYPES for sharding in SHARDING_TYPES),
    *(Case(dtype, sharding, False) for dtype in DTYPES for sharding in UNPOOLED_SHARDING_TYPES),
]


def pooled_source() -> EmbeddingBagCollection:
    """Returns four tables: two features on one table, one feature on two, uneven rows.

    Two tables have sums, two have means.
    """
    torch.manual_seed(3)
    return collection(
        [
            ("movie", 1001, 64, ["history", "candidate"], PoolingType.MEAN),
            ("genre", 3, 16, ["genres"], PoolingType.SUM),
            ("user", 50, 32, ["user"], PoolingType.SUM),
            ("recent", 77, 8, ["history"], PoolingType.MEAN),
        ]
    )


def unpooled_source() -> EmbeddingCollection:
    """Returns four tables: two features on one table, one feature on two, uneven rows.

    One table has fewer rows than there are ranks.
    """
    return unpooled_collection(
        [
            ("movie", 1001, ["history", "candidate"]),
            ("genre", 3, ["genres"]),
            ("user", 50, ["user"]),
            ("recent", 77, ["history"]),
        ]
    )


def check(case: Case, store: Path, devices: str, gpu_layout: str = "shards") -> None:
    """Publishes the case, restores it on ``devices`` and checks what each replica returns.

    Raises:
        AssertionError: a result is wrong.
        StoreError: restoring fails, for example because the results for the goldens are wrong.
    """
    ranks = 1
    if gpu_layout == "shards":
        ranks = resolve_devices(devices, 1, gpus_for(devices))[1]
    if case.is_pooled:
        published = publish(
            pooled_source(),
            store,
            model="pooled",
            dtype=case.dtype,
            sharding=case.sharding,
            world_size=ranks,
        )
        version = ModelStore(store).load("pooled", published.version)
    else:
        version = write_version(
            store, unpooled_source(), dtype=case.dtype, sharding=case.sharding, world_size=ranks
        )
    engine = restore(version, devices, gpu_layout=gpu_layout)
    for lookup in engine.each():
        check_lookup(lookup, engine, version)


def check_lookup(lookup: Look, engine: Engine | RouterEngine, version: ModelVersion) -> None:
    """Compares the results of an engine's lookup with the rows of ``version``.

    Raises:
        AssertionError: a result is wrong.
    """
    rows = stored_rows(version, as_float16=engine.device_type == "cuda")
    is_pooled = version.manifest.is_pooled
    (_check_pooled if is_pooled else _check_unpooled)(lookup, engine, version, rows)


def _check_pooled(
    lookup: Look, engine: Engine | RouterEngine, version: ModelVersion, rows: dict[str, np.ndarray]
) -> None:
    """Checks lookups without and with weights, of one example, and of empty bags alone."""
    manifest, relative = version.manifest, RELATIVE[engine.device_type]
    random = np.random.default_rng(6)
    for batch_size in (7, 1):
        bags = sample(version, batch_size)
        ids, lengths = to_kjt(bags, manifest.features)
        assert_same(lookup(ids, lengths), expected(rows, manifest, bags), relative)
        weights = {f: [random.normal(size=len(bag)).tolist() for bag in bags[f]] for f in bags}
        flat = [w for f in manifest.features for bag in weights[f] for w in bag]
        weighted = lookup(ids, lengths, np.array(flat, np.float32))
        assert_same(weighted, expected(rows, manifest, bags, weights), relative)
        _check_half(lookup, engine, ids, lengths)
    empty = lookup(np.zeros(0, np.int64), np.zeros(3 * len(manifest.features), np.int32))
    assert empty.shape == (3, sum(manifest.length_per_key))
    assert not empty.any()


def _check_unpooled(
    lookup: Look, engine: Engine | RouterEngine, version: ModelVersion, rows: dict[str, np.ndarray]
) -> None:
    """Checks lookups of bags that have no id of one feature, and of no ids at all."""
    manifest = version.manifest
    bags = sample(version) | {"candidate": [[]] * 7}
    values = lookup(*to_kjt(bags, manifest.features))
    assert_same(values, rows_of(rows, manifest, bags), RELATIVE[engine.device_type])
    _check_half(lookup, engine, *to_kjt(bags, manifest.features))
    empty = lookup(np.zeros(0, np.int64), np.zeros(len(manifest.features), np.int32))
    assert empty.shape == (0, manifest.tables[0].embedding_dim)


def _check_half(
    lookup: Look, engine: Engine | RouterEngine, ids: np.ndarray, lengths: np.ndarray
) -> None:
    rounded = lookup(ids, lengths, as_float16=True)
    assert rounded.dtype == np.float16
    np.testing.assert_array_equal(rounded, engine.to_float16(lookup(ids, lengths)))


def most_rows(store: Path, rows: int = ROWS_MAX) -> tuple[ModelVersion, dict[int, np.ndarray]]:
    """Returns a version of one table with as many rows as ids can address on CUDA.

    The second result maps row numbers to vectors. All other rows are zeros that take no space on
    disk.
    """
    table = TableSpec("most", rows, 4, ("id",), "sum", "int4")
    marked = {0: 1.0, 1 << 30: 2.0, rows - 2: 3.0, rows - 1: 4.0}
    vectors = {row: np.arange(4, dtype=np.float32) + value for row, value in marked.items()}
    return mostly_zeros(store, table, vectors), vectors


def mostly_zeros(store: Path, table: TableSpec, vectors: Mapping[int, np.ndarray]) -> ModelVersion:
    """Returns a version of the single table ``table``.

    Its rows are zeros that take no space on disk, except ``vectors``: row number to float32 [dim].
    """
    folder = store / table.name / "1"
    folder.mkdir(parents=True)
    path = folder / "tables.safetensors"
    with path.open("wb") as file:
        start = file.write(header_bytes((table,)))
        file.truncate(start + table.nbytes)
        for row, vector in vectors.items():
            file.seek(start + row * table.row_bytes)
            file.write(encode_rows(torch.from_numpy(vector[None]), table.dtype).tobytes())
    manifest = Manifest(table.name, 1, (table,), is_weighted=False)
    bags = sample_bags(manifest, {})
    tables = TablesFile.open(path, manifest.tables)
    answers = pool_stored(manifest, bags, bags.ids, tables)
    shard = Shard(0, 0, table.num_embeddings, 0, table.embedding_dim)
    plan = Plan(1, {table.name: TablePlan("table_wise", (shard,))}, {})
    write_small_files(folder, manifest, plan, Goldens(bags, answers, answers))
    return ModelStore(store).load(table.name, 1)


def check_most_rows(store: Path, devices: str) -> None:
    """Checks that the largest ids that CUDA accepts return their rows; raises as ``check`` does."""
    version, vectors = most_rows(store)
    engine = restore(version, devices)
    ids = np.array([*vectors, version.manifest.tables[0].num_embeddings - 3])
    values = engine.lookup(ids, np.ones(ids.size, np.int32))
    assert_same(values, np.stack([*vectors.values(), np.zeros(4, np.float32)]), 1e-2)
    assert not values[-1].any()
