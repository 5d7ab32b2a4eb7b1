"""Tests of ids in columns and tables of pandas, polars and pyarrow, and in torch's tensors."""

from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch

from embedserve_client.core.bags import ids_of, split, strings_of
from embedserve_client.core.batch import batch_of
from embedserve_client.errors import InvalidRequest

LISTS = [[1, 2], [], None, [3]]
"""Bags of a list column; None stands for a null."""


def ids(value: Any) -> tuple[list[int], list[int]]:
    bags = split("f", value)
    return ids_of("f", bags).tolist(), bags.lengths.tolist()


@pytest.mark.parametrize(
    "column",
    [
        pa.array(LISTS),
        pa.array(LISTS, pa.large_list(pa.int32())),
        pa.chunked_array([LISTS[:2], LISTS[2:]], pa.list_(pa.int64())),
        pl.Series(LISTS),
        pl.Series(LISTS, dtype=pl.List(pl.UInt32)),
        pd.Series(LISTS),
        pd.Series([np.array([1, 2]), np.array([], int), None, np.array([3])]),
        pd.Series(LISTS, dtype=pd.ArrowDtype(pa.list_(pa.int64()))),
        pd.Series(LISTS, index=[9, 9, 7, 5]),
    ],
    ids=lambda column: f"{type(column).__module__.partition('.')[0]} {type(column).__name__}",
)
def test_list_column_is_a_bag_per_example(column: Any) -> None:
    assert ids(column) == ([1, 2, 3], [2, 0, 0, 1])


@pytest.mark.parametrize(
    "column",
    [
        pa.array([5, None, 7]),
        pl.Series([5, None, 7]),
        pd.Series([5, None, 7], dtype="Int64"),
        pa.array([5, None, 7]).dictionary_encode(),
    ],
    ids=lambda column: type(column).__module__,
)
def test_id_column_is_one_id_per_example_and_null_an_empty_bag(column: Any) -> None:
    assert ids(column) == ([5, 7], [1, 0, 1])


def test_fixed_size_list_column_is_read() -> None:
    assert ids(pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2))) == (
        [1, 2, 3, 4],
        [2, 0, 2],
    )
    assert ids(pl.Series([[1, 2], [3, 4]], dtype=pl.Array(pl.Int64, 2))) == ([1, 2, 3, 4], [2, 2])


def test_empty_column_has_no_examples() -> None:
    assert ids(pa.array([], pa.list_(pa.int64()))) == ([], [])
    assert ids(pa.chunked_array([], pa.int64())) == ([], [])


@pytest.mark.parametrize(
    "column",
    [
        pa.array([["a", "b"], [], ["c"]]),
        pl.Series([["a", "b"], [], ["c"]]),
        pd.Series([["a", "b"], [], ["c"]]),
        pa.array([["a", "b"], [], ["c"]], pa.list_(pa.dictionary(pa.int8(), pa.string()))),
    ],
    ids=lambda column: type(column).__module__,
)
def test_string_list_columns_are_read_as_strings(column: Any) -> None:
    bags = split("f", column)
    assert strings_of("f", bags) == ["a", "b", "c"]
    assert bags.lengths.tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([[1], [None]]), "f: a bag holds a null"),
        (pa.array([[1.5]]), r"f\[0\]: 1.5 is float64, not an integer id"),
        (pd.Series([1.0, None]), r"f\[0\]: 1.0 is float64, not an integer id"),
        (pa.array([[True]]), r"f\[0\]: True is bool, not an integer id"),
        (pd.Series([[1], "a"]), "f: "),
        (pa.array([[2**63]], pa.list_(pa.uint64())), r"f\[0\]: 9223372036854775808 does not fit"),
        (pd.Series([[2**64]]), "f: "),
    ],
    ids=str,
)
def test_invalid_ids_in_columns_are_named_in_the_error(column: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ids(column)


@pytest.mark.parametrize(
    "table",
    [
        pa.table({"user": [7, 8], "movie": [[1, 2], None]}),
        pa.record_batch({"user": [7, 8], "movie": [[1, 2], None]}),
        pl.DataFrame({"user": [7, 8], "movie": [[1, 2], None]}),
        pd.DataFrame({"user": [7, 8], "movie": [[1, 2], None]}, index=["a", "b"]),
    ],
    ids=lambda table: type(table).__module__,
)
def test_table_columns_are_the_features(table: Any) -> None:
    batch = batch_of(table)
    assert (batch.keys, batch.batch_size) == (("user", "movie"), 2)
    assert batch.ids.tolist() == [7, 8, 1, 2]
    assert batch.lengths.tolist() == [1, 1, 2, 0]


@pytest.mark.parametrize("column", [pa.array([[1]]), pl.Series([[1]]), pd.Series([[1]])])
def test_single_column_is_rejected_as_a_table(column: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"features: [A-Za-z]+ is one column"):
        batch_of(column)


def test_duplicate_column_names_are_rejected() -> None:
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["user", "user"])
    with pytest.raises(InvalidRequest, match=r"features\.user: named twice"):
        batch_of(twice)


@pytest.mark.parametrize(
    "column",
    [
        pl.Series(["a", None]),
        pl.Series(["a", None], dtype=pl.Categorical),
        pa.array(["a", None]).dictionary_encode(),
        pd.Series(["a", None], dtype="string"),
    ],
    ids=lambda column: str(getattr(column, "dtype", "arrow")),
)
def test_string_column_is_one_id_per_example_and_null_an_empty_bag(column: Any) -> None:
    bags = split("f", column)
    assert strings_of("f", bags) == ["a"]
    assert bags.lengths.tolist() == [1, 0]


def test_sliced_column_is_read() -> None:
    assert ids(pa.array([[1, 2], [3], None, [4]]).slice(1)) == ([3, 4], [1, 0, 1])


def test_tensors_are_accepted_like_arrays() -> None:
    assert ids(torch.tensor([[1, 2], [3, 4]])) == ([1, 2, 3, 4], [2, 2])
    assert ids((torch.tensor([1, 2, 3]), torch.tensor([2, 0, 1]))) == ([1, 2, 3], [2, 0, 1])
    assert ids((torch.tensor([1]), np.array([1]))) == ([1], [1])
    assert ids([torch.tensor([1, 2]), torch.tensor([3])]) == ([1, 2, 3], [2, 1])
    with pytest.raises(InvalidRequest, match=r"f\[0\]: 0\.5 is float32, not an integer id"):
        ids(torch.tensor([0.5]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2])
def test_weight_dtypes_missing_in_numpy_become_float32(dtype: torch.dtype) -> None:
    given = torch.tensor([0.5, 1.0, 2.0]).to(dtype)
    for weights in (given, (given, torch.tensor([2, 1])), [given[:2], given[2:]]):
        batch = batch_of({"f": [[1, 2], [3]]}, {"f": weights})
        assert batch.weights is not None
        assert batch.weights.tolist() == [0.5, 1.0, 2.0]


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.tensor([1.0]).to_sparse(), "can't convert Sparse"),
        (torch.tensor([1]).to_sparse(), "can't convert Sparse"),
        (torch.tensor([1.0], device="meta"), "Cannot copy out of meta tensor"),
        (torch.tensor([1j]).conj(), r"Can't call numpy\(\) on Tensor"),
    ],
)
def test_tensor_that_numpy_cannot_hold_is_rejected(tensor: Any, message: str) -> None:
    for field, features, weights in (
        ("features.f", {"f": tensor}, None),
        ("features.f", {"f": (tensor, np.array([1]))}, None),
        (r"features.f\[0\]", {"f": [tensor]}, None),
        ("weights.f", {"f": [[1]]}, {"f": tensor}),
    ):
        with pytest.raises(InvalidRequest, match=f"^{field}: {message}"):
            batch_of(features, weights)


def test_weights_may_be_columns_or_tensors() -> None:
    batch = batch_of({"f": pa.array([[1, 2], [3]])}, {"f": pa.array([[0.5, 1.0], [2.0]])})
    assert batch.weights is not None
    assert batch.weights.tolist() == [0.5, 1.0, 2.0]
    flat = batch_of({"f": [[1, 2], [3]]}, {"f": torch.tensor([0.5, 1.0, 2.0])})
    assert flat.weights is not None
    assert flat.weights.tolist() == [0.5, 1.0, 2.0]
