"""Tests of the values of one feature: every accepted type, and the error messages of invalid
values."""

from typing import Any

import numpy as np
import pytest

from embedserve_client.core.bags import ids_of, split, strings_of, weights_of
from embedserve_client.errors import InvalidRequest

FIELD = "features.movie"
INT64_MAX = 2**63 - 1


def ids(value: Any) -> tuple[list[int], list[int]]:
    bags = split(FIELD, value)
    flat = ids_of(FIELD, bags)
    assert (flat.dtype, bags.lengths.dtype) == (np.dtype(np.int64), np.dtype(np.int32))
    return flat.tolist(), bags.lengths.tolist()


def weights(value: Any) -> list[float]:
    flat = weights_of("weights.movie", split("weights.movie", value))
    assert flat.dtype == np.float32
    return [float(one) for one in flat]


@pytest.mark.parametrize(
    ("value", "flat", "lengths"),
    [
        ([[1, 2], [], [3]], [1, 2, 3], [2, 0, 1]),
        (((1, 2), (3,)), [1, 2, 3], [2, 1]),
        ([[]], [], [0]),
        ([7, 8], [7, 8], [2]),
        ([], [], [0]),
        (range(3), [0, 1, 2], [3]),
        ([np.array([1, 2]), np.array([])], [1, 2], [2, 0]),
        ([np.int32(4), 5], [4, 5], [2]),
        (np.array([7, 8]), [7, 8], [1, 1]),
        (np.array([[1, 2], [3, 4]]), [1, 2, 3, 4], [2, 2]),
        (np.zeros((2, 0)), [], [0, 0]),
        (np.array([[1, 2], [3, 4]]).view(np.matrix), [1, 2, 3, 4], [2, 2]),
        (np.array([1, 2, 3, 4]).reshape(2, 2).T, [1, 3, 2, 4], [2, 2]),
        (np.array([300], dtype=">i2"), [300], [1]),
        (np.array([200], dtype=np.uint8), [200], [1]),
        ((np.array([5, 6, 7]), np.array([1, 0, 2])), [5, 6, 7], [1, 0, 2]),
        ([INT64_MAX, -INT64_MAX - 1], [INT64_MAX, -INT64_MAX - 1], [2]),
    ],
)
def test_every_input_type_becomes_flat_ids_and_lengths(
    value: Any, flat: list[int], lengths: list[int]
) -> None:
    assert ids(value) == (flat, lengths)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[1], [2, 2.5]], "features.movie[1]: 2.5 is float, not an integer id"),
        ([1, 2.0], "features.movie[0]: 2.0 is float, not an integer id"),
        ([[1], [True]], "features.movie[1]: True is bool, not an integer id"),
        ([[], ["7"]], "features.movie[1]: '7' is str, not an integer id"),
        ([1, [2]], "features.movie[0]: [2] is list, not an integer id"),
        ([[1], 2], "features.movie[1]: 2 is not a list"),
        ([[1], "23"], "features.movie[1]: '23' is not a list"),
        (np.array([1.0, 2.0]), "features.movie[0]: 1.0 is float64, not an integer id"),
        (np.array([True]), "features.movie[0]: True is bool, not an integer id"),
        ([[1], [2**63]], f"features.movie[1]: {2**63} does not fit in int64"),
        (
            [[1], [2**20_000]],
            "features.movie[1]: an integer of 20001 bits does not fit in int64",
        ),
        (
            np.array([[1], [2**63]], dtype=np.uint64),
            f"features.movie[1]: {2**63} does not fit in int64",
        ),
        ("abc", "features.movie: 'abc' is not a list of ids"),
        (7, "features.movie: 7 is not a list of ids"),
        (None, "features.movie: None is not a list of ids"),
        (np.zeros((1, 1, 1), int), "features.movie: an array of shape [1, 1, 1] is neither"),
        (np.array(7), "features.movie: an array of shape [] is neither"),
        ((np.array([1]), [1]), "features.movie: a tuple with an array must be (ids, lengths)"),
        ((np.array([[1]]), np.array([1])), "features.movie: the pair has shapes [1, 1] and [1]"),
        ((np.array([1]), np.array([[1]])), "features.movie: the pair has shapes [1] and [1, 1]"),
        (
            (np.array([1, 2]), np.array([1])),
            "features.movie: the lengths sum up to 1, but there are 2 values",
        ),
        ((np.array([1]), np.array([2, -1])), "features.movie[1]: -1 is no length"),
        ((np.array([1]), np.array([2**31])), f"features.movie[0]: {2**31} is no length"),
        ((np.array([1]), np.array([1.0])), "features.movie: lengths are float64, not integers"),
    ],
)
def test_invalid_ids_are_named_by_field_and_value(value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ids(value)

    assert str(caught.value).startswith(message)
    assert caught.value.field == message.split(":")[0]


@pytest.mark.parametrize(
    ("value", "strings", "lengths"),
    [
        (["a", "映画"], ["a", "映画"], [2]),
        ([["a"], [], ["b", ""]], ["a", "b", ""], [1, 0, 2]),
        (np.array(["a", "b"]), ["a", "b"], [1, 1]),
        (np.array([["a", "b"]], dtype=object), ["a", "b"], [2]),
        ((np.array(["a", "b"]), np.array([0, 2])), ["a", "b"], [0, 2]),
        ([np.array(["a"]), ["b"]], ["a", "b"], [1, 1]),
    ],
)
def test_strings_are_ids_in_every_input_type(
    value: Any, strings: list[str], lengths: list[int]
) -> None:
    bags = split(FIELD, value)
    found = strings_of(FIELD, bags)

    assert found == strings
    assert {type(one) for one in found} == {str}
    assert bags.lengths.tolist() == lengths


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="of numpy 2")
def test_numpy_string_dtype_is_accepted() -> None:
    array = np.array(["a", "é"], dtype=np.dtypes.StringDType())
    assert strings_of(FIELD, split(FIELD, array)) == ["a", "é"]


@pytest.mark.parametrize("value", [[1], [[]], [], np.array([1]), np.array([1], dtype=object)])
def test_values_that_do_not_begin_with_a_string_are_not_strings(value: Any) -> None:
    assert strings_of(FIELD, split(FIELD, value)) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["a", 7], "features.movie[0]: 7 is int, not a string like the ids before it"),
        ([["a"], ["b", None]], "features.movie[1]: None is NoneType, not a string like"),
        (np.array(["a", 1], dtype=object), "features.movie[1]: 1 is int, not a string like"),
        ([["a"], ["\ud800"]], "features.movie[1]: '\\ud800' is no text: half of a surrogate"),
    ],
)
def test_invalid_strings_are_named_by_field_and_value(value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        strings_of(FIELD, split(FIELD, value))

    assert str(caught.value).startswith(message)


def test_long_value_is_truncated_in_the_error_message() -> None:
    with pytest.raises(InvalidRequest) as caught:
        ids("x" * 1000)

    assert len(str(caught.value)) < 200


def test_example_index_of_an_invalid_id_counts_empty_bags() -> None:
    with pytest.raises(InvalidRequest, match=r"features\.movie\[3\]: 0\.5"):
        ids([[], [1], [], [0.5]])


@pytest.mark.parametrize(
    ("value", "flat"),
    [
        ([[1, 0.5], [np.float32(2)]], [1.0, 0.5, 2.0]),
        (np.array([1, 2]), [1.0, 2.0]),
        (np.array([0.25], dtype=np.float16), [0.25]),
        (np.array([0.25], dtype=">f8"), [0.25]),
    ],
)
def test_weights_become_float32(value: Any, flat: list[float]) -> None:
    assert weights(value) == flat


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[1.0], ["1"]], "weights.movie[1]: '1' is str, not a number"),
        ([[True]], "weights.movie[0]: True is bool, not a number"),
        (np.array([1j]), "weights.movie[0]: 1j is complex128, not a number"),
        ([1.0, float("nan")], "weights.movie[0]: nan is not a finite float32"),
        (np.array([1.0, np.inf]), "weights.movie[1]: inf is not a finite float32"),
        ([[1.0], [1e39]], "weights.movie[1]: 1e+39 is not a finite float32"),
        ([10**400], "weights.movie: a weight does not fit in float32"),
    ],
)
def test_invalid_weights_are_named_by_field_and_value(value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        weights(value)

    assert str(caught.value).startswith(message)
