"""Tests of the batcher: when a batch starts, what it contains, and one response per request."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import perf_counter

import numpy as np
import pytest
from server.conftest import MakeBatcher
from server.fake_engine import FEATURES, Bags, FakeEngine, model_info
from server.pending_requests import submit
from server.waiting import WAIT_S_MAX, until

from embedserve.batching.batcher import BAG_BYTES, Batcher
from embedserve.config import Limits
from embedserve.errors import (
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
)
from embedserve.metrics.model_metrics import ModelMetrics
from embedserve_store.ids.translate import ChangeRows, IdTranslator, Translation

INLINE = Limits()
IN_THREAD = Limits(inline_bytes_max=0)
ONE_BYTES = 52 + len(FEATURES) * BAG_BYTES
"""Bytes of the work of a request with one id: it reads a row of at most 4 dims, and writes 9."""
USER: Bags = {"user": [[1, 2, 3]]}
HOUR_S = 3600


async def test_an_idle_engine_takes_a_request_at_once(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    answer = submit(make_batcher(INLINE), engine.request(USER))
    await asyncio.sleep(0)
    assert answer.done()
    assert np.array_equal(answer.result().values, engine.expected(USER))
    assert answer.result().model is engine.model


async def test_requests_of_one_turn_form_one_batch(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    batcher = make_batcher(INLINE)
    all_bags: list[Bags] = [{"user": [[i], [i, i]]} for i in range(5)]
    results = await asyncio.gather(*(submit(batcher, engine.request(bags)) for bags in all_bags))
    assert [lookup.batch_size for lookup in engine.lookups] == [10]
    for bags, result in zip(all_bags, results, strict=True):
        assert np.array_equal(result.values, engine.expected(bags))


async def test_a_large_batch_is_cut_for_all_threads(engine: FakeEngine) -> None:
    with ThreadPoolExecutor(3) as executor:
        metrics = ModelMetrics(engine.model)
        batcher = Batcher(engine, engine.model, IN_THREAD, metrics, executor, threads=3)
        all_bags: list[Bags] = [{"user": [[i], [i, i]]} for i in range(4)]
        requests = [engine.request(bags) for bags in all_bags]
        results = await asyncio.gather(*(submit(batcher, request) for request in requests))
    assert sorted(lookup.batch_size for lookup in engine.lookups) == [2, 3, 3]
    assert not any(lookup.is_inline for lookup in engine.lookups)
    for bags, result in zip(all_bags, results, strict=True):
        rows = np.concatenate([result.values, *result.extra_chunks])
        assert np.array_equal(rows, engine.expected(bags))
    assert metrics.version.lookup_seconds.samples()[0][-1] == ("+Inf", 1)


@pytest.mark.parametrize("limits", [INLINE, IN_THREAD])
async def test_an_engine_that_waits_for_its_device_gets_whole_batches_beside_the_event_loop(
    engine: FakeEngine, limits: Limits
) -> None:
    engine.waits_for_device = True
    with ThreadPoolExecutor(3) as executor:
        metrics = ModelMetrics(engine.model)
        batcher = Batcher(engine, engine.model, limits, metrics, executor, threads=3)
        alone = await submit(batcher, engine.request(USER))
        all_bags: list[Bags] = [{"user": [[i], [i, i]]} for i in range(4)]
        requests = [engine.request(bags) for bags in all_bags]
        results = await asyncio.gather(*(submit(batcher, request) for request in requests))
    found = [(lookup.batch_size, lookup.is_inline) for lookup in engine.lookups]
    assert found == [(1, False), (8, False)]
    for bags, result in zip([USER, *all_bags], [alone, *results], strict=True):
        assert np.array_equal(result.values, engine.expected(bags))
        assert not result.extra_chunks


async def test_a_piece_that_fails_fails_its_batch(engine: FakeEngine) -> None:
    engine.failure = RuntimeError("of one piece")
    with ThreadPoolExecutor(2) as executor:
        metrics = ModelMetrics(engine.model)
        batcher = Batcher(engine, engine.model, IN_THREAD, metrics, executor, threads=2)
        answer = submit(batcher, engine.request({"user": [[1], [2]]}))
        with pytest.raises(EngineError):
            await answer
        engine.failure = None
        await submit(batcher, engine.request(USER))


async def test_float16_is_what_its_caller_asked_for_alone(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    batcher = make_batcher(INLINE)
    rounded, exact = engine.request(USER), engine.request(USER)
    rounded.output_dtype = "float16"
    results = await asyncio.gather(submit(batcher, rounded), submit(batcher, exact))
    assert len(engine.lookups) == 1
    expected = engine.expected(USER)
    assert results[0].values.dtype == np.float16
    assert np.array_equal(results[0].values, expected.astype(np.float16))
    assert np.array_equal(results[1].values, expected)


async def test_requests_gather_while_the_engine_works(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    batcher = make_batcher(IN_THREAD)
    engine.hold()
    first = submit(batcher, engine.request(USER))
    await until(lambda: engine.lookups)
    others = [submit(batcher, engine.request(USER)) for _ in range(7)]
    await asyncio.sleep(0.02)
    assert len(engine.lookups) == 1
    engine.release()
    await asyncio.gather(first, *others)
    assert [lookup.batch_size for lookup in engine.lookups] == [1, 7]


@pytest.mark.parametrize(
    "limits",
    [
        Limits(batch_ids_max=6),
        Limits(batch_output_bytes_max=2 * 36),  # an example is 9 float32 values
        Limits(request_examples_max=2),
        Limits(request_ids_max=6),
        Limits(request_output_bytes_max=2 * 36),
    ],
)
async def test_a_batch_ends_at_its_limits(
    engine: FakeEngine, make_batcher: MakeBatcher, limits: Limits
) -> None:
    batcher = make_batcher(limits)
    await asyncio.gather(*(submit(batcher, engine.request(USER)) for _ in range(5)))
    assert [lookup.batch_size for lookup in engine.lookups] == [2, 2, 1]


async def test_a_request_past_the_batch_limit_is_a_batch_of_its_own(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    batcher = make_batcher(Limits(batch_ids_max=4))
    large: Bags = {"user": [[1] * 9]}
    bags = [USER, large, USER]
    results = await asyncio.gather(*(submit(batcher, engine.request(b)) for b in bags))
    assert [lookup.ids.size for lookup in engine.lookups] == [3, 9, 3]
    assert np.array_equal(results[1].values, engine.expected(large))


async def test_small_batches_run_in_the_event_loop_and_large_ones_beside_it(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    batcher = make_batcher(Limits(inline_bytes_max=ONE_BYTES))
    await submit(batcher, engine.request({"user": [[1]]}))
    await submit(batcher, engine.request({"user": [[1, 2]]}))
    assert [lookup.is_inline for lookup in engine.lookups] == [True, False]


async def test_a_batch_that_no_thread_takes_fails(
    engine: FakeEngine, make_batcher: MakeBatcher, executor: ThreadPoolExecutor
) -> None:
    batcher = make_batcher(IN_THREAD)
    executor.shutdown()
    for _ in range(2):
        with pytest.raises(EngineError):
            await submit(batcher, engine.request(USER))


async def test_the_event_loop_goes_on_while_a_large_batch_runs(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    engine.hold()
    answer = submit(make_batcher(IN_THREAD), engine.request(USER))
    await until(lambda: engine.lookups)
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not answer.done()
    engine.release()
    await answer


async def test_with_a_delay_a_lone_request_waits_for_company(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    batcher = make_batcher(Limits(delay_ms_max=HOUR_S * 1000))
    first = submit(batcher, engine.request(USER))
    await asyncio.sleep(0.1)
    assert not first.done()
    first.pending.queued_s -= HOUR_S
    await asyncio.gather(first, submit(batcher, engine.request(USER)))
    assert [lookup.batch_size for lookup in engine.lookups] == [2]


@pytest.mark.parametrize(
    "limits",
    [
        Limits(delay_ms_max=60_000, batch_ids_max=6),
        Limits(delay_ms_max=60_000, batch_output_bytes_max=2 * 36),
    ],
)
async def test_a_full_batch_does_not_wait_for_company(
    engine: FakeEngine, make_batcher: MakeBatcher, limits: Limits
) -> None:
    batcher = make_batcher(limits)
    answers = [submit(batcher, engine.request(USER)) for _ in range(5)]
    await asyncio.wait_for(asyncio.gather(*answers[:4]), WAIT_S_MAX)
    await asyncio.sleep(0.01)
    assert not answers[4].done()
    answers.append(submit(batcher, engine.request(USER)))
    await asyncio.wait_for(asyncio.gather(*answers), WAIT_S_MAX)
    assert [lookup.batch_size for lookup in engine.lookups] == [2, 2, 2]


async def test_a_batch_that_fills_as_its_delay_ends_begins_once(
    engine: FakeEngine, make_batcher: MakeBatcher, metrics: ModelMetrics
) -> None:
    batcher = make_batcher(Limits(delay_ms_max=20, batch_ids_max=6, inline_bytes_max=0))
    engine.hold()
    answers = [submit(batcher, engine.request(USER))]
    time.sleep(0.03)  # noqa: ASYNC251  the delay ends after the next requests are queued
    asyncio.get_running_loop().call_soon(
        lambda: answers.extend(submit(batcher, engine.request(USER)) for _ in range(5))
    )
    await until(lambda: engine.lookups)
    await asyncio.sleep(0.01)
    assert metrics.count_queue()[0] == 4  # one batch in two runs, and no other
    engine.release()
    await asyncio.gather(*answers)


async def test_a_request_that_waited_for_the_engine_has_waited_for_company(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    limits = Limits(delay_ms_max=HOUR_S * 1000, batch_ids_max=6, inline_bytes_max=0)
    batcher = make_batcher(limits)
    engine.hold()
    running = [submit(batcher, engine.request(USER)) for _ in range(2)]  # a full batch
    await until(lambda: engine.lookups)
    waiting = submit(batcher, engine.request(USER))
    waiting.pending.queued_s -= HOUR_S
    engine.release()
    await asyncio.gather(*running)
    await asyncio.wait_for(waiting, WAIT_S_MAX)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(inline_bytes_max=0, queue_examples_max=3), "3 examples; 1 more would exceed"),
        (Limits(inline_bytes_max=0, queue_ids_max=9), "9 ids; 3 more would exceed its limit of 9"),
    ],
)
async def test_a_full_queue_refuses_at_once_and_recovers(
    engine: FakeEngine, make_batcher: MakeBatcher, limits: Limits, message: str
) -> None:
    batcher = make_batcher(limits)
    engine.hold()
    running = submit(batcher, engine.request(USER))
    await until(lambda: engine.lookups)
    waiting = [submit(batcher, engine.request(USER)) for _ in range(3)]
    with pytest.raises(OverloadedError, match=message):
        submit(batcher, engine.request(USER))
    engine.release()
    await asyncio.gather(running, *waiting)
    await submit(batcher, engine.request(USER))


async def test_a_lone_request_has_room_however_large(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    batcher = make_batcher(Limits(queue_examples_max=1, queue_ids_max=1))
    bags: Bags = {"user": [[1, 2], [3, 4]]}
    result = await submit(batcher, engine.request(bags))
    assert np.array_equal(result.values, engine.expected(bags))


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


async def test_a_request_cancelled_during_its_lookup_harms_nobody(
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


async def test_an_expired_deadline_is_answered_without_a_lookup(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    batcher = make_batcher(IN_THREAD)
    engine.hold()
    running = submit(batcher, engine.request(USER))
    await until(lambda: engine.lookups)
    late = submit(batcher, engine.request(USER), perf_counter() + 0.01)
    in_time = submit(batcher, engine.request(USER), perf_counter() + 60)
    await asyncio.sleep(0.03)
    engine.release()
    await asyncio.gather(running, in_time)
    with pytest.raises(DeadlineExceededError, match=r"after \d+\.\d ms in the queue"):
        await late
    assert [lookup.batch_size for lookup in engine.lookups] == [1, 1]


@pytest.mark.parametrize("limits", [INLINE, IN_THREAD])
async def test_a_failing_lookup_is_answered_in_general_and_logged_in_full(
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


async def test_an_invalid_request_fails_alone(
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


async def test_a_batch_of_invalid_requests_only_costs_no_lookup(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    batcher = make_batcher(INLINE)
    answers = [submit(batcher, engine.request({"tag": [[-1]]})) for _ in range(3)]
    outcomes = await asyncio.gather(*answers, return_exceptions=True)
    assert all(isinstance(outcome, InvalidRequestError) for outcome in outcomes)
    assert engine.lookups == []


async def test_what_happened_is_counted(
    engine: FakeEngine, make_batcher: MakeBatcher, metrics: ModelMetrics
) -> None:
    batcher = make_batcher(INLINE)
    answers = [submit(batcher, engine.request({"user": [[1, 2], [3]]})) for _ in range(4)]
    assert metrics.count_queue() == (4, 8)
    await asyncio.gather(*answers)
    assert metrics.count_queue() == (0, 0)
    assert metrics.version.batch_examples.samples()[1] == 8
    assert metrics.version.batch_ids.samples()[1] == 12
    assert metrics.version.wait_seconds.samples()[0][-1] == ("+Inf", 4)
    assert metrics.version.lookup_seconds.samples()[0][-1] == ("+Inf", 1)


class NotRounding(FakeEngine):
    """Fails to round while ``is_failing``."""

    is_failing = True

    def to_float16(self, values: np.ndarray) -> np.ndarray:
        if self.is_failing:
            raise MemoryError("no room for the rounded values")
        return super().to_float16(values)


@pytest.mark.parametrize("limits", [INLINE, IN_THREAD])
async def test_a_failure_while_splitting_still_answers_everyone(
    executor: ThreadPoolExecutor, limits: Limits, caplog: pytest.LogCaptureFixture
) -> None:
    engine = NotRounding()
    batcher = Batcher(engine, engine.model, limits, ModelMetrics(engine.model), executor)
    requests = [engine.request(USER) for _ in range(3)]
    requests[1].output_dtype = "float16"
    for answer in [submit(batcher, request) for request in requests]:
        with pytest.raises(EngineError, match="the server's log says why"):
            await asyncio.wait_for(answer, WAIT_S_MAX)
    assert "no room for the rounded values" in caplog.text
    engine.is_failing = False
    assert (await submit(batcher, requests[1])).values.dtype == np.float16


class FailingTranslator(IdTranslator):
    """Fails while ``is_failing``, like a batch without enough memory."""

    def __init__(self, translator: IdTranslator) -> None:
        vars(self).update(vars(translator))
        self.is_identity = False
        self.is_failing = True

    def translate(
        self, ids: np.ndarray, ids_per_feature: np.ndarray, change: ChangeRows | None = None
    ) -> Translation:
        if self.is_failing:
            raise MemoryError("no room for the batch")
        return super().translate(ids, ids_per_feature, change)


async def test_a_failure_while_joining_still_answers_everyone(
    executor: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    plain = model_info()
    translator = FailingTranslator(plain.translator)
    engine = FakeEngine(replace(plain, translator=translator))
    metrics = ModelMetrics(engine.model)
    batcher = Batcher(engine, engine.model, INLINE, metrics, executor)
    answers = [submit(batcher, engine.request(USER)) for _ in range(3)]
    for answer in answers:
        with pytest.raises(EngineError, match="the server's log says why"):
            await asyncio.wait_for(answer, WAIT_S_MAX)
    assert "no room for the batch" in caplog.text
    assert metrics.version.lookup_seconds.samples()[0][-1] == ("+Inf", 0)
    translator.is_failing = False
    assert (await submit(batcher, engine.request(USER))).values.shape[0] == 1
