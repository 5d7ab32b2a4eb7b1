"""Tests of results: views per key, and conversion to TorchRec."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from embedserve_client.core.result import EmbedResult, Layout

VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def result() -> EmbedResult:
    values = VALUES.copy()
    values.flags.writeable = False
    return EmbedResult(values, Layout(("movie", "user"), (2, 1)), "shop", 7)


def test_pooled_key_is_a_view_of_its_columns(result: EmbedResult) -> None:
    assert result["movie"].tolist() == [[0, 1], [3, 4]]
    assert result["user"].tolist() == [[2], [5]]
    assert np.shares_memory(result["user"], result.values)


def test_unknown_key_error_lists_the_existing_keys(result: EmbedResult) -> None:
    with pytest.raises(KeyError, match="'film' is no key of shop; it has movie, user"):
        result["film"]


def test_str_shows_shapes_and_first_values(result: EmbedResult, jagged: EmbedResult) -> None:
    assert str(result) == (
        "shop version 7: 2 examples, float32\n  movie  2 x 2  [0, 1] …\n  user   2 x 1  [2] …"
    )
    assert str(jagged) == (
        "sequence version 7: 2 examples, float32\n  movie  3 x 2  [0, 1] …\n  user   1 x 2  [6, 7]"
    )


def test_str_shows_unknown_ids_and_truncates_long_rows() -> None:
    layout = Layout(("user", "movie"), (6, 2))
    values = (np.arange(8)[None, :] / 3).astype(np.float16)
    one = EmbedResult(values, layout, "shop", 7, {"user": 2, "movie": 1})

    assert str(one) == (
        "shop version 7: 1 example, float16\n"
        "  user   1 x 6  [0, 0.3333, 0.6665, 1, …]\n"
        "  movie  1 x 2  [2, 2.334]\n"
        "  ids without a row: 2 of user, 1 of movie"
    )
    assert str(EmbedResult(np.zeros((0, 8), np.float32), layout, "shop", 7)) == (
        "shop version 7: 0 examples, float32\n  user   0 x 6\n  movie  0 x 2"
    )


def test_str_shows_missing_ids() -> None:
    one = EmbedResult(VALUES, Layout(("movie",), (3,)), "shop", 7, {"movie": 1})
    lacking = replace(one, missing_ids={"user": 2, "movie": 1})

    unknown = "  ids without a row: 1 of movie"
    assert str(one).endswith(unknown)
    assert str(lacking).endswith(
        f"{unknown}\n  ids that could not be looked up: 2 of user, 1 of movie"
    )


def test_str_shows_the_seq() -> None:
    one = EmbedResult(VALUES, Layout(("movie",), (3,)), "shop", 7, seq=0)

    assert str(one).startswith("shop version 7 seq 0: 2 examples, float32\n")


def test_to_dict_has_every_key_in_order(result: EmbedResult) -> None:
    vectors = result.to_dict()

    assert list(vectors) == ["movie", "user"]
    assert vectors["movie"].tolist() == [[0, 1], [3, 4]]


@pytest.fixture
def jagged() -> EmbedResult:
    """Returns a result with three ids of movie in the second example and one of user in the
    first."""
    values = np.arange(8, dtype=np.float32).reshape(4, 2)
    lengths = np.array([[0, 3], [1, 0]], np.int32)
    return EmbedResult(values, Layout(("movie", "user"), (2, 2)), "sequence", 7, {}, lengths)


def test_unpooled_key_is_a_view_of_its_rows(jagged: EmbedResult) -> None:
    assert jagged["movie"].values.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert jagged["movie"].lengths.tolist() == [0, 3]
    assert jagged["user"].values.tolist() == [[6, 7]]
    assert jagged["user"].lengths.tolist() == [1, 0]
    assert np.shares_memory(jagged["user"].values, jagged.values)
    assert (jagged.batch_size, jagged.is_pooled) == (2, False)


def test_conversion_to_the_other_tensor_kind_is_rejected(
    result: EmbedResult, jagged: EmbedResult
) -> None:
    with pytest.raises(TypeError, match="model 'sequence' is not pooled: call to_jagged_tensors"):
        jagged.to_keyed_tensor()
    with pytest.raises(TypeError, match="model 'shop' is pooled: call to_keyed_tensor"):
        result.to_jagged_tensors()


def test_all_keys_are_read_in_linear_time() -> None:
    """Checks that no key adds up the lengths of the keys before it, nor compares itself with
    them."""
    keys, compared = 200, 0

    class CountedKey(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    names = tuple(CountedKey(n) for n in range(keys))
    lengths = np.ones((keys, 3), np.int32).view(CountedLengths)
    CountedLengths.summed = 0
    values = np.arange(3 * keys, dtype=np.float32).reshape(-1, 1)
    one = EmbedResult(values, Layout(names, (1,) * keys), "sequence", 7, {}, lengths)

    assert one.to_dict()[names[-1]].values.tolist() == values[-3:].tolist()
    assert CountedLengths.summed <= lengths.size
    assert compared <= keys


class CountedLengths(np.ndarray[Any, Any]):
    """Array that counts the lengths that are added up."""

    summed = 0

    def sum(self, *args: Any, **options: Any) -> Any:
        CountedLengths.summed += self.size
        return super().sum(*args, **options)
