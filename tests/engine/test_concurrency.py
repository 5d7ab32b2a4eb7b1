"""Tests of concurrent lookups: each thread gets the same results as alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from engine.conftest import Publish
from reference import sample, to_kjt
from torchrec import EmbeddingCollection, EmbeddingConfig
from unpooled import write_version

from embedserve.engine.restore import restore
from embedserve_store import ModelVersion

THREADS = 4
LOOKUPS = 200


@pytest.fixture(scope="module")
def unpooled(tmp_path_factory: pytest.TempPathFactory) -> ModelVersion:
    torch.manual_seed(4)
    tables = [("movie", 1001, ["history", "candidate"]), ("genre", 3, ["genres"])]
    collection = EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name=name, num_embeddings=rows, embedding_dim=32, feature_names=features
            )
            for name, rows, features in tables
        ]
    )
    return write_version(
        tmp_path_factory.mktemp("store"), collection, sharding="row_wise", world_size=2
    )


def check_concurrent_lookups(version: ModelVersion, *, is_eager: bool) -> None:
    engine = restore(version, is_eager=is_eager)
    features = version.manifest.features
    requests: list[Any] = [to_kjt(sample(version, size), features) for size in (1, 7, 100, 1000)]
    expected = [engine.lookup(*request) for request in requests]

    def look_up(number: int) -> bool:
        which = number % len(requests)
        return np.array_equal(engine.lookup(*requests[which]), expected[which])

    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(look_up, range(LOOKUPS)))


@pytest.mark.parametrize("is_eager", [False, True])
def test_concurrent_pooled_lookups_equal_sequential_lookups(
    published: Publish, *, is_eager: bool
) -> None:
    check_concurrent_lookups(published(sharding="row_wise", world_size=2), is_eager=is_eager)


@pytest.mark.parametrize("is_eager", [False, True])
def test_concurrent_unpooled_lookups_equal_sequential_lookups(
    unpooled: ModelVersion, *, is_eager: bool
) -> None:
    check_concurrent_lookups(unpooled, is_eager=is_eager)
