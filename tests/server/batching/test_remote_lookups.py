"""Tests of an engine whose lookups run on other servers: several batches in flight, and no
thread."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import numpy as np
import pytest
from server.batching.batch_limits import ONE_BYTES
from server.fake_engine import Bags, FakeEngine
from server.pending_requests import FutureRequest, Waiting, submit
from server.waiting import until

from embedserve.batching.batcher import Batcher
from embedserve.batching.shadow import Shadow
from embedserve.config import Limits
from embedserve.errors import EmbedServeError, EngineError, NotReadyError
from embedserve.lookup_types import Batch
from embedserve.metrics.model_metrics import ModelMetrics
from embedserve.tracing.trace_context import TraceContext

USER: Bags = {"user": [[1, 2, 3]]}
Finish = Callable[[np.ndarray | EmbedServeError], None]


class RemoteServers:
    """Lookups that end when the test says so.

    Attributes:
        begun: batches in flight, their deadlines, and how to end them.
        failure: exception that a lookup raises when it begins.
        traces_calls: set it before a batcher has this object.
    """

    batches_max = 3
    traces_calls = False

    def __init__(self) -> None:
        self.begun: list[tuple[Batch, float, Finish]] = []
        self.failure: Exception | None = None

    def begin(self, batch: Batch, deadline_s: float, finish: Finish) -> None:
        if self.failure is not None:
            raise self.failure
        self.begun.append((batch, deadline_s, finish))


@pytest.fixture
def servers(engine: FakeEngine) -> RemoteServers:
    servers = engine.remote = RemoteServers()
    return servers


@pytest.fixture
def batcher(engine: FakeEngine, servers: RemoteServers) -> Iterator[Batcher]:
    with ThreadPoolExecutor(1) as executor:
        executor.shutdown()  # no lookup may run in it
        yield Batcher(engine, engine.model, Limits(), ModelMetrics(engine.model), executor)


class OfferedBatches(Shadow):
    """A shadow that counts the batches that it could compare."""

    def __init__(self) -> None:
        self.count = 0

    def offer(self, *_: object) -> None:
        self.count += 1


class TracedRequest(FutureRequest):
    """A request with a trace context, or with None because it is not traced."""

    __slots__ = ("context",)

    def __init__(self, context: TraceContext | None) -> None:
        super().__init__(asyncio.Future())
        self.context = context

    @property
    def trace(self) -> TraceContext | None:
        return self.context


def lookup_values(engine: FakeEngine, batch: Batch) -> np.ndarray:
    return engine.lookup(batch.ids, batch.lengths, batch.weights)


async def fill_servers(
    batcher: Batcher, engine: FakeEngine, servers: RemoteServers
) -> list[Waiting]:
    """Submits requests one at a time until as many batches as allowed are in flight."""
    running: list[Waiting] = []
    while len(running) < servers.batches_max:
        running.append(submit(batcher, engine.request(USER)))
        await until(lambda: len(servers.begun) == len(running))
    return running


async def test_requests_are_batched_while_the_maximum_of_batches_is_in_flight(
    engine: FakeEngine, batcher: Batcher, servers: RemoteServers
) -> None:
    running = await fill_servers(batcher, engine, servers)
    waiting = [submit(batcher, engine.request(USER)) for _ in range(4)]
    await asyncio.sleep(0.02)
    assert len(servers.begun) == servers.batches_max
    last, _, finish = servers.begun[-1]
    finish(lookup_values(engine, last))  # in another order than they began
    assert np.array_equal((await running[-1]).values, engine.expected(USER))
    await until(lambda: len(servers.begun) == servers.batches_max + 1)
    assert servers.begun[-1][0].batch_size == 4
    for batch, _, finish in [*servers.begun[:-2], servers.begun[-1]]:
        finish(lookup_values(engine, batch))
    for one in [*running[:-1], *waiting]:
        assert np.array_equal((await one).values, engine.expected(USER))


async def test_large_requests_wait_until_batches_of_small_ones_end(
    engine: FakeEngine, servers: RemoteServers
) -> None:
    limits, metrics = Limits(inline_bytes_max=ONE_BYTES), ModelMetrics(engine.model)
    small = engine.request({"user": [[1]]})
    with ThreadPoolExecutor(1) as executor:
        batcher = Batcher(engine, engine.model, limits, metrics, executor)
        running: list[Waiting] = []
        while len(running) < servers.batches_max:
            running.append(submit(batcher, small))
            await until(lambda: len(servers.begun) == len(running))
        large = submit(batcher, engine.request(USER))
        await asyncio.sleep(0.02)
        assert len(servers.begun) == servers.batches_max
        while servers.begun:
            batch, _, finish = servers.begun.pop(0)
            finish(lookup_values(engine, batch))
        await until(lambda: servers.begun)
        [(batch, _, finish)] = servers.begun
        finish(lookup_values(engine, batch))
        await asyncio.gather(*running, large)


async def test_only_requests_with_failed_examples_are_rejected(
    engine: FakeEngine, batcher: Batcher, servers: RemoteServers
) -> None:
    await fill_servers(batcher, engine, servers)
    two = {"user": [[4], [5]]}
    waiting = [submit(batcher, engine.request(bags)) for bags in (USER, two, USER, two)]
    servers.begun[0][2](lookup_values(engine, servers.begun[0][0]))
    await until(lambda: len(servers.begun) == servers.batches_max + 1)
    batch, _, finish = servers.begun[-1]
    assert batch.sizes == [1, 2, 1, 2]
    batch.failures = [
        (np.array([2]), NotReadyError("part 0 is not available")),
        (np.array([2, 3]), NotReadyError("part 1 is not available")),
    ]
    finish(lookup_values(engine, batch))
    assert np.array_equal((await waiting[0]).values, engine.expected(USER))
    with pytest.raises(NotReadyError, match="part 0"):
        await waiting[1]
    with pytest.raises(NotReadyError, match="part 1"):
        await waiting[2]
    assert np.array_equal((await waiting[3]).values, engine.expected(two))


async def test_only_requests_with_missing_rows_report_missing_ids(
    engine: FakeEngine, batcher: Batcher, servers: RemoteServers
) -> None:
    """Checks also that no shadow compares their batch."""
    shadow = batcher.runner.shadow = OfferedBatches()
    await fill_servers(batcher, engine, servers)
    waiting = [submit(batcher, engine.request(USER)) for _ in range(3)]
    servers.begun[0][2](lookup_values(engine, servers.begun[0][0]))
    await until(lambda: len(servers.begun) == servers.batches_max + 1)
    assert shadow.count == 1
    batch, _, finish = servers.begun[-1]
    batch.missing_counts = np.array([[0, 0, 0], [1, 0, 2], [0, 3, 0]])
    batch.failures = [(np.array([2]), NotReadyError("part 0 is not available"))]
    finish(lookup_values(engine, batch))
    assert (await waiting[0]).missing_ids is None
    first, _, last = engine.model.features
    assert (await waiting[1]).missing_ids == {first: 1, last: 2}
    with pytest.raises(NotReadyError):
        await waiting[2]
    running = servers.begun[1:-1]
    running[0][0].missing_counts = np.array([[1, 0, 0]])
    for batch, _, finish in running:
        finish(lookup_values(engine, batch))
    assert shadow.count == 2


async def test_error_fails_the_whole_batch(
    engine: FakeEngine, batcher: Batcher, servers: RemoteServers
) -> None:
    running = await fill_servers(batcher, engine, servers)
    servers.begun[0][2](NotReadyError("gone"))
    with pytest.raises(NotReadyError, match="gone"):
        await running[0]
    servers.failure = RuntimeError("cannot begin")
    with pytest.raises(EngineError):
        await submit(batcher, engine.request(USER))


async def test_batch_deadline_is_the_latest_of_its_requests(
    engine: FakeEngine, batcher: Batcher, servers: RemoteServers
) -> None:
    await fill_servers(batcher, engine, servers)
    assert servers.begun[0][1] == float("inf")
    now_s = perf_counter()
    for deadline_s in (now_s + 50, now_s + 70, now_s + 60):
        submit(batcher, engine.request(USER), deadline_s)
    servers.begun[0][2](lookup_values(engine, servers.begun[0][0]))
    await until(lambda: len(servers.begun) == servers.batches_max + 1)
    assert servers.begun[-1][1] == now_s + 70


@pytest.mark.parametrize(
    ("traces_calls", "is_traced"), [(True, True), (True, False), (False, True)]
)
async def test_calls_are_recorded_only_for_a_batch_with_a_traced_request(
    engine: FakeEngine, servers: RemoteServers, traces_calls: bool, is_traced: bool
) -> None:
    servers.traces_calls = traces_calls
    first, second = (TraceContext(digit * 32, "", True) for digit in "ab")
    with ThreadPoolExecutor(1) as executor:
        batcher = Batcher(engine, engine.model, Limits(), ModelMetrics(engine.model), executor)
        contexts = (None, first, second) if is_traced else (None, None)
        requests = [TracedRequest(one) for one in contexts]
        for pending in requests:
            batcher.enqueue(engine.request(USER), pending)
        await until(lambda: servers.begun)
        [(batch, _, finish)] = servers.begun
        assert batch.batch_size == len(contexts)
        if traces_calls and is_traced:
            assert batch.calls is not None
            assert batch.calls.trace is first
        else:
            assert batch.calls is None
        for pending in requests:
            assert pending.ticket is not None
            assert pending.ticket.calls is batch.calls
        finish(lookup_values(engine, batch))
        await asyncio.gather(*(pending.future for pending in requests))
