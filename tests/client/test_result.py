"""Views per key, and the way to TorchRec."""

import numpy as np
import pytest

from embedserve_client.result import EmbedResult, Layout

VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def result() -> EmbedResult:
    values = VALUES.copy()
    values.flags.writeable = False
    return EmbedResult(values, Layout(("movie", "user"), (2, 1)), "shop", 7)


def test_a_key_is_a_view_of_its_columns(result: EmbedResult) -> None:
    assert result["movie"].tolist() == [[0, 1], [3, 4]]
    assert result["user"].tolist() == [[2], [5]]
    assert np.shares_memory(result["user"], result.values)


def test_an_unknown_key_names_those_there_are(result: EmbedResult) -> None:
    with pytest.raises(KeyError, match="'film' is no key of shop; it has movie, user"):
        result["film"]


def test_to_dict_has_every_key_in_order(result: EmbedResult) -> None:
    vectors = result.to_dict()

    assert list(vectors) == ["movie", "user"]
    assert vectors["movie"].tolist() == [[0, 1], [3, 4]]


@pytest.fixture
def jagged() -> EmbedResult:
    """Three ids of movie in the second example, one of user in the first."""
    values = np.arange(8, dtype=np.float32).reshape(4, 2)
    lengths = np.array([[0, 3], [1, 0]], np.int32)
    return EmbedResult(values, Layout(("movie", "user"), (2, 2)), "sequence", 7, {}, lengths)


def test_a_key_that_is_not_pooled_is_a_view_of_its_rows(jagged: EmbedResult) -> None:
    assert jagged["movie"].values.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert jagged["movie"].lengths.tolist() == [0, 3]
    assert jagged["user"].values.tolist() == [[6, 7]]
    assert jagged["user"].lengths.tolist() == [1, 0]
    assert np.shares_memory(jagged["user"].values, jagged.values)
    assert (jagged.batch_size, jagged.is_pooled) == (2, False)


def test_tensors_of_the_other_kind_are_refused(result: EmbedResult, jagged: EmbedResult) -> None:
    with pytest.raises(TypeError, match="model 'sequence' is not pooled: call to_jagged_tensors"):
        jagged.to_keyed_tensor()
    with pytest.raises(TypeError, match="model 'shop' is pooled: call to_keyed_tensor"):
        result.to_jagged_tensors()
