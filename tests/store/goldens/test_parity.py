"""Tests of the parity check: it accepts differences that rounding explains, and no others."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from half import rows_in_half
from store.conftest import MakeEbc
from torchrec import EmbeddingBagCollection

from embedserve_store.errors import StoreError
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.table_spec import CODES_MAX, DTYPES, TableSpec
from embedserve_store.goldens.goldens_file import Bags, Goldens
from embedserve_store.goldens.parity import (
    SUMS_TOLERANCE,
    TRAINED_TOLERANCES,
    check_answers,
    is_near,
    storing_bounds,
)
from embedserve_store.goldens.reference_pooling import pool, row_numbers
from embedserve_store.local_store import LocalStore
from embedserve_store.model_version import ModelVersion
from embedserve_store.publishing.publish import publish


def check(
    version: ModelVersion,
    answers: np.ndarray,
    goldens: Goldens | None = None,
    *,
    is_in_half: bool = False,
) -> None:
    goldens = goldens or version.goldens()
    numbers = row_numbers(goldens.bags, version.translator)
    manifest, tables = version.manifest, version.tables
    check_answers(answers, goldens, numbers, manifest, tables, "here", as_float16=is_in_half)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-7, 1e-3, 1.0, 1e3])
@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
def test_rounding_of_every_dtype_and_magnitude_is_accepted(
    make_ebc: MakeEbc,
    tmp_path: Path,
    dtype: str,
    scale: float,
    is_weighted: bool,
) -> None:
    """Covers rows far from zero with a small span, rows of one value, and rows of both signs."""
    ebc = make_ebc(is_weighted=is_weighted)
    with torch.no_grad():
        for bag in ebc.embedding_bags.values():
            bag.weight.copy_(torch.randn_like(bag.weight) * scale)
            bag.weight[::3] += 10 * scale
            bag.weight[::5] = bag.weight[::5, :1]
    publish(ebc, tmp_path, model="m", dtype=dtype)
    version = LocalStore(tmp_path).load("m")
    check(version, version.goldens().stored_answers)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_off_by_one_percent_are_rejected(
    ebc: EmbeddingBagCollection, tmp_path: Path, dtype: str
) -> None:
    publish(ebc, tmp_path, model="m", dtype=dtype)
    version = LocalStore(tmp_path).load("m")
    answers = version.goldens().stored_answers.copy()
    answers[0, 16:32] += 0.01 * np.abs(answers[:, 16:32]).max()
    with pytest.raises(StoreError, match="here: the vectors of 'friend' are not the published"):
        check(version, answers)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_results_may_differ_by_the_order_of_their_sums(
    make_ebc: MakeEbc, tmp_path: Path, dtype: str, scale: float
) -> None:
    ebc = make_ebc()
    with torch.no_grad():
        for bag in ebc.embedding_bags.values():
            bag.weight *= scale
    publish(ebc, tmp_path, model="m", dtype=dtype)
    version = LocalStore(tmp_path).load("m")
    answers = version.goldens().stored_answers
    changes = np.zeros_like(answers)
    changes[0, 16:32] = SUMS_TOLERANCE * np.abs(answers[:, 16:32]).max()
    check(version, answers + changes / 2)
    with pytest.raises(StoreError, match="here: the vectors of 'friend' are not the published"):
        check(version, answers + changes * 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_rows_that_differ_from_the_source_are_rejected(
    ebc: EmbeddingBagCollection, tmp_path: Path, dtype: str
) -> None:
    """Goldens have the source's results of other examples, as if another checkpoint had been
    stored. The stored rows still give the stored results."""
    publish(ebc, tmp_path, model="m", dtype=dtype)
    version = LocalStore(tmp_path).load("m")
    goldens = version.goldens()
    shuffled = np.roll(goldens.source_answers, 1, axis=0)
    with pytest.raises(StoreError, match="the vectors of 'user' are not the source model's"):
        check(version, goldens.stored_answers, replace(goldens, source_answers=shuffled))


@pytest.mark.parametrize("dtype", TRAINED_TOLERANCES)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3])
def test_training_outputs_are_near_relative_to_the_largest(dtype: str, scale: float) -> None:
    answers = np.array([[-scale, scale / 2]], np.float32)
    tolerance = np.float32(TRAINED_TOLERANCES[dtype] * scale)
    for sign in (-1, 1):
        assert is_near(answers + sign * tolerance / 2, answers, dtype)
        assert not is_near(answers + sign * tolerance * 2, answers, dtype)
    assert not is_near(np.full_like(answers, np.nan), answers, dtype)


@pytest.mark.parametrize("dtype", ["float16", *CODES_MAX])
def test_large_row_gives_no_tolerance_to_other_rows(dtype: str) -> None:
    manifest = Manifest("m", 1, (TableSpec("t", 2, 4, ("f",), "sum", dtype),), False)
    numbers = np.array([0, 1])
    bags = Bags(numbers, np.array([[1, 1]]), None)
    rows = np.array([[1000.0] * 4, [1.0] * 4], np.float32)
    large, small = storing_bounds(bags, numbers, manifest, lambda _, wanted: rows[wanted])
    assert (large > 100 * small).all()


def test_nan_in_results_is_rejected(version: ModelVersion) -> None:
    answers = version.goldens().stored_answers.copy()
    answers[3, 40] = np.nan
    with pytest.raises(StoreError, match="the vectors of 'tag' are not"):
        check(version, answers)


def as_float16(version: ModelVersion) -> np.ndarray:
    """Returns the results of FBGEMM's CUDA kernels for the goldens."""

    def rows_of(table: TableSpec, numbers: np.ndarray) -> np.ndarray:
        rows = version.tables.rows(table.name)[numbers]
        return rows_in_half(rows, table.dtype, table.embedding_dim)

    bags = version.goldens().bags
    return pool(version.manifest, bags, row_numbers(bags, version.translator), rows_of)


@pytest.mark.parametrize("dtype", CODES_MAX)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e2])
@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
def test_on_gpus_quantized_values_may_be_rounded_to_float16(
    make_ebc: MakeEbc,
    tmp_path: Path,
    dtype: str,
    scale: float,
    is_weighted: bool,
) -> None:
    ebc = make_ebc(is_weighted=is_weighted)
    with torch.no_grad():
        for bag in ebc.embedding_bags.values():
            bag.weight.copy_(torch.randn_like(bag.weight) * scale)
            bag.weight[::3] += 10 * scale
    publish(ebc, tmp_path, model="m", dtype=dtype)
    version = LocalStore(tmp_path).load("m")
    stored, answers = version.goldens().stored_answers, as_float16(version)
    assert 1e-5 < np.abs(answers - stored).max() / np.abs(stored).max() < 1e-3
    check(version, answers, is_in_half=True)
    check(version, stored, is_in_half=True)
    with pytest.raises(StoreError, match="are not the published ones"):
        check(version, answers)
    for wrong in (answers * np.float32(1.01), np.roll(answers, 1, axis=0)):
        with pytest.raises(StoreError, match="are not the published ones"):
            check(version, wrong, is_in_half=True)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_on_gpus_float_rows_get_no_extra_tolerance(
    ebc: EmbeddingBagCollection, tmp_path: Path, dtype: str
) -> None:
    """The other two tables are int8. Half a float16 step is too much for the results of the float
    table."""
    publish(ebc, tmp_path, model="m", dtype={"user": dtype, "item": "int8", "tag": "int8"})
    version = LocalStore(tmp_path).load("m")
    answers = as_float16(version)
    check(version, answers, is_in_half=True)
    answers[:, :16] *= np.float32(1 + 2**-11)
    with pytest.raises(StoreError, match="the vectors of 'user' are not the published ones"):
        check(version, answers, is_in_half=True)
