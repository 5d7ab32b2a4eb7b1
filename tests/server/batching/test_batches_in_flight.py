"""Tests of an engine that waits for its device: it gets the next batch before it returns the
last."""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from server.batching.batch_limits import ONE_BYTES
from server.fake_engine import Bags, FakeEngine
from server.pending_requests import Waiting, submit
from server.waiting import until

from embedserve.batching.batcher import BATCHES_PER_REPLICA, Batcher
from embedserve.batching.lookup_engine import RemoteLookups
from embedserve.batching.shadow import ShadowExecutor
from embedserve.config import Limits
from embedserve.engine.replicas import Replicas
from embedserve.metrics.model_metrics import ModelMetrics

USER: Bags = {"user": [[1, 2, 3]]}


@pytest.fixture
def batcher(engine: FakeEngine) -> Iterator[Batcher]:
    engine.waits_for_device = True
    with ThreadPoolExecutor(BATCHES_PER_REPLICA + 1) as executor:
        yield Batcher(engine, engine.model, Limits(), ModelMetrics(engine.model), executor)
        engine.release()


async def fill(batcher: Batcher, engine: FakeEngine) -> list[Waiting]:
    """Submits as many requests as may be looked up concurrently, each in a batch that is held."""
    engine.hold()
    running: list[Waiting] = []
    while len(running) < BATCHES_PER_REPLICA:
        running.append(submit(batcher, engine.request(USER)))
        await until(lambda: len(engine.lookups) == len(running))
    return running


async def test_requests_queued_while_the_device_is_full_form_one_batch(
    engine: FakeEngine, batcher: Batcher
) -> None:
    running = await fill(batcher, engine)
    waiting = [submit(batcher, engine.request(USER)) for _ in range(5)]
    await asyncio.sleep(0.02)
    assert [lookup.batch_size for lookup in engine.lookups] == [1] * BATCHES_PER_REPLICA
    assert not any(lookup.is_inline for lookup in engine.lookups)
    engine.release()
    for answer in [*running, *waiting]:
        assert np.array_equal((await answer).values, engine.expected(USER))
    assert [lookup.batch_size for lookup in engine.lookups] == [*[1] * BATCHES_PER_REPLICA, 5]


async def test_large_requests_wait_until_small_ones_leave_room_on_the_device(
    engine: FakeEngine,
) -> None:
    engine.waits_for_device = True
    limits, metrics = Limits(inline_bytes_max=ONE_BYTES), ModelMetrics(engine.model)
    engine.hold()
    with ThreadPoolExecutor(BATCHES_PER_REPLICA + 1) as executor:
        try:
            batcher = Batcher(engine, engine.model, limits, metrics, executor)
            answers: list[Waiting] = []
            while len(answers) < BATCHES_PER_REPLICA:
                answers.append(submit(batcher, engine.request({"user": [[1]]})))
                await until(lambda: len(engine.lookups) == len(answers))
            answers.append(submit(batcher, engine.request(USER)))
            await asyncio.sleep(0.02)
            assert len(engine.lookups) == BATCHES_PER_REPLICA
        finally:
            engine.release()
        await asyncio.gather(*answers)


class OnTwoGpus:
    """An engine whose replicas are two fake engines."""

    waits_for_device = True
    remote: RemoteLookups | None = None

    def __init__(self, each: Sequence[FakeEngine]) -> None:
        self.replicas = len(each)
        self.rows_reader = each[0].rows_reader
        self.lookup = Replicas(one.lookup for one in each).lookup
        self.to_float16 = each[0].to_float16
        self.check = each[0].check


async def test_each_replica_has_the_maximum_of_batches_in_flight(engine: FakeEngine) -> None:
    each = [engine, FakeEngine(engine.model)]
    both = OnTwoGpus(each)
    batches_max = BATCHES_PER_REPLICA * len(each)
    for one in each:
        one.hold()
    with ThreadPoolExecutor(batches_max) as executor:
        batcher = Batcher(both, engine.model, Limits(), ModelMetrics(engine.model), executor)
        try:
            running: list[Waiting] = []
            while len(running) < batches_max:
                running.append(submit(batcher, engine.request(USER)))
                await until(lambda: sum(len(one.lookups) for one in each) == len(running))
            assert [len(one.lookups) for one in each] == [BATCHES_PER_REPLICA] * len(each)
            waiting = [submit(batcher, engine.request(USER)) for _ in range(3)]
            await asyncio.sleep(0.02)
            assert [len(one.lookups) for one in each] == [BATCHES_PER_REPLICA] * len(each)
        finally:
            for one in each:
                one.release()
        for answer in [*running, *waiting]:
            assert np.array_equal((await answer).values, engine.expected(USER))
    assert sum(len(one.lookups) for one in each) == batches_max + 1


async def test_retired_batcher_ends_after_its_batches_in_flight(
    engine: FakeEngine, batcher: Batcher
) -> None:
    running = await fill(batcher, engine)
    notified: list[bool] = []
    batcher.retire(lambda: notified.append(all(one.done() for one in running)))
    assert notified == []
    engine.release()
    await asyncio.gather(*running)
    await until(lambda: notified)
    assert notified == [True]


async def test_engine_rounds_to_float16_only_if_all_requests_want_it(
    engine: FakeEngine, batcher: Batcher
) -> None:
    """Checks that the engine rounds if all requests of a batch want float16. Half the bytes then
    come from the device."""
    requests = [engine.request(USER) for _ in range(4)]
    for request in requests[:3]:
        request.output_dtype = "float16"
    rounded = await asyncio.gather(*(submit(batcher, one) for one in requests[:2]))
    both = await asyncio.gather(*(submit(batcher, one) for one in requests[2:]))
    assert [lookup.as_float16 for lookup in engine.lookups] == [True, False]
    expected = engine.expected(USER)
    for result in (*rounded, both[0]):
        assert result.values.dtype == np.float16
        assert np.array_equal(result.values, expected.astype(np.float16))
    assert np.array_equal(both[1].values, expected)


async def test_batch_with_a_shadow_is_looked_up_as_float32(
    engine: FakeEngine, batcher: Batcher
) -> None:
    batcher.runner.shadow = batcher.runner.shadow_of(engine.model, 100, ShadowExecutor())
    request = engine.request(USER)
    request.output_dtype = "float16"
    assert (await submit(batcher, request)).values.dtype == np.float16
    assert not engine.lookups[0].as_float16
