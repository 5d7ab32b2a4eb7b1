"""Tests of the traffic split: which version handles a request, by name, number, alias and share."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from server.fake_engine import Bags, FakeEngine, make_request, model_info
from server.live import make_pipeline
from server.pending_requests import submit_to

from embedserve.config import Limits
from embedserve.errors import OverloadedError, UnknownModelError
from embedserve.models.model_registry import ModelRegistry

USER: Bags = {"user": [[1]]}


def engine_of(name: str, number: int) -> FakeEngine:
    info = model_info()
    manifest = replace(info.manifest, version=number)
    return FakeEngine(replace(info, manifest=manifest, served_name=name), seed=number)


@pytest.fixture
def models(executor: ThreadPoolExecutor) -> ModelRegistry:
    named = {"shop@stable": 7, "shop@canary": 8, "shop@old": 6}
    engines = [engine_of(name, number) for name, number in named.items()]
    return make_pipeline(*engines, executor=executor, default_model="shop").models


async def serving_version(models: ModelRegistry, name: str = "", routing_key: bytes = b"") -> int:
    request = make_request(USER, model=name)
    result = await submit_to(models, request, routing_key=routing_key)
    return result.model.version


def shares_by_tag(models: ModelRegistry) -> dict[str, float]:
    return {model.tag: models.status(model)["share"] for model in models.models()}


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("", 7),
        ("shop", 7),
        ("shop@stable", 7),
        ("shop@canary", 8),
        ("shop@8", 8),
        ("shop@6", 6),
        ("@canary", 8),
        ("@6", 6),
    ],
)
async def test_version_is_named_by_number_or_alias(
    models: ModelRegistry, name: str, version: int
) -> None:
    assert await serving_version(models, name) == version
    assert models.model(name).version == version


@pytest.mark.parametrize("name", ["shop@9", "shop@none", "@9", "shop@7@8", "films@7", "shop@"])
async def test_unserved_version_error_lists_the_served_versions(
    models: ModelRegistry, name: str
) -> None:
    with pytest.raises(UnknownModelError) as caught:
        await serving_version(models, name)
    error = caught.value
    if name.startswith("films") or name == "shop@":
        assert error.field == "model"
        assert "this server has shop@stable, shop@canary, shop@old" in error.message
    else:
        assert error.field == "version"
        assert error.message.endswith(": the versions of shop are 7 (stable), 8 (canary), 6 (old)")


async def test_share_applies_to_requests_without_a_version(models: ModelRegistry) -> None:
    models.set_share("shop@canary", 20.0)
    models.set_share("shop@old", 30.0)
    models.set_share("shop@stable", 40.0)  # it gets all requests that the others do not
    counts = Counter([await serving_version(models, "shop") for _ in range(1000)])
    assert 120 < counts[8] < 280
    assert 210 < counts[6] < 390
    assert counts.total() == 1000
    assert {await serving_version(models, "shop@stable") for _ in range(50)} == {7}
    assert shares_by_tag(models) == {"stable": 50.0, "canary": 20.0, "old": 30.0}
    models.set_share("shop@canary", 0.0)
    models.set_share("shop@old", 0.0)
    assert {await serving_version(models) for _ in range(200)} == {7}
    assert shares_by_tag(models) == {"stable": 100.0, "canary": 0.0, "old": 0.0}


async def test_routing_key_is_always_served_by_the_same_version(models: ModelRegistry) -> None:
    models.set_share("shop@canary", 20.0)
    keys = [f"user-{i}".encode() for i in range(1000)]
    first = [await serving_version(models, "", key) for key in keys]
    assert 120 < Counter(first)[8] < 280
    assert [await serving_version(models, "shop", key) for key in keys] == first
    models.set_share("shop@canary", 40.0)  # keys that it handled before stay with it
    later = [await serving_version(models, "", key) for key in keys]
    assert all(after == 8 for before, after in zip(first, later, strict=True) if before == 8)
    assert Counter(later)[8] > Counter(first)[8]


async def test_shares_over_100_percent_leave_nothing_for_the_default(models: ModelRegistry) -> None:
    models.set_share("shop@canary", 80.0)
    models.set_share("shop@old", 80.0)
    assert 7 not in {await serving_version(models) for _ in range(300)}
    assert shares_by_tag(models) == {"stable": 0.0, "canary": 80.0, "old": 20.0}


async def test_request_is_admitted_if_one_version_has_room(
    executor: ThreadPoolExecutor,
) -> None:
    limits = Limits(inline_bytes_max=0, queue_examples_max=2)
    stable, canary = engine_of("shop@stable", 7), engine_of("shop@canary", 8)
    models = make_pipeline(
        stable, canary, executor=executor, limits=limits, default_model="shop"
    ).models
    waiting = []
    for engine, name in ((stable, "shop@stable"), (canary, "shop@canary")):
        engine.hold()
        models.check_unsized_queue("shop")
        waiting += [submit_to(models, make_request(USER, model=name)) for _ in range(2)]
        with pytest.raises(OverloadedError):
            submit_to(models, make_request(USER, model=name))
        with pytest.raises(OverloadedError):
            models.check_unsized_queue(name)
    with pytest.raises(OverloadedError):
        models.check_unsized_queue("shop")
    for engine in (stable, canary):
        engine.release()
    for one in waiting:
        await one
