"""Goldens sample every corner of the bags, and pooling by hand is torch's pooling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torchrec import EmbeddingBagCollection

from embedserve_store.errors import StoreError
from embedserve_store.goldens import (
    EXAMPLES,
    Goldens,
    load_goldens,
    pool,
    sample_bags,
    save_goldens,
)
from embedserve_store.ids.translate import IdTranslator
from embedserve_store.manifest import Manifest
from embedserve_store.sources import live
from embedserve_store.table_spec import TableSpec

TABLES = (
    TableSpec("a", 1000, 8, ("x", "y"), "sum", "float32"),
    TableSpec("b", 1, 4, ("z",), "mean", "float32"),
    TableSpec("c", 50, 4, ("y",), "sum", "float32"),
)
PLAIN = Manifest("m", 1, TABLES, is_weighted=False)
WEIGHTED = Manifest("m", 1, TABLES, is_weighted=True)


def load(path: Path, manifest: Manifest) -> Goldens:
    return load_goldens(path, manifest, IdTranslator(manifest, {}))


def goldens_of(manifest: Manifest) -> Goldens:
    answers = np.arange(EXAMPLES * 24, dtype=np.float32).reshape(EXAMPLES, 24)
    return Goldens(sample_bags(manifest, {}), answers, answers + 1)


def test_bags_reach_first_and_last_rows_and_nothing_beyond() -> None:
    bags = sample_bags(PLAIN, {})
    assert bags.lengths.shape == (3, EXAMPLES)
    assert bags.lengths.min() == 0
    assert bags.lengths.max() <= 8
    assert (bags.lengths[:, 1] == 0).all()
    by_feature = np.split(bags.ids, np.cumsum(bags.lengths.sum(axis=1))[:-1])
    for ids, rows in zip(by_feature, (1000, 50, 1), strict=True):
        assert ids[:2].tolist() == [0, rows - 1]
        assert ids.max() < rows


def test_bags_are_the_same_every_time() -> None:
    first, second = sample_bags(WEIGHTED, {}), sample_bags(WEIGHTED, {})
    np.testing.assert_array_equal(first.ids, second.ids)
    np.testing.assert_array_equal(first.lengths, second.lengths)
    np.testing.assert_array_equal(first.weights, second.weights)


@pytest.mark.parametrize(("is_weighted", "pooling"), [(False, None), (True, "sum")])
def test_pooling_by_hand_is_the_modules(
    make_ebc: Callable[..., EmbeddingBagCollection], is_weighted: bool, pooling: str | None
) -> None:
    ebc = make_ebc(is_weighted=is_weighted, pooling=pooling)
    manifest = Manifest("m", 1, live.describe(ebc), is_weighted)
    bags = sample_bags(manifest, {})

    def rows_of(table: TableSpec, ids: np.ndarray) -> np.ndarray:
        return ebc.embedding_bags[table.name].weight.detach().numpy()[ids]

    np.testing.assert_allclose(
        pool(manifest, bags, bags.ids, rows_of),
        live.answers(ebc, manifest, bags),
        rtol=1e-5,
        atol=1e-6,
    )


def test_a_weighted_mean_divides_by_the_count() -> None:
    manifest = Manifest("m", 1, (TableSpec("t", 9, 4, ("t",), "mean", "float32"),), True)
    bags = sample_bags(manifest, {})
    rows = torch.arange(36.0).reshape(9, 4).numpy()
    pooled = pool(manifest, bags, bags.ids, lambda _, ids: rows[ids])
    assert bags.weights is not None
    expected = (bags.weights[0] * rows[0] + bags.weights[1] * rows[8]) / 2
    np.testing.assert_allclose(pooled[0], expected, rtol=1e-6)
    assert not pooled[1].any()


@pytest.mark.parametrize("manifest", [PLAIN, WEIGHTED], ids=["plain", "weighted"])
def test_what_is_saved_is_loaded(tmp_path: Path, manifest: Manifest) -> None:
    path = tmp_path / "goldens.safetensors"
    saved = goldens_of(manifest)
    save_goldens(saved, path)
    loaded = load(path, manifest)
    np.testing.assert_array_equal(loaded.bags.ids, saved.bags.ids)
    np.testing.assert_array_equal(loaded.bags.lengths, saved.bags.lengths)
    np.testing.assert_array_equal(loaded.source_answers, saved.source_answers)
    np.testing.assert_array_equal(loaded.stored_answers, saved.stored_answers)
    if manifest.is_weighted:
        np.testing.assert_array_equal(loaded.bags.weights, saved.bags.weights)
    else:
        assert loaded.bags.weights is None


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "goldens.safetensors"
    with pytest.raises(StoreError, match=r"goldens\.safetensors: cannot be read: No such file"):
        load(path, PLAIN)
    save_goldens(goldens_of(PLAIN), path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreError, match="truncated"):
        load(path, PLAIN)


def test_goldens_of_an_unweighted_model_do_not_fit_a_weighted_one(tmp_path: Path) -> None:
    save_goldens(goldens_of(PLAIN), tmp_path / "g")
    with pytest.raises(StoreError, match=r"has .*, expected .*'weights'"):
        load(tmp_path / "g", WEIGHTED)


def test_goldens_of_other_dims_do_not_fit(tmp_path: Path) -> None:
    save_goldens(goldens_of(PLAIN), tmp_path / "g")
    other = replace(PLAIN, tables=(replace(TABLES[0], embedding_dim=16), *TABLES[1:]))
    with pytest.raises(StoreError, match=r"answers is float32 \[16, 24\], .* \[16, 40\]"):
        load(tmp_path / "g", other)


def test_goldens_of_larger_tables_do_not_fit(tmp_path: Path) -> None:
    save_goldens(goldens_of(PLAIN), tmp_path / "g")
    other = replace(PLAIN, tables=(replace(TABLES[0], num_embeddings=999), *TABLES[1:]))
    with pytest.raises(StoreError, match="id 999 has no row in its table"):
        load(tmp_path / "g", other)


@pytest.mark.parametrize("change", [-1, 1, 100])
def test_lengths_that_do_not_add_up(tmp_path: Path, change: int) -> None:
    path = tmp_path / "g"
    save_goldens(goldens_of(PLAIN), path)
    tensors = load_file(path)
    tensors["lengths"][0, 1] += change
    save_file(tensors, path)
    with pytest.raises(StoreError, match=r"lengths do not add up to its [0-9]+ ids"):
        load(path, PLAIN)
