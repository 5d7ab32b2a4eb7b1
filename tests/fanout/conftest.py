"""Fixtures of the tests of routers: stores of models, and their shards."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from fanout.local_shards import LocalShards
from lookup_cases import pooled_source, unpooled_source

from embedserve_store import publish

Published = Callable[[bool, int, str], Path]


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """Returns a function: ``published(True, 3, "int8")`` is a store of the pooled model "m" over
    three hosts, published once. Tests must not change it."""

    @cache
    def publish_once(is_pooled: bool, hosts: int, dtype: str) -> Path:
        store = tmp_path_factory.mktemp("published")
        source = pooled_source() if is_pooled else unpooled_source()
        publish(source, store, model="m", dtype=dtype, hosts=hosts)
        return store

    return publish_once


@pytest.fixture
def shards(store: Path) -> LocalShards:
    """Returns the shards of the fixture ``store`` of the test."""
    return LocalShards(store)
