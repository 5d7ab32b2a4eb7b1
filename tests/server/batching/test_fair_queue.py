"""Who is taken next where many wait, and that no source takes the others' turn or room."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.callers import WaitingCaller, submit
from server.conftest import MakeBatcher
from server.fake_engine import Bags, FakeEngine, make_request
from server.waiting import until

from embedserve.batching.batcher import Batcher
from embedserve.batching.fair_queue import FairQueue
from embedserve.batching.lane import WITHDRAWN_MIN
from embedserve.config import Limits
from embedserve.errors import OverloadedError
from embedserve.metrics.metrics import ModelMetrics
from embedserve.types import LookupRequest, LookupResult


def put(queue: FairQueue, name: str, work: int, examples: int = 1) -> None:
    nobody = cast("asyncio.Future[LookupResult]", None)
    caller = WaitingCaller(nobody, source=name)
    caller.request = make_request({"user": [[1]] * examples})
    queue.put(caller, work)


def popped(queue: FairQueue, count: int) -> str:
    return "".join(str(queue.pop().source) for _ in range(count))


def test_sources_take_turns() -> None:
    queue = FairQueue()
    for name in "aaaabbc":
        put(queue, name, 10)
    assert popped(queue, 7) == "abcabaa"


def test_one_that_comes_late_gets_its_share_from_then_on() -> None:
    queue = FairQueue()
    for name in "aaaaaa":
        put(queue, name, 10)
    assert popped(queue, 3) == "aaa"
    for name in "bb":
        put(queue, name, 10)
    assert popped(queue, 5) == "babaa"


def test_shares_are_of_work_and_not_of_requests() -> None:
    queue = FairQueue()
    for _ in range(4):
        put(queue, "a", 100)
    for _ in range(20):
        put(queue, "b", 10)
    assert Counter(popped(queue, 13)) == {"a": 2, "b": 11}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), max_size=60))
def test_while_two_wait_they_are_given_alike(asked: list[tuple[str, int]]) -> None:
    """But for what one request of each makes; each in the order that it asked in."""
    queue = FairQueue()
    left: dict[object, list[int]] = {name: [] for name in "abc"}
    for name, work in asked:
        put(queue, name, work, examples=work)
        left[name].append(work)
    had = Counter[object]()
    while queue:
        waiting = [name for name in "abc" if left[name]]
        for name in "abc":
            assert queue.held_by(name) == (sum(left[name]), sum(left[name]))
            assert all(name not in waiting or had[name] <= had[other] + 50 for other in waiting)
        caller = queue.pop()
        assert caller.request.batch_size == left[caller.source].pop(0)
        had[caller.source] += caller.request.batch_size
    assert not any(left.values())


def test_those_that_are_dropped_are_held_no_more() -> None:
    queue = FairQueue()
    for name in "aabab":
        put(queue, name, 10)
    queue.keep(lambda caller: caller.source == "b")
    assert (queue.held_by("a"), queue.held_by("b")) == ((0, 0), (2, 2))
    assert popped(queue, 2) == "bb"


ONE: Bags = {"user": [[1]]}


def one_id(engine: FakeEngine, number: int = 1) -> LookupRequest:
    return engine.request({"user": [[number]]})


async def busy(engine: FakeEngine, make_batcher: MakeBatcher, limits: Limits) -> Batcher:
    """A batcher whose engine is held at work on a request of id 0."""
    batcher = make_batcher(limits)
    engine.hold()
    submit(batcher, one_id(engine, 0))
    await until(lambda: engine.lookups)
    return batcher


async def test_one_with_many_requests_does_not_keep_another_waiting(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    """Of batches of four ids."""
    batcher = await busy(engine, make_batcher, Limits(inline_bytes_max=0, batch_ids_max=4))
    answers = [submit(batcher, one_id(engine, 1), source="a") for _ in range(8)]
    engine.release()
    await until(lambda: len(engine.lookups) > 1)
    engine.hold()
    answers += [submit(batcher, one_id(engine, 1), source="a") for _ in range(8)]
    answers.append(submit(batcher, one_id(engine, 2), source="b"))
    engine.release()
    results = await asyncio.gather(*answers)
    ids = [lookup.ids.tolist() for lookup in engine.lookups]
    assert sum(map(len, ids)) == 1 + len(answers)
    assert 2 in ids[2] + ids[3]  # and not in the last
    assert np.array_equal(results[-1].values, engine.expected({"user": [[2]]}))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            Limits(inline_bytes_max=0, queue_examples_max=16),
            "holds 8 examples of this connection, 1 more pass its share of 8",
        ),
        (
            Limits(inline_bytes_max=0, queue_ids_max=17),
            "holds 8 ids of this connection, 1 more pass its share of 8",
        ),
    ],
)
async def test_no_source_fills_the_queue(
    engine: FakeEngine, make_batcher: MakeBatcher, limits: Limits, message: str
) -> None:
    batcher = await busy(engine, make_batcher, limits)
    answers = [submit(batcher, one_id(engine), source="a") for _ in range(8)]
    with pytest.raises(OverloadedError, match=message):
        submit(batcher, one_id(engine), source="a")
    assert batcher.is_open
    answers += [submit(batcher, one_id(engine), source="b") for _ in range(8)]
    engine.release()
    await asyncio.gather(*answers)
    await submit(batcher, one_id(engine), source="a")


async def test_a_lone_request_over_its_share_is_taken(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    batcher = await busy(engine, make_batcher, Limits(inline_bytes_max=0, queue_examples_max=4))
    bags: Bags = {"user": [[1], [2], [3], [4]]}
    answer = submit(batcher, engine.request(bags), source="a")
    engine.release()
    assert np.array_equal((await answer).values, engine.expected(bags))


async def test_one_who_goes_away_from_the_backlog_leaves_the_others_there(
    engine: FakeEngine, make_batcher: MakeBatcher, metrics: ModelMetrics
) -> None:
    limits = Limits(inline_bytes_max=0, queue_examples_max=2 * WITHDRAWN_MIN)
    batcher = await busy(engine, make_batcher, limits)
    answers = [submit(batcher, one_id(engine, i % 7), source="a") for i in range(WITHDRAWN_MIN)]
    with pytest.raises(OverloadedError, match="share"):
        submit(batcher, one_id(engine), source="a")
    answers += [submit(batcher, one_id(engine, i % 7), source="b") for i in range(9)]
    stay = answers[::200]
    for one in answers:
        if one not in stay:
            one.caller.go_away()
    assert metrics.queued_requests == len(stay)
    engine.release()
    await asyncio.gather(*stay)
    assert sum(lookup.batch_size for lookup in engine.lookups) == 1 + len(stay)
    assert metrics.queued_requests == 0
    assert not any(one.done() for one in answers if one not in stay)
