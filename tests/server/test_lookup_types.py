"""Tests of served models: ModelInfo computes values from its manifest once, and caches them."""

import pytest
from server.fake_models import model_info, ruled_info, unpooled_info

from embedserve.model_info import ModelInfo

MODELS = [model_info(), ruled_info(), unpooled_info()]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize(
    "name", ["version", "tables", "features", "keys", "length_per_key", "is_pooled"]
)
def test_model_info_caches_values_of_its_manifest(model: ModelInfo, name: str) -> None:
    assert getattr(model, name) == getattr(model.manifest, name)
    assert name in vars(model)


def test_keys_map_to_their_features() -> None:
    assert unpooled_info().keys == ("item@t_item", "last", "tag", "item@t_again")
    assert unpooled_info().feature_per_key.tolist() == [0, 1, 2, 0]
    assert not unpooled_info().keys_are_features
    assert model_info().keys_are_features


def test_models_are_compared_by_identity() -> None:
    one, other = model_info(), model_info()
    assert one != other
    assert len({one, other, one}) == 2
