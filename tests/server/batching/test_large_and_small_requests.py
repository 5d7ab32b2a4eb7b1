"""Tests of large and small requests: neither waits for the other."""

import asyncio
from unittest.mock import Mock

import numpy as np
import pytest
from server.batching.batch_limits import ONE_BYTES, USER, busy_batcher
from server.conftest import MakeBatcher
from server.fake_engine import Bags, FakeEngine
from server.pending_requests import submit
from server.waiting import until

from embedserve.batching.batcher import Batcher
from embedserve.config import Limits
from embedserve.errors import OverloadedError
from embedserve.lookup_types import LookupRequest
from embedserve.metrics.model_metrics import ModelMetrics

LARGE, SMALL = (1, 100), (1, 1)
"""(bags, ids) of requests."""


async def test_small_requests_do_not_wait_for_a_large_request(
    engine: FakeEngine, make_batcher: MakeBatcher, metrics: ModelMetrics
) -> None:
    small: Bags = {"user": [[1]]}
    limits = Limits(inline_bytes_max=ONE_BYTES)
    batcher, first = await busy_batcher(engine, make_batcher, limits)
    second = submit(batcher, engine.request(USER))
    assert metrics.count_queue() == (1, 1)
    assert np.array_equal(
        (await submit(batcher, engine.request(small))).values, engine.expected(small)
    )
    assert not first.done()
    assert [lookup.is_inline for lookup in engine.lookups] == [False, True]
    engine.release()
    for answer in (first, second):
        assert np.array_equal((await answer).values, engine.expected(USER))


async def test_large_requests_fill_only_their_own_queue(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    small: Bags = {"user": [[1]]}
    limits = Limits(inline_bytes_max=ONE_BYTES, queue_examples_max=2)
    batcher, running = await busy_batcher(engine, make_batcher, limits)
    large = engine.request(USER)
    answers = [running, *(submit(batcher, engine.request(USER)) for _ in range(2))]
    batcher.queue_for(*LARGE).check_not_full()
    with pytest.raises(OverloadedError, match=r"large requests holds 2 examples; 1 more would"):
        submit(batcher, engine.request(USER))
    assert batcher.has_full_queue
    for attempt in (
        lambda: batcher.queue_for(*LARGE).check_not_full(),
        lambda: submit(batcher, large),
    ):
        with pytest.raises(OverloadedError, match=r"large requests is full: it holds 2 examples"):
            attempt()
    batcher.unsized_queue.check_not_full()
    batcher.queue_for(*SMALL).check_not_full()
    result = await submit(batcher, engine.request(small))
    assert np.array_equal(result.values, engine.expected(small))
    engine.release()
    await asyncio.gather(*answers)
    batcher.queue_for(*LARGE).check_not_full()
    await submit(batcher, large)


async def test_large_batch_of_small_requests_runs_during_a_large_request(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    small: Bags = {"user": [[1]]}
    batcher = make_batcher(Limits(inline_bytes_max=ONE_BYTES))
    engine.hold()
    answers = [submit(batcher, engine.request(bags)) for bags in (USER, small, small)]
    await until(lambda: len(engine.lookups) == 2)
    assert sorted(lookup.batch_size for lookup in engine.lookups) == [1, 2]
    engine.release()
    for answer, bags in zip(answers, (USER, small, small), strict=True):
        assert np.array_equal((await answer).values, engine.expected(bags))


@pytest.mark.parametrize("bags", [({"user": [[1]]}, USER), (USER, {"user": [[1]]})])
async def test_event_loop_is_idle_while_requests_wait_for_a_lookup(
    engine: FakeEngine,
    make_batcher: MakeBatcher,
    monkeypatch: pytest.MonkeyPatch,
    bags: tuple[Bags, Bags],
) -> None:
    steps = Mock(side_effect=Batcher._step)
    monkeypatch.setattr(Batcher, "_step", lambda batcher: steps(batcher))
    batcher = make_batcher(Limits(inline_bytes_max=ONE_BYTES))
    waiting, other = (engine.request(one) for one in bags)
    engine.hold()
    answers = [submit(batcher, waiting) for _ in range(2)]  # a large batch of either size
    await until(lambda: engine.lookups)
    answers += [submit(batcher, waiting), submit(batcher, other)]
    await until(lambda: len(engine.lookups) >= 2)
    await asyncio.sleep(0.01)
    before = steps.call_count
    await asyncio.sleep(0.01)
    assert steps.call_count == before
    assert len(engine.lookups) == 2
    engine.release()
    await asyncio.gather(*answers)


async def test_request_that_does_not_fit_blocks_no_smaller_requests(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    limits = Limits(inline_bytes_max=ONE_BYTES, queue_ids_max=100)
    batcher = make_batcher(limits)
    engine.hold()
    answers = [submit(batcher, ids(engine, 10))]
    await until(lambda: engine.lookups)
    answers.append(submit(batcher, ids(engine, 40), source="a"))
    with pytest.raises(OverloadedError, match="40 ids of this caller; 50 more would exceed"):
        submit(batcher, ids(engine, 50), source="a")
    with pytest.raises(OverloadedError, match="holds 40 ids; 70 more would exceed its limit"):
        submit(batcher, ids(engine, 70), source="b")
    batcher.queue_for(*LARGE).check_not_full()
    answers.append(submit(batcher, ids(engine, 48), source="c"))
    with pytest.raises(OverloadedError, match="holds 88 ids; 20 more would exceed its limit"):
        submit(batcher, ids(engine, 20), source="d")
    assert batcher.has_full_queue
    engine.release()
    await asyncio.gather(*answers)
    batcher.queue_for(*LARGE).check_not_full()


def ids(engine: FakeEngine, count: int) -> LookupRequest:
    return engine.request({"user": [[1] * count]})
