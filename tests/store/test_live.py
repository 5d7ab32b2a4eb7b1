"""A live module is described as it is, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType

from embedserve_store import live
from embedserve_store.errors import InvalidModelError
from embedserve_store.goldens import sample_bags
from embedserve_store.manifest import Manifest, TableSpec


def test_tables_are_described_in_order(ebc: EmbeddingBagCollection) -> None:
    assert live.describe(ebc) == (
        TableSpec("user", 300, 16, ("user", "friend"), "sum", "float32"),
        TableSpec("item", 77, 8, ("item",), "mean", "float32"),
        TableSpec("tag", 16, 4, ("tag", "item"), "sum", "float32"),
    )


def test_the_manifests_keys_are_the_modules(ebc: EmbeddingBagCollection) -> None:
    manifest = Manifest("m", 1, live.describe(ebc), is_weighted=False)
    assert list(manifest.keys) == ["user", "friend", "item@item", "tag", "item@tag"]
    assert list(manifest.keys) == ebc._embedding_names


def test_answers_are_the_modules(ebc: EmbeddingBagCollection) -> None:
    manifest = Manifest("m", 1, live.describe(ebc), is_weighted=False)
    answers = live.answers(ebc, manifest, sample_bags(manifest))
    rows = ebc.embedding_bags["user"].weight.detach().numpy()
    np.testing.assert_allclose(answers[0, :16], rows[0] + rows[299], rtol=1e-6)
    assert not answers[1].any()


def test_only_float32_modules_without_weighted_means_answer_themselves(
    make_ebc: Callable[..., EmbeddingBagCollection],
) -> None:
    assert live.can_answer(make_ebc())
    assert live.can_answer(make_ebc(is_weighted=True, pooling="sum"))
    assert not live.can_answer(make_ebc(is_weighted=True))
    assert not live.can_answer(make_ebc(half=True))


class ShardedEmbeddingBagCollection(torch.nn.Module):
    """Named as torchrec's."""


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        ([], "EmbeddingBagCollection, found list$"),
        (torch.nn.EmbeddingBag(4, 4), "found EmbeddingBag$"),
        (ShardedEmbeddingBagCollection(), "found ShardedEmbeddingBagCollection; it is sharded"),
    ],
)
def test_other_things_are_refused(thing: Any, message: str) -> None:
    with pytest.raises(InvalidModelError, match=message):
        live.describe(thing)


def test_a_model_around_a_collection_is_refused_with_the_way_to_it(
    ebc: EmbeddingBagCollection,
) -> None:
    model = torch.nn.ModuleDict({"sparse": torch.nn.Sequential(ebc)})
    with pytest.raises(InvalidModelError, match=r"found ModuleDict; it has one at sparse\.0$"):
        live.describe(model)


@pytest.mark.parametrize(
    "setting", [{"need_pos": True}, {"num_embeddings_post_pruning": 4}, {"total_num_buckets": 2}]
)
def test_settings_that_are_not_kept_are_refused(setting: dict[str, Any]) -> None:
    config = EmbeddingBagConfig(
        name="t",
        num_embeddings=8,
        embedding_dim=4,
        feature_names=["t"],
        pooling=PoolingType.SUM,
        **setting,
    )
    with pytest.raises(InvalidModelError, match=f"table 't': {next(iter(setting))} is "):
        live.describe(EmbeddingBagCollection(tables=[config]))
