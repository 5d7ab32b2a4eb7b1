"""One small model of every kind of table, live and published in any dtype and plan."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator

import pytest
from lookup_cases import pooled_source
from torchrec import EmbeddingBagCollection

from embedserve_store import ModelStore, ModelVersion, publish

Publish = Callable[..., ModelVersion]


@pytest.fixture(scope="session", autouse=True)
def sources_are_read_once() -> Iterator[None]:
    """TorchScript reads the same few hundred functions of torchrec for each engine: a fifth of the
    time that restoring one takes."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(inspect, "getsourcelines", functools.cache(inspect.getsourcelines))
        yield


@pytest.fixture(scope="session")
def ebc() -> EmbeddingBagCollection:
    return pooled_source()


@pytest.fixture(scope="session")
def published(ebc: EmbeddingBagCollection, tmp_path_factory: pytest.TempPathFactory) -> Publish:
    """published(dtype=…, sharding=…, world_size=…): a version of the collection."""
    store = tmp_path_factory.mktemp("store")

    def publish_one(**options: object) -> ModelVersion:
        result = publish(ebc, store, model="model", **options)  # type: ignore[arg-type]
        return ModelStore(store).load("model", result.version)

    return publish_one
