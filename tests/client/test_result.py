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
