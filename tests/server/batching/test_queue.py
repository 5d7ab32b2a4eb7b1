"""Tests of the batcher's queue: its counts, its limits, and abandoned and expired requests."""

import asyncio
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from server.batching.batch_limits import IN_THREAD, busy_batcher
from server.conftest import MakeBatcher
from server.fake_engine import Bags, FakeEngine
from server.pending_requests import submit
from server.waiting import WAIT_S_MAX, until

from embedserve.batching.batcher import Batcher
from embedserve.batching.request_queue import BATCH_REQUESTS_MAX
from embedserve.config import Limits
from embedserve.errors import (
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
)
from embedserve.metrics.model_metrics import ModelMetrics

ONE: Bags = {"user": [[1]]}
MANY = 1024
"""Requests that are abandoned."""


async def test_full_queue_accepts_requests_once_an_eighth_is_free(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    # A batch holds two of these requests of one id.
    limits = Limits(inline_bytes_max=0, queue_examples_max=16, batch_ids_max=2)
    batcher, running = await busy_batcher(engine, make_batcher, limits, ONE)
    answers = [running, *(submit(batcher, engine.request(ONE)) for _ in range(16))]
    batcher.unsized_queue.check_not_full()
    with pytest.raises(OverloadedError, match="16 examples; 1 more would exceed its limit of 16"):
        submit(batcher, engine.request(ONE))
    with pytest.raises(OverloadedError, match="'shop' is full: it holds 16 examples and 16 ids"):
        batcher.unsized_queue.check_not_full()
    engine.release()
    await asyncio.gather(*answers)
    batcher.unsized_queue.check_not_full()
    assert np.array_equal((await submit(batcher, engine.request(ONE))).values, engine.expected(ONE))


async def test_full_queue_of_small_requests_is_reported(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    batcher = make_batcher(Limits(queue_examples_max=4))
    answers = [submit(batcher, engine.request(ONE)) for _ in range(4)]
    found = [batcher.has_full_queue]
    with pytest.raises(OverloadedError):
        submit(batcher, engine.request(ONE))
    found.append(batcher.has_full_queue)
    await asyncio.gather(*answers)
    found.append(batcher.has_full_queue)
    assert found == [False, True, False]


async def test_batch_has_a_bounded_number_of_requests(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    batcher, running = await busy_batcher(engine, make_batcher, IN_THREAD, ONE)
    requests = [engine.request(ONE) for _ in range(2 * BATCH_REQUESTS_MAX + 1)]
    waiting = [submit(batcher, request) for request in requests]
    engine.release()
    await asyncio.gather(running, *waiting)
    sizes = [lookup.batch_size for lookup in engine.lookups]
    assert sizes == [1, BATCH_REQUESTS_MAX, BATCH_REQUESTS_MAX, 1]


async def test_expired_requests_are_rejected_over_several_event_loop_iterations(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    batcher = make_batcher(Limits())
    count = 2 * BATCH_REQUESTS_MAX + 1
    late = [submit(batcher, engine.request(ONE), deadline_s=0.0) for _ in range(count)]
    rejected = [0]
    async with asyncio.timeout(WAIT_S_MAX):
        while rejected[-1] < count:
            await asyncio.sleep(0)
            rejected.append(sum(one.done() for one in late))
    assert rejected == [0, BATCH_REQUESTS_MAX, 2 * BATCH_REQUESTS_MAX, count]
    assert all(isinstance(one.exception(), DeadlineExceededError) for one in late)


async def test_tiny_requests_of_one_source_do_not_delay_larger_ones_of_another(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    limits = Limits(inline_bytes_max=0, batch_ids_max=1000)
    batcher, running = await busy_batcher(engine, make_batcher, limits, ONE)
    tiny = [submit(batcher, engine.request(ONE), source="tiny") for _ in range(1000)]
    larger: Bags = {"user": [[1]] * 400}
    larger_ones = [submit(batcher, engine.request(larger), source="larger") for _ in range(2)]
    engine.release()
    await asyncio.gather(running, *tiny, *larger_ones)
    assert {one.pending.ticket for one in larger_ones} == {tiny[0].pending.ticket}


async def test_expired_requests_of_one_source_do_not_delay_another(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    batcher = make_batcher(Limits())
    count = 2 * BATCH_REQUESTS_MAX
    late = [submit(batcher, engine.request(ONE), 0.0, "late") for _ in range(count)]
    others = [submit(batcher, engine.request(ONE), source="other") for _ in range(2)]
    await asyncio.sleep(0)
    assert all(one.done() for one in others)
    assert sum(one.done() for one in late) == BATCH_REQUESTS_MAX - 2
    await asyncio.gather(*late, return_exceptions=True)


async def test_abandoned_requests_are_no_longer_counted(
    engine: FakeEngine, make_batcher: MakeBatcher, metrics: ModelMetrics
) -> None:
    batcher, running = await busy_batcher(engine, make_batcher, IN_THREAD, ONE)
    bags: list[Bags] = [{"user": [[1], [2]]}, {"user": [[3]]}, {"user": [[4], [5], [6]]}]
    waiting = [submit(batcher, engine.request(one)) for one in bags]
    assert metrics.count_queue() == (3, 6)
    waiting[0].pending.abandon()
    assert metrics.count_queue() == (2, 4)
    waiting[2].pending.abandon()
    assert metrics.count_queue() == (1, 1)
    waiting[0].pending.abandon()  # a repetition changes nothing
    assert metrics.count_queue() == (1, 1)
    engine.release()
    await asyncio.gather(running, waiting[1])
    assert [lookup.ids.tolist() for lookup in engine.lookups] == [[1], [3]]
    assert not waiting[0].done()
    assert not waiting[2].done()
    assert metrics.count_queue() == (0, 0)


async def test_request_abandoned_during_its_lookup_gets_no_result(
    engine: FakeEngine, make_batcher: MakeBatcher, metrics: ModelMetrics
) -> None:
    batcher, running = await busy_batcher(engine, make_batcher, IN_THREAD, ONE)
    assert running.pending.queue is None
    running.pending.abandon()
    engine.release()
    await submit(batcher, engine.request(ONE))
    assert not running.done()
    assert metrics.count_queue() == (0, 0)


async def test_abandoned_requests_are_freed_during_a_long_lookup(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    """Checks that memory is freed even during a long lookup: requests at the head of the queue keep
    no later ones alive."""
    batcher, running = await busy_batcher(engine, make_batcher, IN_THREAD, ONE)
    first = submit(batcher, engine.request(ONE))
    abandoned = []
    for _ in range(3 * MANY):
        waiting = submit(batcher, engine.request(ONE))
        abandoned.append(weakref.ref(waiting))
        waiting.pending.abandon()
    del waiting
    gc.collect()
    assert not any(ref() for ref in abandoned)
    engine.release()
    await asyncio.gather(running, first)


async def test_remaining_requests_stay_in_order_when_others_are_abandoned(
    engine: FakeEngine, make_batcher: MakeBatcher, metrics: ModelMetrics
) -> None:
    batcher, running = await busy_batcher(engine, make_batcher, IN_THREAD, ONE)
    waiting = [submit(batcher, engine.request({"user": [[i % 7]]})) for i in range(2 * MANY + 10)]
    remaining = waiting[:: len(waiting) // 5]
    for one in waiting:
        if one not in remaining:
            one.pending.abandon()
    assert metrics.count_queue() == (len(remaining), len(remaining))
    engine.release()
    await asyncio.gather(running, *remaining)
    ids = [waiting.index(one) % 7 for one in remaining]
    assert [lookup.ids.tolist() for lookup in engine.lookups] == [[1], ids]


async def test_full_queue_reopens_once_enough_requests_are_abandoned(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    limits = Limits(inline_bytes_max=0, queue_examples_max=16)
    batcher, running = await busy_batcher(engine, make_batcher, limits, ONE)
    rooms: list[bool] = []
    batcher.queues[1].on_room = lambda: rooms.append(not batcher.has_full_queue)
    waiting = [submit(batcher, engine.request(ONE)) for _ in range(16)]
    assert not batcher.has_full_queue
    with pytest.raises(OverloadedError):
        submit(batcher, engine.request(ONE))
    assert rooms == []
    waiting[3].pending.abandon()
    assert (batcher.has_full_queue, rooms) == (True, [])
    waiting[4].pending.abandon()
    assert (batcher.has_full_queue, rooms) == (False, [True])
    waiting[5].pending.abandon()
    assert rooms == [True]  # it was not full
    engine.release()
    await asyncio.gather(running, *waiting[:3], *waiting[6:])


async def test_full_queue_reopens_when_its_batch_begins(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    limits = Limits(inline_bytes_max=0, queue_ids_max=8)
    batcher, running = await busy_batcher(engine, make_batcher, limits, ONE)
    has_room = asyncio.Event()
    batcher.queues[1].on_room = has_room.set
    waiting = [submit(batcher, engine.request(ONE)) for _ in range(8)]
    with pytest.raises(OverloadedError):
        submit(batcher, engine.request(ONE))
    assert not has_room.is_set()
    engine.release()
    await asyncio.wait_for(has_room.wait(), WAIT_S_MAX)
    await asyncio.gather(running, *waiting)


@pytest.mark.parametrize("limits", [Limits(), IN_THREAD])
async def test_batch_end_is_notified_once_after_its_requests_are_done(
    engine: FakeEngine, make_batcher: MakeBatcher, limits: Limits
) -> None:
    batcher = make_batcher(limits)
    notified: list[list[bool]] = []
    waiting = [submit(batcher, engine.request(ONE)) for _ in range(3)]
    batcher.runner.on_batch_done = lambda: notified.append([one.done() for one in waiting])
    await asyncio.gather(*waiting)
    assert notified == [[True] * 3]


def failing_bags(engine: FakeEngine) -> Bags:
    engine.failure = RuntimeError("on order")
    return ONE


@pytest.mark.parametrize(
    ("bags_of", "error"),
    [(failing_bags, EngineError), (lambda engine: {"user": [[99]]}, InvalidRequestError)],
)
@pytest.mark.parametrize("limits", [Limits(), IN_THREAD])
async def test_batch_end_is_notified_if_the_batch_fails(
    engine: FakeEngine,
    make_batcher: MakeBatcher,
    limits: Limits,
    bags_of: Callable[[FakeEngine], Bags],
    error: type[Exception],
) -> None:
    batcher = make_batcher(limits)
    notified: list[bool] = []
    waiting = submit(batcher, engine.request(bags_of(engine)))
    batcher.runner.on_batch_done = lambda: notified.append(waiting.done())
    with pytest.raises(error):
        await waiting
    assert notified == [True]


async def test_batch_end_is_notified_if_all_requests_expired(
    engine: FakeEngine, make_batcher: MakeBatcher, caplog: pytest.LogCaptureFixture
) -> None:
    batcher = make_batcher(Limits())
    has_ended = asyncio.Event()
    batcher.runner.on_batch_done = has_ended.set
    late = submit(batcher, engine.request(ONE), deadline_s=0.0)
    await asyncio.wait_for(has_ended.wait(), WAIT_S_MAX)
    assert isinstance(late.exception(), DeadlineExceededError)
    assert engine.lookups == []
    assert not caplog.messages


async def test_cancelled_requests_of_a_whole_batch_are_freed(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    batcher = make_batcher(Limits())
    cancelled = [submit(batcher, engine.request(ONE)) for _ in range(3)]
    alive = [weakref.ref(one) for one in cancelled]
    for one in cancelled:
        one.cancel()
    cancelled.clear()
    del one
    await asyncio.sleep(0)
    gc.collect()
    assert [one() for one in alive] == [None, None, None]


async def test_retired_batcher_answers_queued_requests_and_releases_its_engine(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    batcher, running = await busy_batcher(engine, make_batcher, IN_THREAD, ONE)
    waiting = submit(batcher, engine.request(ONE))
    notified: list[bool] = []
    batcher.retire(lambda: notified.append(running.done() and waiting.done()))
    assert notified == []
    engine.release()
    for answer in (running, waiting):
        assert np.array_equal((await answer).values, engine.expected(ONE))
    await until(lambda: notified)
    assert notified == [True]


async def test_batcher_retired_before_its_first_batch_answers_it(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    batcher = make_batcher(Limits())
    waiting = submit(batcher, engine.request(ONE))
    notified: list[bool] = []
    batcher.retire(lambda: notified.append(waiting.done()))
    assert np.array_equal((await waiting).values, engine.expected(ONE))
    await until(lambda: notified)
    assert notified == [True]


async def test_retired_batcher_keeps_no_rows(executor: ThreadPoolExecutor) -> None:
    engine = FakeEngine()
    batcher = Batcher(engine, engine.model, Limits(), ModelMetrics(engine.model), executor)
    await submit(batcher, engine.request(ONE))
    freed = weakref.ref(engine)
    batcher.retire(lambda: None)
    del engine
    gc.collect()
    assert freed() is None


async def test_batcher_retires_once_though_its_delay_ends_later(
    engine: FakeEngine, make_batcher: MakeBatcher, caplog: pytest.LogCaptureFixture
) -> None:
    batcher = make_batcher(Limits(delay_ms_max=5))
    submit(batcher, engine.request(ONE)).cancel()
    notified: list[bool] = []
    batcher.retire(lambda: notified.append(True))
    await asyncio.sleep(0.02)
    assert notified == [True]
    assert not caplog.records


async def test_idle_batcher_retires_immediately(make_batcher: MakeBatcher) -> None:
    notified: list[bool] = []
    make_batcher(IN_THREAD).retire(lambda: notified.append(True))
    assert notified == [True]


async def test_batcher_retires_after_its_last_request_is_cancelled(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    batcher, running = await busy_batcher(engine, make_batcher, IN_THREAD, ONE)
    waiting = submit(batcher, engine.request(ONE))
    notified: list[bool] = []
    batcher.retire(lambda: notified.append(True))
    waiting.cancel()
    engine.release()
    await running
    await until(lambda: notified)
