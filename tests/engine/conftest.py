"""Fixtures of the engine's tests: a small model of every kind of table, in any dtype and plan."""

from collections.abc import Callable, Iterator

import pytest
from compiled_once import CompiledOnce
from lookup_cases import pooled_source
from torchrec import EmbeddingBagCollection
from torchscript import cache_definitions, shared_compilation_unit

from embedserve_store import ModelStore, ModelVersion, publish

Publish = Callable[..., ModelVersion]
SHARDING = {
    "movie": "column_wise",
    "genre": "column_wise",
    "user": "row_wise",
    "recent": "data_parallel",
}
"""A kind of sharding for each table of ``ebc``."""


@pytest.fixture(scope="session", autouse=True)
def definitions_are_cached() -> None:
    cache_definitions()


@pytest.fixture(scope="module", autouse=True)
def compilation_unit() -> Iterator[None]:
    """Makes the engines of a module share what is compiled of torchrec.

    test_next_version.py, whose tests are about compilation, overrides this.
    """
    with shared_compilation_unit():
        yield


@pytest.fixture(scope="session")
def ebc() -> EmbeddingBagCollection:
    return pooled_source()


@pytest.fixture(scope="session")
def published(ebc: EmbeddingBagCollection, tmp_path_factory: pytest.TempPathFactory) -> Publish:
    """Returns a function: ``published(dtype=…, sharding=…, world_size=…)`` is a version."""
    store = tmp_path_factory.mktemp("store")

    def publish_one(**options: object) -> ModelVersion:
        result = publish(ebc, store, model="model", **options)  # type: ignore[arg-type]
        return ModelStore(store).load("model", result.version)

    return publish_one


@pytest.fixture(scope="module")
def compiled_once() -> CompiledOnce:
    """Returns engines that share compiled programs within a module.

    Few layouts occur in several modules.
    """
    return CompiledOnce()
