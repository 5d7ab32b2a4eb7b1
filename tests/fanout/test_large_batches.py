"""Tests of large batches of a router: threads divide and add them, and few are in flight."""

import asyncio
import threading
from functools import partial
from pathlib import Path
from time import monotonic, perf_counter

import numpy as np
import pytest
from fanout.conftest import Published
from fanout.local_shards import LocalShards, batch_of, on_loop, routed
from server.gate import Gate
from server.thread_limit import make_thread_start_fail
from waits import wait_until

from embedserve.errors import EmbedServeError, EngineError
from embedserve.fanout import parted_version, values_budget
from embedserve.fanout.parted_version import PartedBatch
from embedserve.fanout.partition import Partition
from embedserve.fanout.pooled_batch import DenseBatch, PackedBatch
from embedserve.fanout.router_engine import RouterEngine
from embedserve.fanout.unpooled_batch import UnpooledBatch
from embedserve.fanout.values_budget import ValuesBudget
from embedserve.lookup_types import Batch
from embedserve.on_missing import MissingPolicy
from embedserve.shard_client.reply import lost

PARTS = 4
EXAMPLES = 5
all_kinds = pytest.mark.parametrize("kind", [PackedBatch, DenseBatch, UnpooledBatch])


def store_for(kind: type[PartedBatch], published: Published, patch: pytest.MonkeyPatch) -> Path:
    """Returns the store of a model whose batches are of ``kind``."""
    patch.setattr(parted_version, "DENSE_SHARE", 0.01 if kind is DenseBatch else 2)
    return published(kind is not UnpooledBatch, PARTS, "float32")


def ids_of(engine: RouterEngine, ids_per_bag: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rows = np.repeat(engine.manifest.rows_per_feature, ids_per_bag * EXAMPLES)
    lengths = np.full(rows.size // ids_per_bag, ids_per_bag, np.int32)
    return np.random.default_rng(0).integers(0, rows), lengths


@all_kinds
def test_large_batches_are_divided_and_merged_in_threads(
    published: Published, monkeypatch: pytest.MonkeyPatch, kind: type[PartedBatch]
) -> None:
    store = store_for(kind, published, monkeypatch)
    threads: dict[str, int] = {}

    def record_thread(kind: type, name: str) -> None:
        method = getattr(kind, name)

        def recording_method(*arguments: object) -> object:
            threads[name] = threading.get_ident()
            return method(*arguments)

        monkeypatch.setattr(kind, name, recording_method)

    record_thread(Partition, "divide")
    record_thread(kind, "merge")
    found, used = [], []
    for inline_bytes_max in (1 << 30, 0):
        shards = LocalShards(store)
        with routed(shards, inline_bytes_max=inline_bytes_max) as engine:
            loop_thread = on_loop(shards, threading.get_ident)
            found.append(batch_of(engine, *ids_of(engine))[1])
            used.append([thread == loop_thread for thread in threads.values()])
    assert np.array_equal(found[0], found[1])
    assert used == [[True, True], [False, False]]


@all_kinds
def test_ids_of_a_failed_part_are_counted_in_a_thread(
    published: Published, monkeypatch: pytest.MonkeyPatch, kind: type[PartedBatch]
) -> None:
    store = store_for(kind, published, monkeypatch)
    threads: list[int] = []
    count_ids_on = kind.count_ids_on

    def record_thread(batch: PartedBatch, part: int) -> np.ndarray:
        threads.append(threading.get_ident())
        return count_ids_on(batch, part)  # type: ignore[arg-type]

    monkeypatch.setattr(kind, "count_ids_on", record_thread)
    found = []
    for inline_bytes_max in (1 << 30, 0):
        shards = LocalShards(store)
        shards.replies = dict.fromkeys([0, 2], lost("no replica"))
        zeros = MissingPolicy("zeros")
        with routed(shards, on_missing=zeros, inline_bytes_max=inline_bytes_max) as engine:
            loop_thread = on_loop(shards, threading.get_ident)
            batch, values = batch_of(engine, *ids_of(engine))
            assert batch.missing_counts is not None
            counts = batch.missing_counts.tolist()
            found.append((values.tolist(), counts, sorted(batch.missing_parts)))
            is_on_loop = [thread == loop_thread for thread in threads]
            assert is_on_loop == [inline_bytes_max > 0] * 2
            threads.clear()
    assert found[0] == found[1]
    assert found[0][2] == [0, 2]


@pytest.fixture
def store(published: Published) -> Path:
    return published(True, PARTS, "float32")


def test_batch_fails_if_no_thread_can_be_started(
    shards: LocalShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    with routed(shards, inline_bytes_max=0) as engine:
        assert shards.loop is not None
        hold = gate.before(lambda: None)
        shards.loop.call_soon_threadsafe(shards.loop.run_in_executor, None, hold)
        wait_until(lambda: gate.threads)
        make_thread_start_fail(monkeypatch, "asyncio")
        with pytest.raises(EngineError):
            batch_of(engine, *ids_of(engine))
        gate.opened.set()  # its thread takes the step that was queued
        batch_of(engine, *ids_of(engine))


@pytest.mark.parametrize("inline_bytes_max", [1 << 30, 0])
@pytest.mark.parametrize("step", ["lookups", "merge"])
@all_kinds
def test_failing_step_fails_the_batch_once_and_frees_its_budget(
    published: Published,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[PartedBatch],
    step: str,
    inline_bytes_max: int,
) -> None:
    store = store_for(kind, published, monkeypatch)

    def fail(*arguments: object) -> None:
        raise RuntimeError("step")

    monkeypatch.setattr(values_budget, "SMALL_BYTES_MAX", 0)
    shards = LocalShards(store)
    with routed(shards, inline_bytes_max=inline_bytes_max) as engine:
        expected = batch_of(engine, *ids_of(engine))[1]
        with monkeypatch.context() as patched:
            patched.setattr(kind, step, fail)
            with pytest.raises(EngineError):
                batch_of(engine, *ids_of(engine))
        assert np.array_equal(batch_of(engine, *ids_of(engine))[1], expected)
        assert on_loop(shards, lambda: shards.budget._used) == 0


def test_batches_wait_for_the_memory_budget_of_part_values(
    shards: LocalShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the budget of memory: without it, eight batches could take gigabytes.

    Each part may return almost a whole result.
    """
    monkeypatch.setattr(values_budget, "VALUES_BYTES_MAX", 1)
    monkeypatch.setattr(values_budget, "SMALL_BYTES_MAX", 0)
    with routed(shards) as engine:
        ids, lengths = ids_of(engine)
        expected = engine.lookup(ids, lengths)
        shards.called_parts.clear()
        ends: list[np.ndarray | EmbedServeError] = []
        called_parts: list[list[int]] = []
        is_done = threading.Event()

        def end(values: np.ndarray | EmbedServeError) -> None:
            called_parts.append([*shards.called_parts])
            ends.append(values)
            if len(ends) == 3:
                is_done.set()

        def begin() -> None:
            for _ in range(3):
                batch = Batch(ids, lengths, None, [EXAMPLES], EXAMPLES)
                engine.begin(batch, perf_counter() + 60, end)

        on_loop(shards, begin)
        assert is_done.wait(60)
        for values in ends:
            assert isinstance(values, np.ndarray)
            assert np.array_equal(values, expected)
        parts = len(set(shards.called_parts))
        assert [len(one) for one in called_parts] == [parts, 2 * parts, 3 * parts]


async def test_oversized_batch_begins_alone_and_small_batches_immediately(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(values_budget, "VALUES_BYTES_MAX", 10)
    monkeypatch.setattr(values_budget, "SMALL_BYTES_MAX", 2)
    budget = ValuesBudget()
    begun: list[int] = []
    for nbytes in (6, 4, 3, 99, 5, 1):
        budget.begin(nbytes, partial(begun.append, nbytes), monotonic() + 60, never)
    assert begun == [6, 4, 1]
    budget.end(6)
    assert begun == [6, 4, 1, 3]
    budget.end(1)
    budget.end(4)
    assert begun == [6, 4, 1, 3]  # in their order
    budget.end(3)
    assert begun == [6, 4, 1, 3, 99]
    budget.begin(2, partial(begun.append, 2), monotonic() + 60, never)
    assert begun[-1] == 2
    budget.end(99)
    assert begun[-1] == 5
    budget.end(2)
    budget.begin(6, never, monotonic() + 60, never)  # small batches were not counted


async def test_waiting_batch_expires_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(values_budget, "VALUES_BYTES_MAX", 10)
    monkeypatch.setattr(values_budget, "SMALL_BYTES_MAX", 0)
    budget = ValuesBudget()
    begun: list[int] = []
    expired = asyncio.Event()
    budget.begin(8, partial(begun.append, 8), monotonic() + 60, never)
    budget.begin(9, never, monotonic() + 0.01, expired.set)
    budget.begin(2, partial(begun.append, 2), monotonic() + 60, never)
    assert begun == [8]
    await asyncio.wait_for(expired.wait(), 60)
    assert begun == [8, 2]


async def test_batch_that_began_does_not_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values_budget, "VALUES_BYTES_MAX", 10)
    monkeypatch.setattr(values_budget, "SMALL_BYTES_MAX", 0)
    budget = ValuesBudget()
    events: list[str] = []
    later_expired = asyncio.Event()
    budget.begin(8, partial(events.append, "8 began"), monotonic() + 60, never)
    begin, expire = (partial(events.append, f"9 {what}") for what in ("began", "expired"))
    budget.begin(9, begin, monotonic() + 0.01, expire)
    budget.begin(10, never, monotonic() + 0.02, later_expired.set)
    budget.end(8)
    await asyncio.wait_for(later_expired.wait(), 60)
    assert events == ["8 began", "9 began"]


def never() -> None:
    raise AssertionError


@pytest.mark.parametrize(
    ("kind", "ids_per_bag"),
    [(PackedBatch, 1), (PackedBatch, 3), (DenseBatch, 7), (DenseBatch, 20), (UnpooledBatch, 3)],
)
def test_estimate_of_part_values_is_a_close_upper_bound(
    published: Published, kind: type[PartedBatch], ids_per_bag: int
) -> None:
    """Checks the estimate from above, too.

    With a larger estimate, batches would wait and use threads needlessly.
    """
    store = published(kind is not UnpooledBatch, PARTS, "float32")
    shards = LocalShards(store)
    with routed(shards) as engine:
        ids, lengths = ids_of(engine, ids_per_bag)
        batch = Batch(ids, lengths, None, [EXAMPLES], EXAMPLES)
        divided = engine._parted.divide(batch, None)
        assert type(divided) is kind
        lookups = divided.lookups()
        most = sum(4 * lookup.shape[0] * lookup.shape[1] for lookup in lookups)
        assert most <= engine._parted.values_bytes(batch, None) <= 8 * most


@pytest.mark.parametrize(("share", "is_large"), [(0.9, False), (1.1, True)])
def test_batch_of_many_vectors_without_ids_is_large(
    published: Published, share: float, is_large: bool
) -> None:
    limit = 1 << 20
    store = published(True, PARTS, "float32")
    with routed(LocalShards(store), inline_bytes_max=limit) as engine:
        vector_bytes = 4 * sum(engine.manifest.length_per_key)
        examples = int(share * limit / parted_version.COST_FACTOR / vector_bytes)
        lengths = np.zeros(len(engine.manifest.features) * examples, np.int32)
        batch = Batch(np.empty(0, np.int64), lengths, None, [examples], examples)
        assert engine._parted.is_large(batch, has_cache=False) == is_large


def test_event_loop_is_free_while_a_large_batch_is_divided(
    shards: LocalShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that dividing runs in a thread, which waits for the event loop.

    On the event loop it would block itself.
    """
    divide = Partition.divide

    def divide_slowly(self: Partition, *arguments: np.ndarray) -> object:
        assert shards.loop is not None
        iteration = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), shards.loop)
        iteration.result(60)
        return divide(self, *arguments)

    with routed(shards, inline_bytes_max=0) as engine:
        monkeypatch.setattr(Partition, "divide", divide_slowly)
        batch_of(engine, *ids_of(engine))
