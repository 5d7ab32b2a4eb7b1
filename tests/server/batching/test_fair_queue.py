"""Tests of the fair queue: the order of requests, and the share of each source."""

import asyncio
import gc
import weakref
from collections import Counter
from itertools import combinations
from random import Random
from typing import cast
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.batching.batch_limits import busy_batcher
from server.conftest import MakeBatcher
from server.fake_engine import Bags, FakeEngine, make_request
from server.pending_requests import FutureRequest, submit
from server.waiting import until

from embedserve.batching.fair_queue import FairQueue
from embedserve.config import Limits
from embedserve.errors import OverloadedError
from embedserve.lookup_types import LookupRequest, LookupResult
from embedserve.metrics.model_metrics import ModelMetrics

WORK_MAX = 50
MANY = 1024
"""Requests of one source that are abandoned."""


class Queued:
    """A fair queue with as many units of work as examples in each request."""

    def __init__(self, names: str = "", work: int = 10) -> None:
        self.queue = FairQueue()
        for name in names:
            self.put(name, work)

    def put(self, name: object, work: int = 10) -> FutureRequest:
        no_future = cast("asyncio.Future[LookupResult]", None)
        pending = FutureRequest(no_future, source=name)
        pending.request = make_request({"user": [[1]] * work})
        self.queue.put(pending)
        return pending

    def pop(self) -> FutureRequest:
        pending = self.queue.first()
        assert isinstance(pending, FutureRequest)
        self.queue.pop(pending.request.batch_size)
        return pending

    def names(self, count: int) -> str:
        return "".join(str(self.pop().source) for _ in range(count))


def test_sources_take_turns() -> None:
    assert Queued("aaaabbc").names(7) == "abcabaa"


def test_late_source_gets_its_share_from_then_on() -> None:
    queued = Queued("aaaaaa")
    assert queued.names(3) == "aaa"
    for _ in range(2):
        queued.put("b")
    assert queued.names(5) == "babaa"


def test_shares_count_work_instead_of_requests() -> None:
    queued = Queued("aaaa", work=100)
    for _ in range(20):
        queued.put("b", 10)
    assert Counter(queued.names(13)) == {"a": 2, "b": 11}


def test_source_that_requests_again_each_time_gets_only_its_share() -> None:
    """Covers a source whose queue is briefly empty, and one with a request more than it has
    taken."""
    for waiting in ("abbbbb", "aabbbbb"):
        queued = Queued(waiting)
        served = ""
        for _ in range(8):
            served += queued.names(1)
            if served[-1] == "a":
                queued.put("a")
        assert served == "abababab"


def test_source_gains_nothing_from_a_request_that_does_not_fit_into_a_batch() -> None:
    """Covers a source that requests again after each batch, while a larger request of another has
    to wait for the next batch: it does not wait forever."""
    queued = Queued("a", work=10)
    for _ in range(4):
        queued.put("b", 50)
    served = ""
    for _ in range(20):
        served += queued.names(1)
        queued.queue.first()  # has no room in this batch
        if served[-1] == "a":
            queued.put("a")
    assert Counter(served) == {"a": 16, "b": 4}


def test_empty_queue_keeps_no_source_alive() -> None:
    queued, connection = Queued(), Mock()
    source = weakref.ref(connection)
    withdrawn = queued.put(connection)
    assert queued.queue.withdraw(withdrawn)
    del connection, withdrawn
    gc.collect()
    assert source() is None


def test_withdrawn_requests_do_not_count_against_their_source() -> None:
    queued = Queued()
    withdrawn = [queued.put("a") for _ in range(20)]
    for _ in range(5):
        queued.put("b")
    assert queued.names(2) == "ab"
    assert all(queued.queue.withdraw(one) for one in withdrawn[1:])
    assert queued.queue.held_by("a") == (0, 0)
    queued.put("a")
    assert queued.names(5) == "abbbb"
    assert not queued.queue.withdraw(withdrawn[0])


NewRequest = st.tuples(st.sampled_from("abc"), st.integers(1, WORK_MAX))
Step = NewRequest | st.sampled_from(["take", "give up"])


@given(st.lists(Step, max_size=80), st.randoms(use_true_random=False))
def test_two_waiting_sources_get_equal_work(
    steps: list[tuple[str, int] | str], random: Random
) -> None:
    """Checks that two waiting sources get equal work, up to one request of each, in the order of
    their requests."""
    queued = Queued()
    waiting: dict[object, list[FutureRequest]] = {name: [] for name in "abc"}
    received = Counter[object]()
    differences = dict.fromkeys(combinations("abc", 2), 0)  # difference when both began to wait
    for step in [*steps, *["take"] * len(steps)]:
        alive = [pending for requests in waiting.values() for pending in requests]
        assert len(queued.queue.source_of) == len(alive)
        if isinstance(step, tuple):
            waiting[step[0]].append(queued.put(*step))
        elif alive and step == "give up":
            pending = random.choice(alive)
            waiting[pending.source].remove(pending)
            assert queued.queue.withdraw(pending)
        elif alive:
            pending = queued.pop()
            assert pending is waiting[pending.source].pop(0)
            received[pending.source] += pending.request.batch_size
        for name, requests in waiting.items():
            work = sum(one.request.batch_size for one in requests)
            assert queued.queue.held_by(name) == (work, work)
        for one, other in differences:
            if waiting[one] and waiting[other]:
                assert (
                    abs(received[one] - received[other] - differences[one, other]) <= 2 * WORK_MAX
                )
            else:
                differences[one, other] = received[one] - received[other]
    assert queued.queue.first() is None


ZERO: Bags = {"user": [[0]]}


def one_id(engine: FakeEngine, number: int = 1) -> LookupRequest:
    return engine.request({"user": [[number]]})


async def test_source_with_many_requests_does_not_delay_other_sources(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    """Checks this with batches of four ids."""
    limits = Limits(inline_bytes_max=0, batch_ids_max=4)
    batcher, _ = await busy_batcher(engine, make_batcher, limits, ZERO)
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
            "holds 8 examples of this caller; 1 more would exceed its share of 8",
        ),
        (
            Limits(inline_bytes_max=0, queue_ids_max=17),
            "holds 8 ids of this caller; 1 more would exceed its share of 8",
        ),
    ],
)
async def test_no_source_fills_the_queue(
    engine: FakeEngine, make_batcher: MakeBatcher, limits: Limits, message: str
) -> None:
    batcher, _ = await busy_batcher(engine, make_batcher, limits, ZERO)
    answers = [submit(batcher, one_id(engine), source="a") for _ in range(8)]
    with pytest.raises(OverloadedError, match=message):
        submit(batcher, one_id(engine), source="a")
    assert not batcher.has_full_queue
    answers += [submit(batcher, one_id(engine), source="b") for _ in range(8)]
    engine.release()
    await asyncio.gather(*answers)
    await submit(batcher, one_id(engine), source="a")


async def test_lone_request_over_its_share_is_accepted(
    engine: FakeEngine, make_batcher: MakeBatcher
) -> None:
    limits = Limits(inline_bytes_max=0, queue_examples_max=4)
    batcher, _ = await busy_batcher(engine, make_batcher, limits, ZERO)
    bags: Bags = {"user": [[1], [2], [3], [4]]}
    answer = submit(batcher, engine.request(bags), source="a")
    engine.release()
    assert np.array_equal((await answer).values, engine.expected(bags))


async def test_abandoned_requests_leave_other_queued_requests_in_place(
    engine: FakeEngine, make_batcher: MakeBatcher, metrics: ModelMetrics
) -> None:
    limits = Limits(inline_bytes_max=0, queue_examples_max=2 * MANY)
    batcher, _ = await busy_batcher(engine, make_batcher, limits, ZERO)
    answers = [submit(batcher, one_id(engine, i % 7), source="a") for i in range(MANY)]
    with pytest.raises(OverloadedError, match="share"):
        submit(batcher, one_id(engine), source="a")
    answers += [submit(batcher, one_id(engine, i % 7), source="b") for i in range(9)]
    remaining = answers[::200]
    for one in answers:
        if one not in remaining:
            one.pending.abandon()
    assert metrics.count_queue()[0] == len(remaining)
    engine.release()
    await asyncio.gather(*remaining)
    assert sum(lookup.batch_size for lookup in engine.lookups) == 1 + len(remaining)
    assert metrics.count_queue()[0] == 0
    assert not any(one.done() for one in answers if one not in remaining)
