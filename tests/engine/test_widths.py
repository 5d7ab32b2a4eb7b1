"""Tests of tables of any width: results have that width, even if stored rows are padded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pooled import collection
from reference import (
    assert_same,
    check_vectors,
    dequantized_int8,
    expected,
    sample,
    source_rows,
    stored_rows,
    to_kjt,
)
from torchrec import EmbeddingBagCollection, PoolingType
from unpooled import rows_of, unpooled_collection

from embedserve.engine.compile import EAGER, SCRIPTED, TRACED
from embedserve.engine.programs import Programs
from embedserve.engine.restore import restore
from embedserve_store import ModelStore, ModelVersion, publish

BY_HAND: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "float32": lambda rows: rows,
    "float16": lambda rows: rows.astype(np.float16).astype(np.float32),
    "int8": dequantized_int8,
}
"""Expected rows after a round trip through each dtype."""
PLANS: list[tuple[str, int]] = [
    ("table_wise", 1),
    ("table_wise", 2),
    ("row_wise", 2),
    ("column_wise", 1),
    ("column_wise", 2),
    ("column_wise", 3),
    ("data_parallel", 2),
]
FEW_PLANS = [("table_wise", 1), ("row_wise", 2), ("column_wise", 3)]
SCRIPTED_ONCE = [
    ("float32", "table_wise", 2),
    ("float32", "row_wise", 2),
    ("float32", "column_wise", 3),
    ("float32", "data_parallel", 2),
    ("float16", "row_wise", 2),
    ("int8", "row_wise", 2),
    ("int4", "column_wise", 3),
]
"""Plans to compile, such that each plan and each dtype occurs.

Compiling takes fifty times as long as restoring. Other plans over several ranks use the module
without compilation."""


@pytest.fixture(scope="module")
def ebc() -> EmbeddingBagCollection:
    """Returns tables whose widths have each remainder by 4; one is stored without padding."""
    torch.manual_seed(11)
    return collection(
        [
            ("ten", 101, 10, ["a", "b"], PoolingType.MEAN),
            ("seven", 30, 7, ["c"], PoolingType.SUM),
            ("eight", 20, 8, ["d"], PoolingType.SUM),
            ("one", 9, 1, ["e"], PoolingType.SUM),
        ]
    )


def published(source: Any, store: Path, **options: Any) -> ModelVersion:
    return ModelStore(store).load("m", publish(source, store, model="m", **options).version)


@pytest.mark.parametrize(
    ("dtype", "sharding", "world_size"),
    [
        *(("float32", *plan) for plan in PLANS),
        *((dtype, *plan) for dtype in ("float16", "int8", "int4") for plan in FEW_PLANS),
    ],
)
def test_results_have_table_widths_without_padding(
    ebc: EmbeddingBagCollection, tmp_path: Path, dtype: str, sharding: str, world_size: int
) -> None:
    version = published(ebc, tmp_path, dtype=dtype, sharding=sharding, world_size=world_size)
    manifest = version.manifest
    assert manifest.length_per_key == (10, 10, 7, 8, 1)
    kind = TRACED
    if world_size > 1:
        kind = SCRIPTED if (dtype, sharding, world_size) in SCRIPTED_ONCE else EAGER
    engine = restore(version, is_eager=kind == EAGER)
    assert engine.lookup_kind == kind
    bags = sample(version)
    ids, lengths = to_kjt(bags, manifest.features)
    result = engine.lookup(ids, lengths)
    assert result.shape == (7, 36)
    assert result.flags.c_contiguous
    assert_same(result, expected(stored_rows(version), manifest, bags))
    if dtype in BY_HAND:
        tables = {name: BY_HAND[dtype](rows) for name, rows in source_rows(ebc).items()}
        assert_same(result, expected(tables, manifest, bags))
    weights = {f: [[0.5] * len(bag) for bag in bags[f]] for f in bags}
    halves = np.full(len(ids), 0.5, np.float32)
    weighted = engine.lookup(ids, lengths, halves)
    assert_same(weighted, expected(stored_rows(version), manifest, bags, weights))


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_padding_does_not_change_row_scale(tmp_path: Path, dtype: str) -> None:
    """Checks that padding does not change a row's scale.

    A zero next to values around 100 would make each step many times as large.
    """
    source = collection([("t", 50, 6, ["f"], PoolingType.SUM)])
    with torch.no_grad():
        source.embedding_bags["t"].weight.uniform_(100, 101)
    rows = source_rows(source)["t"]
    version = published(source, tmp_path, dtype=dtype)
    steps = {"int8": 255, "int4": 15}[dtype]
    assert np.abs(stored_rows(version)["t"] - rows).max() < 0.5 / steps + 0.1  # float16 of 100
    ids = np.arange(50)
    result = restore(version).lookup(ids, np.ones(50, np.int32))
    assert_same(result, stored_rows(version)["t"])


@pytest.mark.parametrize(
    ("dtype", "sharding", "world_size"),
    [
        ("float32", "table_wise", 1),
        ("float16", "table_wise", 2),
        ("int8", "row_wise", 2),
        ("int4", "data_parallel", 2),
    ],
)
def test_unpooled_rows_have_table_width_without_padding(
    tmp_path: Path, dtype: str, sharding: str, world_size: int
) -> None:
    source = unpooled_collection([("t", 101, ["a", "b"]), ("u", 9, ["c", "a"])], dim=10)
    version = published(source, tmp_path, dtype=dtype, sharding=sharding, world_size=world_size)
    bags = sample(version)
    engine = restore(version, is_eager=dtype in ("float16", "int4"))
    result = engine.lookup(*to_kjt(bags, version.manifest.features))
    assert result.shape[1] == 10
    assert result.flags.c_contiguous
    assert_same(result, rows_of(stored_rows(version), version.manifest, bags))


@pytest.mark.parametrize("devices", ["cpu:1", "cpu:3"])
def test_lookups_on_another_number_of_ranks_equal_source_rows(
    ebc: EmbeddingBagCollection, tmp_path: Path, devices: str
) -> None:
    version = published(ebc, tmp_path, sharding="column_wise", world_size=2)
    engine = restore(version, devices, is_eager=devices == "cpu:3")
    check_vectors(engine.lookup, version, source_rows(ebc))


def test_next_version_reuses_compiled_program(ebc: EmbeddingBagCollection, tmp_path: Path) -> None:
    before = restore(published(ebc, tmp_path))
    version = published(ebc, tmp_path)
    engine = restore(version, programs=Programs([before]))
    assert not Programs([before]).add(engine)
    check_vectors(engine.lookup, version, source_rows(ebc))


def test_eager_lookups_equal_source_rows(ebc: EmbeddingBagCollection, tmp_path: Path) -> None:
    version = published(ebc, tmp_path, sharding="row_wise", world_size=2)
    check_vectors(restore(version, is_eager=True).lookup, version, source_rows(ebc))
