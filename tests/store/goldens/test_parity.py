"""The parity gate lets through what rounding explains and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagCollection

from embedserve_store.errors import StoreError
from embedserve_store.format.table_spec import DTYPES
from embedserve_store.goldens.goldens_file import Goldens
from embedserve_store.goldens.hand_pooling import row_numbers
from embedserve_store.goldens.parity import check_answers
from embedserve_store.local_store import LocalStore
from embedserve_store.model_version import ModelVersion
from embedserve_store.publishing.publish import publish


def check(version: ModelVersion, answers: np.ndarray, goldens: Goldens | None = None) -> None:
    goldens = goldens or version.goldens()
    numbers = row_numbers(goldens.bags, version.translator)
    check_answers(answers, goldens, numbers, version.manifest, version.tables, "here")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-7, 1e-3, 1.0, 1e3])
@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
def test_every_dtype_and_magnitude_is_within_its_own_bound(
    make_ebc: Callable[..., EmbeddingBagCollection],
    tmp_path: Path,
    dtype: str,
    scale: float,
    is_weighted: bool,
) -> None:
    """Rows far from zero with a small span, rows of one value, rows of both signs."""
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
def test_answers_of_another_row_are_caught(
    ebc: EmbeddingBagCollection, tmp_path: Path, dtype: str
) -> None:
    publish(ebc, tmp_path, model="m", dtype=dtype)
    version = LocalStore(tmp_path).load("m")
    answers = version.goldens().stored_answers.copy()
    answers[0, 16:32] += 0.01 * np.abs(answers[:, 16:32]).max()
    with pytest.raises(StoreError, match="here: the vectors of 'friend' are not the published"):
        check(version, answers)


@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_rows_that_are_not_the_sources_are_caught(
    ebc: EmbeddingBagCollection, tmp_path: Path, dtype: str
) -> None:
    """As if another checkpoint had been stored: the answers are those of the stored rows."""
    publish(ebc, tmp_path, model="m", dtype=dtype)
    version = LocalStore(tmp_path).load("m")
    goldens = version.goldens()
    shuffled = np.roll(goldens.source_answers, 1, axis=0)
    with pytest.raises(StoreError, match="the vectors of 'user' are not the source model's"):
        check(version, goldens.stored_answers, replace(goldens, source_answers=shuffled))


def test_a_vector_that_is_not_a_number_is_caught(version: ModelVersion) -> None:
    answers = version.goldens().stored_answers.copy()
    answers[3, 40] = np.nan
    with pytest.raises(StoreError, match="the vectors of 'tag' are not"):
        check(version, answers)
