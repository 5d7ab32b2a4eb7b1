"""The service: which model, which limits, whether in time and whether ready."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from server.fake_engine import Bags, FakeEngine, make_request, model_info
from server.fake_models import unpooled_info
from server.live import make_service

from embedserve.config import Limits
from embedserve.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    NotReadyError,
    RequestTooLargeError,
    UnknownModelError,
)

USER: Bags = {"user": [[1, 2]]}


@pytest.fixture
def other() -> FakeEngine:
    return FakeEngine(model_info("films", {"user": (7, 2)}), seed=1)


async def test_a_request_is_answered_by_the_model_that_it_names(
    engine: FakeEngine, other: FakeEngine, executor: ThreadPoolExecutor
) -> None:
    service = make_service(engine, other, executor=executor)
    for named, answers in (("films", other), ("shop", engine), ("", engine)):
        result = await service.submit(make_request(USER, model=named))
        assert result.model is answers.model
        assert np.array_equal(result.values, answers.expected(USER))
    assert service.models() == [engine.model, other.model]
    assert service.model("films") is other.model
    assert service.model("") is engine.model


def test_an_unknown_model_is_named_with_those_that_there_are(
    engine: FakeEngine, other: FakeEngine, executor: ThreadPoolExecutor
) -> None:
    service = make_service(engine, other, executor=executor)
    with pytest.raises(UnknownModelError, match="model is 'shoes': this server has shop, films"):
        service.submit(make_request(USER, model="shoes"))
    with pytest.raises(UnknownModelError):
        service.model("shoes")


def test_without_a_default_a_request_must_name_a_model(
    engine: FakeEngine, other: FakeEngine, executor: ThreadPoolExecutor
) -> None:
    service = make_service(engine, other, executor=executor, default_model="")
    with pytest.raises(UnknownModelError, match="names no model and there is no default"):
        service.submit(make_request(USER))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(request_examples_max=2), "features: the batch has 3 examples, the limit is 2"),
        (
            Limits(request_output_bytes_max=72),
            "features: the answer to 3 examples has 108 bytes, the limit is 72",
        ),
    ],
)
async def test_a_request_past_a_limit_is_refused_with_both_numbers(
    engine: FakeEngine, executor: ThreadPoolExecutor, limits: Limits, message: str
) -> None:
    service = make_service(engine, executor=executor, limits=limits)
    with pytest.raises(RequestTooLargeError, match=f"^{message}$") as caught:
        service.submit(make_request({"user": [[1], [2], [3]]}))
    assert caught.value.field == "features"
    await service.submit(make_request({"user": [[1], [2]]}))


async def test_of_an_unpooled_model_the_limit_is_on_a_row_for_each_id_and_table(
    executor: ThreadPoolExecutor,
) -> None:
    engine = FakeEngine(unpooled_info())
    # 4 float32 a row, and up to two rows an id: item is served by two tables.
    limits = Limits(request_output_bytes_max=3 * 2 * 16)
    service = make_service(engine, executor=executor, limits=limits)
    allowed = make_request({"item": [[1, 2, 3]]})
    assert service.answer_bytes(allowed) == 96
    assert (await service.submit(allowed)).values.nbytes == 96
    message = "^features: the answer to 4 ids has up to 128 bytes, the limit is 96$"
    with pytest.raises(RequestTooLargeError, match=message):
        service.submit(make_request({"item": [[1, 2, 3, 4]]}))
    with pytest.raises(InvalidRequestError, match=r"^weights: model 'sequence' answers one row"):
        service.submit(make_request({"item": [[1]]}, {"item": [[1.0]]}))


def test_an_unknown_feature_is_refused_before_the_queue(
    engine: FakeEngine, executor: ThreadPoolExecutor
) -> None:
    service = make_service(engine, executor=executor)
    with pytest.raises(InvalidRequestError, match=r"features\.actor"):
        service.submit(make_request({"actor": [[1]]}))
    assert service.metrics.models["shop"].queued_requests == 0


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
def test_a_deadline_that_had_passed_is_refused_before_the_queue(
    engine: FakeEngine, executor: ThreadPoolExecutor, timeout_s: float
) -> None:
    service = make_service(engine, executor=executor)
    with pytest.raises(DeadlineExceededError):
        service.submit(make_request(USER), timeout_s)
    assert service.metrics.models["shop"].queued_requests == 0


async def test_while_draining_requests_are_answered_but_readiness_is_not(
    engine: FakeEngine, executor: ThreadPoolExecutor
) -> None:
    service = make_service(engine, executor=executor)
    service.check_ready()
    service.is_ready = False
    with pytest.raises(NotReadyError, match="draining"):
        service.check_ready()
    result = await service.submit(make_request(USER))
    assert np.array_equal(result.values, engine.expected(USER))
