"""Tests of the goldens' file: it is loaded as saved, or rejected if it does not fit the
manifest."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from store.goldens.test_sampled_bags import PLAIN, TABLES, WEIGHTED

from embedserve_store.errors import StoreError
from embedserve_store.format.manifest import Manifest
from embedserve_store.goldens.goldens_file import Goldens, load_goldens, save_goldens
from embedserve_store.goldens.sampled_bags import EXAMPLES, sample_bags
from embedserve_store.ids.translate import IdTranslator


def load(path: Path, manifest: Manifest) -> Goldens:
    return load_goldens(path, manifest, IdTranslator(manifest, {}))


def goldens_of(manifest: Manifest) -> Goldens:
    answers = np.arange(EXAMPLES * 24, dtype=np.float32).reshape(EXAMPLES, 24)
    return Goldens(sample_bags(manifest, {}), answers, answers + 1)


@pytest.mark.parametrize("manifest", [PLAIN, WEIGHTED], ids=["plain", "weighted"])
def test_round_trip(tmp_path: Path, manifest: Manifest) -> None:
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


def test_missing_and_truncated_files_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "goldens.safetensors"
    with pytest.raises(StoreError, match=r"goldens\.safetensors: cannot be read: No such file"):
        load(path, PLAIN)
    save_goldens(goldens_of(PLAIN), path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreError, match="truncated"):
        load(path, PLAIN)


def test_goldens_without_weights_are_rejected_for_a_weighted_model(tmp_path: Path) -> None:
    save_goldens(goldens_of(PLAIN), tmp_path / "g")
    with pytest.raises(StoreError, match=r"has .*, expected .*'weights'"):
        load(tmp_path / "g", WEIGHTED)


def test_goldens_of_other_dims_are_rejected(tmp_path: Path) -> None:
    save_goldens(goldens_of(PLAIN), tmp_path / "g")
    other = replace(PLAIN, tables=(replace(TABLES[0], embedding_dim=16), *TABLES[1:]))
    with pytest.raises(StoreError, match=r"answers is float32 \[16, 24\], .* \[16, 40\]"):
        load(tmp_path / "g", other)


def test_goldens_of_larger_tables_are_rejected(tmp_path: Path) -> None:
    save_goldens(goldens_of(PLAIN), tmp_path / "g")
    other = replace(PLAIN, tables=(replace(TABLES[0], num_embeddings=999), *TABLES[1:]))
    with pytest.raises(StoreError, match="id 999 has no row in its table"):
        load(tmp_path / "g", other)


@pytest.mark.parametrize("change", [-1, 1, 100])
def test_lengths_that_do_not_add_up_are_rejected(tmp_path: Path, change: int) -> None:
    path = tmp_path / "g"
    save_goldens(goldens_of(PLAIN), path)
    tensors = load_file(path)
    tensors["lengths"][0, 1] += change
    save_file(tensors, path)
    with pytest.raises(StoreError, match=r"lengths do not add up to its [0-9]+ ids"):
        load(path, PLAIN)
