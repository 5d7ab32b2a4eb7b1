"""Tests of the batcher: requests that are cancelled, expired or invalid, and lookups that fail."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import numpy as np
import pytest
from server.batching.batch_limits import IN_THREAD, INLINE, USER, busy_batcher
from server.batching.test_live_batches import NextRows
from server.conftest import MakeBatcher
from server.fake_engine import Bags, FakeEngine
from server.fake_models import ruled_info
from server.pending_requests import submit
from server.waiting import WAIT_S_MAX, until

from embedserve.batching.batcher import Batcher
from embedserve.config import Limits
from embedserve.errors import DeadlineExceededError, EngineError, InvalidRequestError
from embedserve.metrics.model_metrics import ModelMetrics


async def test_failed_chunk_fails_its_batch(engine: FakeEngine) -> None:
    engine.failure = RuntimeError("of one piece")
    with ThreadPoolExecutor(2) as executor:
        metrics = ModelMetrics(engine.model)
        batcher = Batcher(engine, engine.model, IN_THREAD, metrics, executor, threads=2)
        answer = submit(batcher, engine.request({"user": [[1], [2]]}))
        with pytest.raises(EngineError):
            await answer
        engine.failure = None
        await submit(batcher, engine.request(USER))


async def test_batch_fails_if_the_executor_is_shut_down(
    engine: FakeEngine, make_batcher: MakeBatcher, executor: ThreadPoolExecutor
) -> None:
    batcher = make_batcher(IN_THREAD)
    executor.shutdown()
    for _ in range(2):
        with pytest.raises(EngineError):
            await submit(batcher, engine.request(USER))


async def test_a_cancelled_request_costs_no_lookup(
    engine: FakeEngine, make_batcher: MakeBatcher, metrics: ModelMetrics
) -> None:
    batcher = make_batcher(INLINE)
    answers = [submit(batcher, engine.request({"user": [[i]]})) for i in range(3)]
    answers[1].cancel()
    await asyncio.gather(answers[0], answers[2])
    assert [lookup.ids.tolist() for lookup in engine.lookups] == [[0, 2]]
    alone = submit(batcher, engine.request(USER))
    alone.cancel()
    await asyncio.sleep(0.01)
    assert len(engine.lookups) == 1
    assert metrics.count_queue() == (0, 0)


async def test_cancellation_during_a_lookup_does_not_affect_other_requests(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    batcher = make_batcher(IN_THREAD)
    engine.hold()
    all_bags: list[Bags] = [{"user": [[i]]} for i in range(3)]
    answers = [submit(batcher, engine.request(bags)) for bags in all_bags]
    await until(lambda: engine.lookups)
    answers[0].cancel()
    engine.release()
    for bags, answer in list(zip(all_bags, answers, strict=True))[1:]:
        assert np.array_equal((await answer).values, engine.expected(bags))


async def test_expired_request_fails_without_a_lookup(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    batcher, running = await busy_batcher(engine, make_batcher, IN_THREAD)
    late = submit(batcher, engine.request(USER), perf_counter() + 0.01)
    in_time = submit(batcher, engine.request(USER), perf_counter() + 60)
    await asyncio.sleep(0.03)
    engine.release()
    await asyncio.gather(running, in_time)
    with pytest.raises(DeadlineExceededError, match=r"after \d+\.\d ms in the queue"):
        await late
    assert [lookup.batch_size for lookup in engine.lookups] == [1, 1]


@pytest.mark.parametrize("limits", [INLINE, IN_THREAD])
async def test_failed_lookup_returns_a_general_error_and_logs_the_details(
    engine: FakeEngine,
    make_batcher: MakeBatcher,
    limits: Limits,
    caplog: pytest.LogCaptureFixture,
) -> None:
    batcher = make_batcher(limits)
    engine.failure = RuntimeError("row cache at 0x7f is corrupt")
    answers = [submit(batcher, engine.request(USER)) for _ in range(3)]
    with caplog.at_level(logging.ERROR):
        for answer in answers:
            with pytest.raises(EngineError) as caught:
                await answer
            assert "0x7f" not in caught.value.message
    assert "row cache at 0x7f is corrupt" in caplog.text
    engine.failure = None
    await submit(batcher, engine.request(USER))


async def test_invalid_request_does_not_fail_its_batch(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    batcher = make_batcher(INLINE)
    good: Bags = {"user": [[1], [2]]}
    before, bad, after = (
        submit(batcher, engine.request(bags)) for bags in (good, {"user": [[7]]}, good)
    )
    with pytest.raises(InvalidRequestError, match="is 7"):
        await bad
    for answer in (before, after):
        assert np.array_equal((await answer).values, engine.expected(good))
    assert [lookup.batch_size for lookup in engine.lookups] == [4]


@pytest.mark.parametrize("limits", [INLINE, IN_THREAD])
async def test_batch_of_only_invalid_requests_costs_no_lookup(
    engine: FakeEngine,
    make_batcher: MakeBatcher,
    limits: Limits,
    caplog: pytest.LogCaptureFixture,
) -> None:
    batcher = make_batcher(limits)
    answers = [submit(batcher, engine.request({"tag": [[-1]]})) for _ in range(3)]
    outcomes = await asyncio.gather(*answers, return_exceptions=True)
    assert all(isinstance(outcome, InvalidRequestError) for outcome in outcomes)
    assert engine.lookups == []
    assert not caplog.messages


class FailingToRound(FakeEngine):
    """Fails to round while ``is_failing``."""

    is_failing = True

    def to_float16(self, values: np.ndarray) -> np.ndarray:
        if self.is_failing:
            raise MemoryError("no room for the rounded values")
        return super().to_float16(values)


@pytest.mark.parametrize("limits", [INLINE, IN_THREAD])
async def test_failure_while_splitting_fails_every_request_of_the_batch(
    executor: ThreadPoolExecutor, limits: Limits, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FailingToRound()
    batcher = Batcher(engine, engine.model, limits, ModelMetrics(engine.model), executor)
    requests = [engine.request(USER) for _ in range(3)]
    requests[1].output_dtype = "float16"
    for answer in [submit(batcher, request) for request in requests]:
        with pytest.raises(EngineError, match="the server's log says why"):
            await asyncio.wait_for(answer, WAIT_S_MAX)
    assert "no room for the rounded values" in caplog.text
    engine.is_failing = False
    assert (await submit(batcher, requests[1])).values.dtype == np.float16


async def test_failure_while_joining_fails_every_request_of_the_batch(
    executor: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(ruled_info())
    rows = engine.rows_reader = NextRows()
    rows.id_failure = MemoryError("no room for the batch")
    metrics = ModelMetrics(engine.model)
    batcher = Batcher(engine, engine.model, INLINE, metrics, executor)
    day: Bags = {"day": [[1]]}
    answers = [submit(batcher, engine.request(day)) for _ in range(3)]
    for answer in answers:
        with pytest.raises(EngineError, match="the server's log says why"):
            await asyncio.wait_for(answer, WAIT_S_MAX)
    assert "no room for the batch" in caplog.text
    assert metrics.version.lookup_seconds.samples()[0][-1] == ("+Inf", 0)
    assert rows.begun
    assert not rows.views
    rows.id_failure = None
    assert (await submit(batcher, engine.request(day))).values.shape[0] == 1
