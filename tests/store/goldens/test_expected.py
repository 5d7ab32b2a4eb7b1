"""Tests of the file with a training model's results: what it holds, and which files are
rejected."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from embedserve_store.errors import StoreError
from embedserve_store.goldens.expected import Expected, read_expected, save_expected
from embedserve_store.goldens.goldens_file import Bags

EXPECTED = Expected(
    ("user", "item"),
    ("user", "item"),
    (2, 3),
    Bags(np.array([1, 2, 3], np.int64), np.array([[1, 1], [0, 1]], np.int32), None),
    np.arange(10, dtype=np.float32).reshape(2, 5),
)
METADATA = {
    "features": '["user", "item"]',
    "keys": '["user", "item"]',
    "length_per_key": "[2, 3]",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_expected(EXPECTED, tmp_path / "e.safetensors")
    return tmp_path / "e.safetensors"


def test_round_trip(path: Path) -> None:
    read = read_expected(str(path))
    assert (read.features, read.keys, read.length_per_key) == (
        EXPECTED.features,
        EXPECTED.keys,
        EXPECTED.length_per_key,
    )
    assert read.examples == 2
    assert read.bags.weights is None
    for one, other in (
        (read.answers, EXPECTED.answers),
        (read.bags.ids, EXPECTED.bags.ids),
        (read.bags.lengths, EXPECTED.bags.lengths),
    ):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_weights_round_trip(path: Path) -> None:
    weights = np.array([0.5, 1, 2], np.float32)
    save_expected(replace(EXPECTED, bags=replace(EXPECTED.bags, weights=weights)), path)
    read = read_expected(path).bags.weights
    assert read is not None
    np.testing.assert_array_equal(read, weights)


def test_checksums_round_trip(path: Path) -> None:
    checksums = {"t.user": np.array([1, 2**64 - 1], np.uint64)}
    save_expected(replace(EXPECTED, checksums=checksums), path)
    read = read_expected(path).checksums
    assert list(read) == ["t.user"]
    np.testing.assert_array_equal(read["t.user"], checksums["t.user"])


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"ids": None}, {}, "has no tensor 'ids'"),
        ({"ids": np.zeros(3, np.int32)}, {}, "ids is int32, expected int64"),
        ({"answers": np.zeros((2, 5))}, {}, "answers is float64, expected float32"),
        ({"weights": np.zeros(2, np.float32)}, {}, "weights is [2], expected one for each id"),
        ({"weights": np.zeros(3, np.int64)}, {}, "weights is int64, expected float32"),
        ({"lengths": np.zeros(4, np.int32)}, {}, "lengths is [4], expected [2 features, examples]"),
        ({"lengths": np.zeros((2, 0), np.int32)}, {}, "lengths is [2, 0], expected [2 features"),
        ({"lengths": np.ones((2, 2), np.int32)}, {}, "lengths do not add up to its 3 ids"),
        ({"lengths": np.array([[-1, 2], [1, 1]], np.int32)}, {}, "lengths do not add up"),
        ({"ids": np.zeros((3, 1), np.int64)}, {}, "lengths do not add up"),
        ({"answers": np.full((2, 5), np.nan, np.float32)}, {}, "a value that is not finite"),
        ({"weights": np.full(3, np.inf, np.float32)}, {}, "weights has a value that is not finite"),
        ({"checksums.a": np.zeros(3, np.int64)}, {}, "checksums.a is int64 [3], expected uint64"),
        ({"checksums.a": np.zeros((3, 1), np.uint64)}, {}, "checksums.a is uint64 [3, 1], exp"),
        ({}, {"keys": None}, "keys of its metadata is None, expected a JSON list of str"),
        ({}, {"keys": "user"}, "keys of its metadata is 'user', expected a JSON list of str"),
        ({}, {"features": '["user", 1]'}, "features of its metadata is '[\"user\", 1]', expected"),
        ({}, {"features": "[" * 9999}, "features of its metadata is '[[["),
        ({}, {"keys": '["user", "user"]'}, "keys of its metadata has one twice: ['user', 'user']"),
        ({}, {"length_per_key": "[2, true]"}, "length_per_key of its metadata is '[2, true]', exp"),
        ({}, {"length_per_key": "[5]"}, "length_per_key has 1 widths for 2 keys"),
    ],
)
def test_malformed_file_is_rejected_with_a_one_line_error(
    path: Path, tensors: dict[str, Any], metadata: dict[str, Any], message: str
) -> None:
    changed = {k: v for k, v in (load_file(path) | tensors).items() if v is not None}
    changed_metadata = {k: v for k, v in (METADATA | metadata).items() if v is not None}
    save_file(changed, path, changed_metadata)
    with pytest.raises(StoreError) as caught:
        read_expected(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_file_is_rejected(path: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"none: cannot be read: No such file or directory$"):
        read_expected(tmp_path / "none")
    with pytest.raises(StoreError, match="is no regular file"):
        read_expected(tmp_path)
    path.write_text(json.dumps(METADATA))
    with pytest.raises(StoreError, match="not a safetensors file"):
        read_expected(path)


def test_named_pipe_is_rejected_without_waiting_for_its_writer(pipe: Path) -> None:
    with pytest.raises(StoreError, match="pipe: is no regular file"):
        read_expected(pipe)
