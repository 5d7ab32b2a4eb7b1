"""Tests of the batcher: when a batch starts, what it contains, and one response per request."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from server.batching.batch_limits import IN_THREAD, INLINE, ONE_BYTES, USER, busy_batcher
from server.conftest import MakeBatcher
from server.fake_engine import Bags, FakeEngine
from server.fake_models import unpooled_info
from server.pending_requests import submit
from server.waiting import WAIT_S_MAX, until

from embedserve.batching.batcher import BAG_BYTES, Batcher
from embedserve.config import Limits
from embedserve.errors import OverloadedError
from embedserve.metrics.model_metrics import ModelMetrics

HOUR_S = 3600


async def test_idle_engine_looks_up_a_request_immediately(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    answer = submit(make_batcher(INLINE), engine.request(USER))
    await asyncio.sleep(0)
    assert answer.done()
    assert np.array_equal(answer.result().values, engine.expected(USER))
    assert answer.result().model is engine.model


async def test_requests_of_one_event_loop_iteration_form_one_batch(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    batcher = make_batcher(INLINE)
    all_bags: list[Bags] = [{"user": [[i], [i, i]]} for i in range(5)]
    results = await asyncio.gather(*(submit(batcher, engine.request(bags)) for bags in all_bags))
    assert [lookup.batch_size for lookup in engine.lookups] == [10]
    for bags, result in zip(all_bags, results, strict=True):
        assert np.array_equal(result.values, engine.expected(bags))


async def test_large_batch_is_divided_among_all_threads(engine: FakeEngine) -> None:
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
async def test_device_engine_gets_whole_batches_off_the_event_loop(
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


async def test_only_the_request_for_float16_gets_float16(
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


async def test_requests_are_batched_while_the_engine_is_busy(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    batcher, first = await busy_batcher(engine, make_batcher, IN_THREAD)
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


async def test_request_over_the_batch_limit_is_a_batch_of_its_own(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    batcher = make_batcher(Limits(batch_ids_max=4))
    large: Bags = {"user": [[1] * 9]}
    bags = [USER, large, USER]
    results = await asyncio.gather(*(submit(batcher, engine.request(b)) for b in bags))
    assert [lookup.ids.size for lookup in engine.lookups] == [3, 9, 3]
    assert np.array_equal(results[1].values, engine.expected(large))


async def test_small_batches_run_in_the_event_loop_and_large_ones_in_a_thread(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    batcher = make_batcher(Limits(inline_bytes_max=ONE_BYTES))
    await submit(batcher, engine.request({"user": [[1]]}))
    await submit(batcher, engine.request({"user": [[1, 2]]}))
    assert [lookup.is_inline for lookup in engine.lookups] == [True, False]


async def test_event_loop_continues_while_a_large_batch_runs(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    _, answer = await busy_batcher(engine, make_batcher, IN_THREAD)
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not answer.done()
    engine.release()
    await answer


async def test_lone_request_waits_for_the_configured_delay(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    batcher = make_batcher(Limits(delay_ms_max=HOUR_S * 1000))
    first = submit(batcher, engine.request(USER))
    await asyncio.sleep(0.1)
    assert not first.done()
    first.pending.queued_s -= HOUR_S
    await asyncio.gather(first, submit(batcher, engine.request(USER)))
    assert [lookup.batch_size for lookup in engine.lookups] == [2]


async def test_each_lone_request_is_answered_after_the_delay(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    batcher = make_batcher(Limits(delay_ms_max=1))
    for _ in range(3):
        await asyncio.wait_for(submit(batcher, engine.request(USER)), WAIT_S_MAX)


@pytest.mark.parametrize(
    "limits",
    [
        Limits(delay_ms_max=60_000, batch_ids_max=6),
        Limits(delay_ms_max=60_000, batch_output_bytes_max=2 * 36),
    ],
)
async def test_full_batch_does_not_wait_for_the_delay(
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


async def test_batch_that_fills_as_its_delay_ends_starts_once(
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


async def test_wait_for_the_engine_counts_towards_the_delay(
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
async def test_full_queue_rejects_immediately_and_recovers(
    engine: FakeEngine, make_batcher: MakeBatcher, limits: Limits, message: str
) -> None:
    batcher, running = await busy_batcher(engine, make_batcher, limits)
    waiting = [submit(batcher, engine.request(USER)) for _ in range(3)]
    with pytest.raises(OverloadedError, match=message):
        submit(batcher, engine.request(USER))
    engine.release()
    await asyncio.gather(running, *waiting)
    await submit(batcher, engine.request(USER))


async def test_lone_request_is_accepted_whatever_its_size(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    batcher = make_batcher(Limits(queue_examples_max=1, queue_ids_max=1))
    bags: Bags = {"user": [[1, 2], [3, 4]]}
    result = await submit(batcher, engine.request(bags))
    assert np.array_equal(result.values, engine.expected(bags))


@pytest.mark.parametrize("limits", [INLINE, IN_THREAD])
async def test_queue_batches_and_times_are_counted(
    engine: FakeEngine, make_batcher: MakeBatcher, metrics: ModelMetrics, limits: Limits
) -> None:
    batcher, start_s = make_batcher(limits), time.perf_counter()
    engine.delay_s = 0.01
    answers = [submit(batcher, engine.request({"user": [[1, 2], [3]]})) for _ in range(4)]
    assert metrics.count_queue() == (4, 8)
    await asyncio.gather(*answers)
    assert metrics.count_queue() == (0, 0)
    duration_s = time.perf_counter() - start_s
    assert metrics.version.batch_examples.samples()[1] == 8
    assert metrics.version.batch_ids.samples()[1] == 12
    assert metrics.version.wait_seconds.samples()[0][-1] == ("+Inf", 4)
    assert 0 < metrics.version.wait_seconds.samples()[1] < 4 * duration_s
    assert metrics.version.lookup_seconds.samples()[0][-1] == ("+Inf", 1)
    assert engine.delay_s <= metrics.version.lookup_seconds.samples()[1] < duration_s


UNPOOLED_ITEM = 2 * 16
"""Bytes of the result for one id of item, a row of 4 float32 from each of two tables."""


@pytest.mark.parametrize("inline_bytes_max", [0, 1 << 20])
async def test_an_unpooled_batch_ends_at_the_bytes_of_its_rows(
    executor: ThreadPoolExecutor, inline_bytes_max: int
) -> None:
    engine = FakeEngine(unpooled_info())
    limits = Limits(batch_output_bytes_max=5 * UNPOOLED_ITEM, inline_bytes_max=inline_bytes_max)
    batcher = Batcher(engine, engine.model, limits, ModelMetrics(engine.model), executor)
    all_bags: list[Bags] = [{"item": [[i, 9, i + 1], []], "last": [[i], [2]]} for i in range(3)]
    results = await asyncio.gather(*(submit(batcher, engine.request(b)) for b in all_bags))
    assert [lookup.batch_size for lookup in engine.lookups] == [2, 2, 2]
    for bags, result in zip(all_bags, results, strict=True):
        assert np.array_equal(result.values, engine.expected(bags))
        assert result.lengths is not None
        assert result.lengths.tolist() == [[3, 0], [1, 1], [0, 0], [3, 0]]
        assert result.unknown_ids == {"item": 1}


async def test_small_unpooled_batches_run_inline_and_large_ones_in_a_thread(
    executor: ThreadPoolExecutor,
) -> None:
    engine = FakeEngine(unpooled_info())
    # One id reads a row of 4 float32 and writes up to two.
    bags_bytes = BAG_BYTES * len(engine.model.features)
    limits = Limits(inline_bytes_max=bags_bytes + 16 + UNPOOLED_ITEM)
    batcher = Batcher(engine, engine.model, limits, ModelMetrics(engine.model), executor)
    await submit(batcher, engine.request({"item": [[1]]}))
    await submit(batcher, engine.request({"item": [[1, 2]]}))
    assert [lookup.is_inline for lookup in engine.lookups] == [True, False]


async def test_many_empty_bags_are_a_large_batch(executor: ThreadPoolExecutor) -> None:
    engine = FakeEngine(unpooled_info())
    limits = Limits(inline_bytes_max=100 * BAG_BYTES * len(engine.model.features))
    batcher = Batcher(engine, engine.model, limits, ModelMetrics(engine.model), executor)
    await submit(batcher, engine.request({"item": [[]] * 100}))
    await submit(batcher, engine.request({"item": [[]] * 101}))
    assert [lookup.is_inline for lookup in engine.lookups] == [True, False]
