"""Tests of the model registry: the model of a request, its limits, full queues, and readiness."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import numpy as np
import pytest
from server.fake_engine import Bags, FakeEngine, make_request, model_info
from server.fake_models import unpooled_info
from server.gate import Gate
from server.live import make_pipeline
from server.pending_requests import submit_to
from server.waiting import until

from embedserve.batching.batcher import Batcher
from embedserve.config import Limits
from embedserve.errors import (
    DRAINING,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    RequestTooLargeError,
    UnknownModelError,
)
from embedserve.models.model_registry import QUICK_BYTES_MAX, ModelRegistry
from embedserve.pipeline import RequestPipeline
from embedserve_store.errors import StoreError

USER: Bags = {"user": [[1, 2]]}
ONE_QUEUED = Limits(inline_bytes_max=0, queue_examples_max=1)


@pytest.fixture
def films() -> FakeEngine:
    return FakeEngine(model_info("films", {"user": (7, 2)}), seed=1)


async def test_request_is_served_by_the_named_model(
    engine: FakeEngine, films: FakeEngine, executor: ThreadPoolExecutor
) -> None:
    models = make_pipeline(engine, films, executor=executor).models
    for named, answers in (("films", films), ("shop", engine), ("", engine)):
        result = await submit_to(models, make_request(USER, model=named))
        assert result.model is answers.model
        assert np.array_equal(result.values, answers.expected(USER))
    assert models.models() == [engine.model, films.model]
    assert models.model("films") is films.model
    assert models.model("") is engine.model


async def test_unknown_model_error_lists_the_served_models(
    engine: FakeEngine, films: FakeEngine, executor: ThreadPoolExecutor
) -> None:
    models = make_pipeline(engine, films, executor=executor).models
    with pytest.raises(UnknownModelError, match="model is 'shoes': this server has shop, films"):
        submit_to(models, make_request(USER, model="shoes"))
    with pytest.raises(UnknownModelError):
        models.model("shoes")


@pytest.mark.parametrize("name", ["", "@7"])
async def test_request_must_name_a_model_without_a_default(
    engine: FakeEngine, films: FakeEngine, executor: ThreadPoolExecutor, name: str
) -> None:
    models = make_pipeline(engine, films, executor=executor, default_model="").models
    with pytest.raises(UnknownModelError, match="names no model and there is no default"):
        submit_to(models, make_request(USER, model=name))


async def test_default_model_that_was_unloaded_is_named(
    engine: FakeEngine, films: FakeEngine, executor: ThreadPoolExecutor
) -> None:
    models = make_pipeline(engine, films, executor=executor, default_model="shop").models
    models.remove("shop")
    message = "names no model and the default model 'shop' is not served: this server has films"
    with pytest.raises(UnknownModelError, match=message):
        submit_to(models, make_request(USER))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            Limits(request_examples_max=2),
            "the batch has 3 examples, the limit is 2 (--request-examples-max)",
        ),
        (Limits(request_ids_max=2), "the batch has 3 ids, the limit is 2 (--request-ids-max)"),
        (
            Limits(request_output_bytes_max=72),
            "the answer to 3 examples has 108 bytes, the limit is 72 (--request-output-bytes-max)",
        ),
    ],
)
async def test_limit_error_names_both_numbers_and_the_setting(
    engine: FakeEngine, executor: ThreadPoolExecutor, limits: Limits, message: str
) -> None:
    models = make_pipeline(engine, executor=executor, limits=limits).models
    with pytest.raises(RequestTooLargeError) as caught:
        submit_to(models, make_request({"user": [[1], [2], [3]]}))
    assert caught.value.message == f"features: {message}"
    assert caught.value.field == "features"
    await submit_to(models, make_request({"user": [[1], [2]]}))


async def test_unpooled_limit_counts_a_row_for_each_id_and_table(
    executor: ThreadPoolExecutor,
) -> None:
    engine = FakeEngine(unpooled_info())
    # A row has 4 float32, and an id up to two rows, as two tables serve item.
    limits = Limits(request_output_bytes_max=3 * 2 * 16)
    models = make_pipeline(engine, executor=executor, limits=limits).models
    allowed = make_request({"item": [[1, 2, 3]]})
    assert allowed.response_bytes(engine.model) == 96
    assert (await submit_to(models, allowed)).values.nbytes == 96
    message = "^features: the answer to 4 ids has up to 128 bytes, the limit is 96 "
    with pytest.raises(RequestTooLargeError, match=message):
        submit_to(models, make_request({"item": [[1, 2, 3, 4]]}))
    with pytest.raises(InvalidRequestError, match=r"^weights: model 'sequence' answers one row"):
        submit_to(models, make_request({"item": [[1]]}, {"item": [[1.0]]}))


async def test_unknown_feature_is_rejected_before_queueing(
    engine: FakeEngine, executor: ThreadPoolExecutor
) -> None:
    pipeline = make_pipeline(engine, executor=executor)
    with pytest.raises(InvalidRequestError, match=r"features\.actor"):
        submit_to(pipeline.models, make_request({"actor": [[1]]}))
    assert pipeline.metrics.models["shop"].count_queue()[0] == 0


async def test_draining_server_serves_requests_but_is_not_ready(
    engine: FakeEngine, executor: ThreadPoolExecutor
) -> None:
    models = make_pipeline(engine, executor=executor).models
    models.check_ready()
    models.not_ready = DRAINING
    with pytest.raises(NotReadyError, match="draining"):
        models.check_ready()
    result = await submit_to(models, make_request(USER))
    assert np.array_equal(result.values, engine.expected(USER))


async def test_damaged_model_is_not_ready_but_keeps_serving(
    engine: FakeEngine, executor: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = make_pipeline(engine, executor=executor)
    models = pipeline.models
    await models.check_integrity()
    models.check_ready()
    metrics = pipeline.metrics.models["shop"]

    def damage_metric() -> object:
        metrics.flush()
        return next(v for name, _, v in metrics.samples() if name == "embedserve_model_damaged")

    assert damage_metric() == 0
    engine.damage = StoreError("tables.safetensors: changed")
    for _ in range(2):
        await models.check_integrity()
    with pytest.raises(NotReadyError, match=r"tables\.safetensors: changed"):
        models.check_ready()
    assert damage_metric() == 1
    assert caplog.text.count("not ready any more: tables.safetensors: changed") == 1
    result = await submit_to(models, make_request(USER))
    assert np.array_equal(result.values, engine.expected(USER))


async def test_failed_integrity_check_is_logged_but_not_treated_as_damage(
    engine: FakeEngine, executor: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    models = make_pipeline(engine, executor=executor).models
    engine.damage = RuntimeError("no memory")
    await models.check_integrity()
    models.check_ready()
    assert "looking whether the rows have changed" in caplog.text
    assert "RuntimeError: no memory" in caplog.text


async def test_version_retired_during_the_check_is_skipped(
    engine: FakeEngine, films: FakeEngine, executor: ThreadPoolExecutor, gate: Gate
) -> None:
    """Checks that the periodic check continues. If it ended, later damage would stay undetected."""
    models = make_pipeline(engine, films, executor=executor).models
    engine.check = gate.before(engine.check)  # type: ignore[method-assign]
    check = asyncio.create_task(models.check_integrity())
    await until(lambda: gate.threads)
    models.remove("films").retire(lambda: None)
    gate.opened.set()
    await check
    models.check_ready()


@asynccontextmanager
async def full_queue(
    models: ModelRegistry, engine: FakeEngine, bags: Bags = USER, model: str = ""
) -> AsyncIterator[None]:
    """Keeps the queue of a model of ``engine``, which has room for one example, full."""
    engine.hold()
    answers = [submit_to(models, make_request(bags, model=model))]
    await until(lambda: engine.lookups)
    answers.append(submit_to(models, make_request(bags, model=model)))
    assert not models.has_full_queue
    with pytest.raises(OverloadedError):
        submit_to(models, make_request(bags, model=model))
    yield
    engine.release()
    await asyncio.gather(*answers)
    assert not models.has_full_queue


@pytest.fixture
async def full_registry(
    engine: FakeEngine, films: FakeEngine, executor: ThreadPoolExecutor
) -> AsyncIterator[ModelRegistry]:
    """Yields two models: the default one, "shop", has a full queue; that of "films" is open."""
    models = make_pipeline(engine, films, executor=executor, limits=ONE_QUEUED).models
    async with full_queue(models, engine):
        yield models


class FakeEstimator:
    """Estimator with a fixed model name and size. Without a name, reading the body is an error."""

    def __init__(self, named: str | None = None, sizes: tuple[int, int] = (0, 0)) -> None:
        self._named = named
        self._sizes = sizes

    def peek_model(self, body: bytes) -> str:
        assert self._named is not None, "the body was looked at"
        return self._named

    def estimate_size(self, body: bytes) -> tuple[int, int]:
        return self._sizes


BODY_NOT_INSPECTED = FakeEstimator()


async def test_full_queue_rejects_requests_of_its_model_only(full_registry: ModelRegistry) -> None:
    assert full_registry.has_full_queue
    assert full_registry.has_full_unsized_queue
    for model in ("", "shop"):
        with pytest.raises(OverloadedError, match="the queue of 'shop' is full"):
            full_registry.check_queue_for_body(model, b"", FakeEstimator(""))
    full_registry.check_queue_for_body("films", b"", BODY_NOT_INSPECTED)
    full_registry.check_queue_for_body("nobody", b"", BODY_NOT_INSPECTED)


async def test_body_is_inspected_only_if_its_model_matters(full_registry: ModelRegistry) -> None:
    full_registry.check_queue_for_body("", b"", FakeEstimator("films"))
    for named in ("shop", "", "nobody"):  # an unknown model is rejected like the default one
        with pytest.raises(OverloadedError):
            full_registry.check_queue_for_body("", b"", FakeEstimator(named))
    with pytest.raises(OverloadedError):
        full_registry.check_queue_for_body("shop", b"", BODY_NOT_INSPECTED)


async def test_full_queue_of_the_only_model_rejects_every_body(
    engine: FakeEngine, films: FakeEngine, executor: ThreadPoolExecutor
) -> None:
    models = make_pipeline(engine, executor=executor, limits=ONE_QUEUED).models
    models.check_queue_for_body("", b"", BODY_NOT_INSPECTED)
    large_body = bytes(QUICK_BYTES_MAX + 1)  # its size is not estimated
    async with full_queue(models, engine):
        for model in ("", "shop", "nobody"):
            with pytest.raises(OverloadedError):
                models.check_queue_for_body(model, b"", BODY_NOT_INSPECTED)
            with pytest.raises(OverloadedError):
                models.check_queue_for_body(model, large_body, BODY_NOT_INSPECTED, is_quick=True)
            with pytest.raises(OverloadedError):
                models.check_unsized_queue(model)


async def test_full_queue_for_large_requests_admits_small_requests(
    engine: FakeEngine, executor: ThreadPoolExecutor
) -> None:
    large: Bags = {"user": [[1, 2, 3]]}
    limits = Limits(inline_bytes_max=50, queue_examples_max=1)
    models = make_pipeline(engine, executor=executor, limits=limits).models
    many_ids = FakeEstimator(sizes=(1, 1000))
    async with full_queue(models, engine, large):
        assert (models.has_full_queue, models.has_full_unsized_queue) == (True, False)
        models.check_unsized_queue("shop")
        models.check_queue_for_body("", b"", FakeEstimator(sizes=(1, 1)))
        for estimator in (many_ids, FakeEstimator(sizes=(1000, 1))):
            with pytest.raises(OverloadedError, match="of 'shop' for large requests is full"):
                models.check_queue_for_body("", b"", estimator)
        large_body = bytes(QUICK_BYTES_MAX + 1)
        models.check_queue_for_body("", large_body, many_ids, is_quick=True)
        with pytest.raises(OverloadedError):
            models.check_queue_for_body("", large_body[1:], many_ids, is_quick=True)
        with pytest.raises(OverloadedError):
            models.check_queue_for_body("", large_body, many_ids)


async def test_named_model_decides_about_overload_without_a_default(
    engine: FakeEngine, films: FakeEngine, executor: ThreadPoolExecutor
) -> None:
    pipeline = make_pipeline(engine, films, executor=executor, limits=ONE_QUEUED, default_model="")
    models = pipeline.models
    async with full_queue(models, engine, model="shop"):
        models.check_queue_for_body("", b"", FakeEstimator("films"))
        with pytest.raises(OverloadedError):
            models.check_queue_for_body("", b"", FakeEstimator("shop"))


async def test_only_requests_that_name_a_full_model_are_rejected_before_the_body(
    full_registry: ModelRegistry,
) -> None:
    with pytest.raises(OverloadedError):
        full_registry.check_unsized_queue("shop")
    full_registry.check_unsized_queue("films")
    full_registry.check_unsized_queue("")  # its body may name the other
    full_registry.check_unsized_queue("nobody")


def next_batcher(
    pipeline: RequestPipeline, engine: FakeEngine, executor: ThreadPoolExecutor
) -> Batcher:
    """Returns a batcher for the version of "shop" that ``engine`` has."""
    metrics = pipeline.metrics.models["shop"]
    metrics.switch(engine.model, 0.1)
    return Batcher(engine, engine.model, pipeline.limits, metrics, executor)


async def test_new_version_serves_new_requests_and_old_version_queued_requests(
    engine: FakeEngine, executor: ThreadPoolExecutor
) -> None:
    pipeline = make_pipeline(engine, executor=executor, limits=Limits(inline_bytes_max=0))
    models = pipeline.models
    after = FakeEngine(model_info(), seed=9)
    engine.hold()
    before = [submit_to(models, make_request(USER)) for _ in range(2)]
    await until(lambda: engine.lookups)
    old = models.activate("shop", next_batcher(pipeline, after, executor))
    assert old is not None
    for named in ("", "shop"):
        result = await submit_to(models, make_request(USER, model=named))
        assert result.model is after.model
        assert np.array_equal(result.values, after.expected(USER))
    assert models.models() == [after.model]
    engine.release()
    retired = asyncio.Event()
    old.retire(retired.set)
    for one in before:
        result = await one
        assert result.model is engine.model
        assert np.array_equal(result.values, engine.expected(USER))
    await retired.wait()


async def test_damage_of_a_version_that_was_replaced_during_its_check_does_not_count(
    engine: FakeEngine, executor: ThreadPoolExecutor, gate: Gate
) -> None:
    pipeline = make_pipeline(engine, executor=executor)
    models = pipeline.models
    engine.damage = StoreError("tables.safetensors: changed")
    engine.check = gate.before(engine.check)  # type: ignore[method-assign]
    check = asyncio.create_task(models.check_integrity())
    await until(lambda: gate.threads)
    models.activate("shop", next_batcher(pipeline, FakeEngine(model_info(), seed=9), executor))
    gate.opened.set()
    await check
    models.check_ready()


async def test_next_version_starts_with_an_empty_queue_and_no_damage(
    engine: FakeEngine, films: FakeEngine, executor: ThreadPoolExecutor
) -> None:
    limits = Limits(inline_bytes_max=0, queue_examples_max=2)
    pipeline = make_pipeline(engine, films, executor=executor, limits=limits)
    models = pipeline.models
    engine.damage = StoreError("tables.safetensors: changed")
    await models.check_integrity()
    assert not models.is_ready
    engine.hold()
    before = [submit_to(models, make_request(USER)) for _ in range(2)]
    await until(lambda: engine.lookups)
    before += [submit_to(models, make_request(USER)) for _ in range(2)]
    with pytest.raises(OverloadedError):
        submit_to(models, make_request(USER))
    assert models.has_full_queue
    rooms: list[bool] = []
    models.set_callbacks(lambda: None, lambda: rooms.append(models.has_full_queue))
    after = FakeEngine(model_info(), seed=9)
    old = models.activate("shop", next_batcher(pipeline, after, executor))
    assert old is not None
    old.retire(lambda: None)
    assert rooms == [False]
    models.check_ready()
    await submit_to(models, make_request(USER))
    engine.release()
    await asyncio.gather(*before)
    await models.check_integrity()
    models.check_ready()
