"""Tests of served models: ModelInfo computes values from its manifest once, and caches them."""

from __future__ import annotations

import pytest
from server.fake_models import model_info, ruled_info, unpooled_info

from embedserve.model_info import ModelInfo

MODELS = [model_info(), ruled_info(), unpooled_info()]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize(
    "name", ["version", "tables", "features", "keys", "length_per_key", "is_pooled"]
)
def test_what_requests_ask_is_the_manifests_and_kept(model: ModelInfo, name: str) -> None:
    assert getattr(model, name) == getattr(model.manifest, name)
    assert name in vars(model)


def test_a_key_stands_where_its_feature_does() -> None:
    assert unpooled_info().keys == ("item@t_item", "last", "tag", "item@t_again")
    assert unpooled_info().feature_per_key.tolist() == [0, 1, 2, 0]
    assert not unpooled_info().keys_are_features
    assert model_info().keys_are_features


def test_models_are_compared_by_identity() -> None:
    one, other = model_info(), model_info()
    assert one != other
    assert len({one, other, one}) == 2
