"""Tests of concurrent lookups: each thread gets the same results as alone."""

from __future__ import annotations

import pytest
from engine.conftest import Publish
from reference import check_concurrent_lookups, sample, to_kjt
from unpooled import unpooled_collection, write_version

from embedserve.engine.restore import restore
from embedserve_store import ModelVersion


@pytest.fixture(scope="module")
def unpooled(tmp_path_factory: pytest.TempPathFactory) -> ModelVersion:
    tables = [("movie", 1001, ["history", "candidate"]), ("genre", 3, ["genres"])]
    source = unpooled_collection(tables)
    store = tmp_path_factory.mktemp("store")
    return write_version(store, source, sharding="row_wise", world_size=2)


@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize("is_pooled", [False, True])
def test_concurrent_lookups_equal_sequential_lookups(
    published: Publish, unpooled: ModelVersion, *, is_pooled: bool, is_eager: bool
) -> None:
    version = published(sharding="row_wise", world_size=2) if is_pooled else unpooled
    engine = restore(version, is_eager=is_eager)
    features = version.manifest.features
    requests = [to_kjt(sample(version, size), features) for size in (1, 7, 100, 1000)]
    check_concurrent_lookups(engine.lookup, requests, 200)
