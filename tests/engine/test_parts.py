"""Parts of a version are restored as versions: their own goldens are compared in the kernels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType

from embedserve.engine.restore import restore
from embedserve_store import ModelStore, ModelVersion, Part, StoreError, publish
from embedserve_store.memory.resident_tables import make_resident

PARTS = 2


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models "weighted" and "ranks", whose plan has two ranks, in PARTS parts."""
    store = tmp_path_factory.mktemp("parts")
    torch.manual_seed(0)
    for name, dtype, ranks in (("weighted", "int8", 1), ("ranks", "float16", 2)):
        tables = [
            EmbeddingBagConfig(
                name=table,
                num_embeddings=rows,
                embedding_dim=16,
                feature_names=features,
                pooling=pooling,
            )
            for table, rows, features, pooling in (
                ("a", 501, ["x"], PoolingType.MEAN),
                ("b", 300, ["x", "y"], PoolingType.SUM),
            )
        ]
        ebc = EmbeddingBagCollection(tables=tables, is_weighted=name == "weighted")
        publish(ebc, store, model=name, dtype=dtype, hosts=PARTS, world_size=ranks)
    return store


def load(store: Path, model: str, number: int) -> ModelVersion:
    return ModelStore(store, holds=Part(number, PARTS)).load(model)


@pytest.mark.parametrize("number", range(PARTS))
@pytest.mark.parametrize("model", ["weighted", "ranks"])
def test_kernels_give_the_results_of_the_rows_of_the_part(
    store: Path, model: str, number: int
) -> None:
    restore(load(store, model, number), "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("number", range(PARTS))
@pytest.mark.parametrize("model", ["weighted", "ranks"])
def test_a_part_on_a_gpu(store: Path, model: str, number: int) -> None:
    restore(load(store, model, number), "cuda")


def test_another_number_of_ranks_and_resident_rows(store: Path) -> None:
    restore(make_resident(load(store, "weighted", 1)), "cpu:3")


def test_other_rows_than_those_of_the_goldens_are_found(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, other = load(store, "weighted", 1), load(store, "weighted", 0)
    goldens = other.goldens()
    assert not np.array_equal(goldens.stored_answers, version.goldens().stored_answers)
    monkeypatch.setattr(ModelVersion, "goldens", lambda self: goldens)
    with pytest.raises(StoreError, match="the vectors of 'x@a' are not the published ones"):
        restore(version, "cpu")
