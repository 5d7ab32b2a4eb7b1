"""Tests of batches: several features, their weights, and TorchRec's KeyedJaggedTensor."""

from typing import Any

import numpy as np
import pytest
import torch

from embedserve_client.core.batch import batch_of
from embedserve_client.errors import InvalidRequest


def test_features_are_concatenated_in_feature_major_order() -> None:
    batch = batch_of(
        {
            "product": [[101, 202], [], [303]],
            "user": np.array([404, 505, 606]),
            "shop": (np.array([1, 2]), np.array([0, 2, 0])),
        }
    )

    assert batch.keys == ("product", "user", "shop")
    assert batch.batch_size == 3
    assert batch.ids.tolist() == [101, 202, 303, 404, 505, 606, 1, 2]
    assert batch.lengths.tolist() == [2, 0, 1, 1, 1, 1, 0, 2, 0]
    assert batch.weights is None


def test_string_ids_are_separate_lengths_cover_all_features_and_weights_default_to_one() -> None:
    batch = batch_of(
        {"title": [["a"], ["b", "c"]], "user": [[1], []], "tag": [[], ["d"]], "shop": [[], []]},
        {"user": [[0.5], []], "tag": [[], [2.0]]},
    )

    assert batch.keys == ("title", "user", "tag", "shop")
    assert (batch.string_keys, list(batch.string_ids)) == (("title", "tag"), ["a", "b", "c", "d"])
    assert (batch.ids.dtype, batch.ids.tolist()) == (np.dtype(np.int64), [1])
    assert batch.lengths.tolist() == [1, 2, 1, 0, 0, 1, 0, 0]
    assert batch.weights is not None
    assert batch.weights.tolist() == [1, 1, 1, 0.5, 2]


def test_request_of_strings_alone_has_no_integer_ids() -> None:
    batch = batch_of({"title": ["a"]})

    assert (batch.ids.dtype, batch.ids.size) == (np.dtype(np.int64), 0)
    assert batch.string_keys == ("title",)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({}, "features: the request names none"),
        ({"": [1]}, "features: '' is no feature name"),
        ({3: [1]}, "features: 3 is no feature name"),
        ({"user": np.zeros((0, 2), int)}, "features.user: it has no example"),
        ([[1]], r"features: \[\[1\]\] is no mapping, no table and no KeyedJaggedTensor"),
        (
            {"movie": [[1], [2]], "user": [[1]]},
            "features.user: 1 examples, but features.movie has 2",
        ),
    ],
)
def test_invalid_features_are_named_in_the_error(features: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{message}$"):
        batch_of(features)


@pytest.mark.parametrize("weights", [[[2.0]], np.ones(1)], ids=["list", "array"])
def test_weights_without_features_are_rejected(weights: Any) -> None:
    message = r"^weights: .* is no mapping from features to weights$"
    with pytest.raises(InvalidRequest, match=message):
        batch_of({"user": [[1]]}, weights)


@pytest.mark.parametrize(
    ("ids", "weights"),
    [
        ([[1, 2], [3]], [[0.5, 1.5], [2.5]]),
        ([[1, 2], [3]], np.array([0.5, 1.5, 2.5])),
        ([[1, 2], [3]], (np.array([0.5, 1.5, 2.5]), np.array([2, 1]))),
        ((np.array([1, 2, 3]), np.array([2, 1])), np.array([0.5, 1.5, 2.5])),
        ((np.array([1, 2, 3]), np.array([2, 1])), [[0.5, 1.5], [2.5]]),
        (np.array([1, 2, 3]), [[0.5], [1.5], [2.5]]),
        (np.array([[1, 2, 3]]), np.array([[0.5, 1.5, 2.5]])),
        ([1, 2, 3], [0.5, 1.5, 2.5]),
    ],
)
def test_weights_of_the_shape_of_the_ids_are_accepted(ids: Any, weights: Any) -> None:
    batch = batch_of({"movie": ids}, {"movie": weights})

    assert batch.weights is not None
    assert batch.weights.tolist() == [0.5, 1.5, 2.5]


def test_batch_without_weights_has_none() -> None:
    assert batch_of({"user": [1]}, {}).weights is None


@pytest.mark.parametrize(
    ("ids", "weights", "message"),
    [
        ([[1, 2], [3]], [[0.5], [1.5]], r"weights.movie\[0\]: 1 weight for 2 ids"),
        (
            np.array([[1, 2]]),
            np.array([[1.0], [2.0]]),
            "weights.movie: 2 examples with 2 weights, but the feature has 1 with 2 ids",
        ),
        (
            np.array([1, 2]),
            np.array([1.0, 2.0, 3.0]),
            "weights.movie: 3 examples with 3 weights, but the feature has 2 with 2 ids",
        ),
    ],
)
def test_weights_of_another_shape_are_rejected(ids: Any, weights: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{message}$"):
        batch_of({"movie": ids}, {"movie": weights})


@pytest.mark.parametrize("field", ["features.movie", "weights.movie"])
def test_masked_values_are_rejected(field: str) -> None:
    masked = np.ma.masked_array([1, 2, 3], mask=[False, True, False])
    for values in (masked, masked.reshape(1, 3), (masked, np.array([2, 1]))):
        given: Any = {"movie": values}
        request = (given,) if field == "features.movie" else ({"movie": [[1, 2], [3]]}, given)
        with pytest.raises(InvalidRequest, match=f"^{field}: the array has masked values$"):
            batch_of(*request)
    whole = np.ma.masked_array([1, 2, 3], mask=False)
    assert batch_of({"movie": whole}, {"movie": whole}).ids.tolist() == [1, 2, 3]


def test_weights_of_a_feature_missing_from_the_request_are_rejected() -> None:
    with pytest.raises(InvalidRequest, match=r"^weights\.film: the request has no feature 'film'$"):
        batch_of({"movie": [1]}, {"film": [1.0]})


class FakeJagged:
    """The methods of a KeyedJaggedTensor that the client calls; test_torchrec.py tests the real
    class."""

    def __init__(self, keys: list[str], lengths: Any, ids: Any, weights: Any = None) -> None:
        self._keys = keys
        self._lengths, self._ids = torch.tensor(lengths), torch.tensor(ids)
        self._weights = None if weights is None else torch.tensor(weights)

    def keys(self) -> list[str]:
        return self._keys

    def lengths(self) -> torch.Tensor:
        return self._lengths

    def values(self) -> torch.Tensor:
        return self._ids

    def weights_or_none(self) -> torch.Tensor | None:
        return self._weights


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (FakeJagged([], [], []), "features: the request names none"),
        (FakeJagged(["a"], [], []), "features: it has no example"),
        (FakeJagged(["a", "a"], [1, 1], [1, 2]), "features.a: named twice"),
        (FakeJagged(["a", "b"], [1], [1]), "features: 1 lengths do not divide by 2 keys"),
        (FakeJagged(["a"], [1], [1, 2]), "features: the lengths sum up to 1, but there are 2"),
        (FakeJagged(["a"], [1], [1.0]), r"features.a\[0\]: 1.0 is float32, not an integer id"),
        (FakeJagged(["a", "b"], [1, 0, 2, -1], [1, 2]), r"features.b\[1\]: -1 is no length"),
        (
            FakeJagged(["a", "b"], [1, 0, 1, 1], [1, 2, 3], [0.5, 1.0, float("nan")]),
            r"weights.b\[1\]: nan is not a finite float32",
        ),
        (FakeJagged(["a"], [1], [1], [1.0, 2.0]), "weights: 2 examples with 2 weights"),
    ],
)
def test_invalid_jagged_tensor_is_rejected(tensor: FakeJagged, message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{message}") as caught:
        batch_of(tensor)
    assert caught.value.field == caught.value.message.partition(":")[0]


def test_separate_weights_with_a_jagged_tensor_are_rejected() -> None:
    with pytest.raises(InvalidRequest, match="carries its own"):
        batch_of(FakeJagged(["a"], [1], [1]), {"a": [1.0]})


class CountedName(str):
    """A feature name that counts its comparisons."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedName.compared += 1
        return super().__eq__(other)


class FakeTable(dict[str, Any]):
    """A table that returns its own name objects as ``columns``. Libraries return copies of another
    type."""

    @property
    def columns(self) -> list[str]:
        return list(self)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        raise NotImplementedError


NAMES: list[str] = [CountedName(f"f{number}") for number in range(300)]


@pytest.mark.parametrize(
    "features",
    [
        {name: [1] for name in NAMES},
        FakeJagged(NAMES, [1] * len(NAMES), [1] * len(NAMES)),
        FakeTable({name: [1] for name in NAMES}),
    ],
    ids=lambda features: type(features).__name__,
)
def test_feature_names_are_not_compared_pairwise(features: Any) -> None:
    CountedName.compared = 0

    assert batch_of(features).keys == tuple(map(str, NAMES))

    assert CountedName.compared < 10 * len(NAMES)
