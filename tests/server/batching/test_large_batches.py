"""Tests of large batches: threads join, divide and split them while the event loop handles small
ones."""

import asyncio
import threading
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from time import perf_counter

import numpy as np
import pytest
from server.batching.batch_limits import IN_THREAD, ONE_BYTES, USER
from server.batching.test_live_batches import NextRows
from server.fake_engine import Bags, FakeEngine, make_request, model_info
from server.fake_models import unpooled_info
from server.gate import Gate
from server.pending_requests import submit
from server.waiting import until

from embedserve.batching.batcher import Batcher
from embedserve.batching.split import select_output_keys
from embedserve.config import Limits
from embedserve.errors import DeadlineExceededError, EngineError, InvalidRequestError
from embedserve.lookup_types import LookupResult, OutputOptions
from embedserve.metrics.model_metrics import ModelMetrics
from embedserve.request_checks import check_lengths
from embedserve_store.ids.translate import IdTranslator, OverrideRows, Translation

LARGE_ALONE = Limits(inline_bytes_max=ONE_BYTES)
SMALL: Bags = {"user": [[1]]}
INVALID: Bags = {"user": [[1, 2, 7]]}


class HeldTranslator(IdTranslator):
    """Holds up the translation of more than one id at ``gate``, and records the threads.

    Attributes:
        large, small: threads that translated more than one id, and one.
    """

    def __init__(self, translator: IdTranslator, gate: Gate) -> None:
        vars(self).update(vars(translator))
        self.is_identity = False
        self.large, self.small = gate.threads, list[threading.Thread]()
        self._translate_large = gate.before(translator.translate)

    def translate(
        self,
        ids: np.ndarray,
        ids_per_feature: np.ndarray,
        override_rows: OverrideRows | None = None,
    ) -> Translation:
        if ids.size > 1:
            return self._translate_large(ids, ids_per_feature, override_rows)
        self.small.append(threading.current_thread())
        return super().translate(ids, ids_per_feature, override_rows)


@pytest.fixture
def translator(gate: Gate) -> HeldTranslator:
    return HeldTranslator(model_info().translator, gate)


@pytest.fixture
def engine(translator: HeldTranslator) -> FakeEngine:
    return FakeEngine(replace(model_info(), translator=translator))


def make_batcher(
    engine: FakeEngine, executor: Executor, limits: Limits = LARGE_ALONE, threads: int = 1
) -> Batcher:
    metrics = ModelMetrics(engine.model)
    return Batcher(engine, engine.model, limits, metrics, executor, threads)


async def test_small_requests_are_answered_while_a_large_request_is_translated(
    engine: FakeEngine, translator: HeldTranslator, executor: ThreadPoolExecutor, gate: Gate
) -> None:
    batcher = make_batcher(engine, executor)
    large = submit(batcher, engine.request(USER))
    await until(lambda: gate.threads)
    small = await submit(batcher, engine.request(SMALL))
    assert np.array_equal(small.values, engine.expected(SMALL))
    assert not large.done()
    gate.opened.set()
    assert np.array_equal((await large).values, engine.expected(USER))
    assert translator.small == [threading.main_thread()]
    assert threading.main_thread() not in translator.large


async def test_large_batch_of_small_requests_is_translated_in_a_thread(
    engine: FakeEngine, translator: HeldTranslator, executor: ThreadPoolExecutor, gate: Gate
) -> None:
    batcher = make_batcher(engine, executor)
    gate.opened.set()
    answers = [submit(batcher, engine.request(SMALL)) for _ in range(3)]
    for answer in answers:
        assert np.array_equal((await answer).values, engine.expected(SMALL))
    assert [lookup.batch_size for lookup in engine.lookups] == [3]
    assert len(translator.large) == 1
    assert threading.main_thread() not in translator.large


async def test_invalid_request_is_found_in_a_thread_and_rejected_alone(
    engine: FakeEngine, translator: HeldTranslator, executor: ThreadPoolExecutor, gate: Gate
) -> None:
    batcher = make_batcher(engine, executor)
    before, bad, after = (submit(batcher, engine.request(bags)) for bags in (USER, INVALID, USER))
    gate.opened.set()
    with pytest.raises(InvalidRequestError, match=r"user\[0\]\[2\] is 7"):
        await bad
    for answer in (before, after):
        assert np.array_equal((await answer).values, engine.expected(USER))
    assert [lookup.batch_size for lookup in engine.lookups] == [2]
    assert threading.main_thread() not in translator.large
    with pytest.raises(InvalidRequestError):
        await submit(batcher, engine.request(INVALID))
    assert len(engine.lookups) == 1
    await submit(batcher, engine.request(USER))


async def test_request_with_ids_of_the_wrong_type_is_rejected_alone(
    engine: FakeEngine, executor: ThreadPoolExecutor, gate: Gate
) -> None:
    gate.opened.set()
    batcher = make_batcher(engine, executor)
    bags: list[Bags] = [USER, {"user": [["a", "b"]]}, USER]
    answers = [submit(batcher, make_request(one)) for one in bags]
    with pytest.raises(InvalidRequestError, match="are integers of 64 bits"):
        await answers[1]
    for answer in (answers[0], answers[2]):
        assert np.array_equal((await answer).values, engine.expected(USER))


async def test_features_are_ordered_in_a_thread_and_names_checked_immediately(
    engine: FakeEngine,
    executor: ThreadPoolExecutor,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate.opened.set()
    threads: list[threading.Thread] = []

    def check_here(lengths: np.ndarray, ids: int) -> None:
        threads.append(threading.current_thread())
        check_lengths(lengths, ids)

    monkeypatch.setattr("embedserve.batching.join.check_lengths", check_here)
    batcher = make_batcher(engine, executor)
    last_first: Bags = {"tag": [[1], [0, 2]], "user": [[1, 2], []]}
    result = await submit(batcher, make_request(last_first))
    assert np.array_equal(result.values, engine.expected(last_first))
    assert len(threads) == 1
    assert threading.main_thread() not in threads
    with pytest.raises(InvalidRequestError, match="no such feature"):
        submit(batcher, make_request({"user": [[1, 2]], "nobody": [[1, 2]]}))


async def test_features_of_an_unpooled_request_are_ordered_in_a_thread(
    executor: ThreadPoolExecutor,
) -> None:
    engine = FakeEngine(unpooled_info())
    bags: Bags = {"last": [[1], []], "item": [[2, 3], [4]]}
    result = await submit(make_batcher(engine, executor, IN_THREAD), make_request(bags))
    assert np.array_equal(result.values, engine.expected(bags))
    assert result.lengths is not None
    assert result.lengths.tolist() == engine.expected_lengths(bags)


async def test_large_batch_of_an_unpooled_model_is_not_divided(
    executor: ThreadPoolExecutor,
) -> None:
    """Values of unpooled parts would have to be put together key by key."""
    engine = FakeEngine(unpooled_info())
    bags: Bags = {"item": [[2, 3], [4]], "last": [[1], []]}
    batcher = make_batcher(engine, executor, IN_THREAD, threads=2)
    result = await submit(batcher, make_request(bags))
    assert np.array_equal(result.values, engine.expected(bags))
    assert [lookup.batch_size for lookup in engine.lookups] == [2]


async def test_request_cancelled_or_expired_during_the_join_costs_no_lookup(
    engine: FakeEngine, executor: ThreadPoolExecutor, gate: Gate
) -> None:
    batcher = make_batcher(engine, executor)
    cancelled = submit(batcher, engine.request(USER))
    late = submit(batcher, engine.request(USER), perf_counter() + 60)
    await until(lambda: gate.threads)
    cancelled.cancel()
    late.pending.deadline_s = perf_counter()
    after = submit(batcher, engine.request(USER))
    gate.opened.set()
    with pytest.raises(DeadlineExceededError, match="while its batch was joined"):
        await late
    assert np.array_equal((await after).values, engine.expected(USER))
    assert [lookup.batch_size for lookup in engine.lookups] == [1]


async def test_cancellation_during_the_join_does_not_affect_other_requests(
    engine: FakeEngine, executor: ThreadPoolExecutor, gate: Gate
) -> None:
    batcher = make_batcher(engine, executor)
    answers = [submit(batcher, engine.request(bags)) for bags in (INVALID, USER, USER)]
    await until(lambda: gate.threads)
    for cancelled in answers[:2]:
        cancelled.cancel()
    gate.opened.set()
    assert np.array_equal((await answers[2]).values, engine.expected(USER))


async def test_batcher_retired_during_the_join_answers_its_requests_first(
    engine: FakeEngine, executor: ThreadPoolExecutor, gate: Gate
) -> None:
    batcher = make_batcher(engine, executor)
    answers = [submit(batcher, engine.request(bags)) for bags in (USER, INVALID)]
    await until(lambda: gate.threads)
    notified: list[bool] = []
    batcher.retire(lambda: notified.append(all(one.done() for one in answers)))
    assert notified == []
    gate.opened.set()
    await until(lambda: notified)
    assert notified == [True]
    assert np.array_equal((await answers[0]).values, engine.expected(USER))
    with pytest.raises(InvalidRequestError):
        await answers[1]


@pytest.mark.parametrize("bags", [USER, INVALID])
async def test_a_view_lasts_while_a_large_batch_is_joined(
    engine: FakeEngine, executor: ThreadPoolExecutor, gate: Gate, bags: Bags
) -> None:
    rows = engine.rows_reader = NextRows()
    batcher = make_batcher(engine, executor)
    answer = submit(batcher, engine.request(bags))
    await until(lambda: gate.threads)
    assert rows.views == [1]
    gate.opened.set()
    await asyncio.wait([answer])
    assert answer.exception() is None or bags is INVALID
    assert not rows.views


async def test_failure_while_joining_fails_all_requests_of_the_batch(
    engine: FakeEngine,
    executor: ThreadPoolExecutor,
    gate: Gate,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = engine.rows_reader = NextRows()
    rows.id_failure = MemoryError("no room for the batch")
    gate.opened.set()
    batcher = make_batcher(engine, executor)
    for _ in range(2):
        for answer in [submit(batcher, engine.request(USER)) for _ in range(2)]:
            with pytest.raises(EngineError, match="the server's log says why"):
                await answer
    assert "no room for the batch" in caplog.text
    assert not rows.views
    rows.id_failure = None
    await submit(batcher, engine.request(USER))


async def test_keys_of_large_batches_are_selected_in_a_thread(
    executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def select_here(result: LookupResult, output: OutputOptions) -> None:
        threads.append(threading.current_thread())
        select_output_keys(result, output)

    monkeypatch.setattr("embedserve.batching.split.select_output_keys", select_here)
    engine = FakeEngine()
    batcher = make_batcher(engine, executor, IN_THREAD, threads=2)
    bags: Bags = {"user": [[1], [2]], "movie": [[3], [4]]}
    request = engine.request(bags)
    request.output = OutputOptions(keys=("movie",))
    result = await submit(batcher, request)
    assert result.model.keys == ("movie",)
    at, widths = engine.model.keys.index("movie"), engine.model.length_per_key
    columns = slice(sum(widths[:at]), sum(widths[: at + 1]))
    values = np.concatenate([result.values, *result.extra_chunks])
    assert np.array_equal(values, engine.expected(bags)[:, columns])
    assert len(threads) == 1
    assert threading.main_thread() not in threads


class RoundingEngine(FakeEngine):
    """Records the threads that round values."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[threading.Thread] = []

    def to_float16(self, values: np.ndarray) -> np.ndarray:
        self.threads.append(threading.current_thread())
        return super().to_float16(values)


@pytest.mark.parametrize("limits", [Limits(), IN_THREAD])
async def test_values_of_large_batches_are_rounded_in_a_thread(
    executor: ThreadPoolExecutor, limits: Limits
) -> None:
    engine = RoundingEngine()
    batcher = make_batcher(engine, executor, limits, threads=2)
    request = engine.request({"user": [[1], [2]]})
    request.output_dtype = "float16"
    result = await submit(batcher, request)
    values = np.concatenate([result.values, *result.extra_chunks])
    expected = engine.expected({"user": [[1], [2]]})
    assert np.array_equal(values, expected.astype(np.float16))
    is_inline = [thread is threading.main_thread() for thread in engine.threads]
    assert is_inline == ([True] if limits != IN_THREAD else [False, False])
