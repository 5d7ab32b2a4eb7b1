"""Tests of batches over changing rows: each batch has one view, which ends with its lookup."""

from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from server.fake_engine import Bags, FakeEngine, make_request
from server.fake_models import ruled_info
from server.pending_requests import submit

from embedserve.batching.batcher import Batcher
from embedserve.batching.join import adapt_to_model
from embedserve.batching.shadow import compare
from embedserve.config import Limits
from embedserve.deltas.live_rows import View
from embedserve.deltas.rows_reader import RowsReader
from embedserve.errors import EngineError, InvalidRequestError
from embedserve.metrics.model_metrics import ModelMetrics
from embedserve_store import StoreError

INLINE = Limits()
IN_THREAD = Limits(inline_bytes_max=0)
USER: Bags = {"user": [[0, 1], [], [2]], "tag": [[0], [1], []]}
NEXT: Bags = {"user": [[1, 2], [], [3]], "tag": [[1], [2], []]}


class NextRows(RowsReader):
    """Reader that maps each row to the next row. View n has seq 10 n, and maps id 5050505 to row n
    - 1."""

    has_ids = True

    def __init__(self) -> None:
        self.views: list[int] = []
        self.begun = 0
        self.failure: Exception | None = None
        self.id_failure: Exception | None = None

    def begin(self) -> View:
        self.begun += 1
        self.views.append(self.begun)
        return View(self.begun, 10 * self.begun)

    def end(self, view: int) -> None:
        self.views.remove(view)

    def override_rows(
        self,
        view: int,
        ids: NDArray[np.int64],
        rows: NDArray[np.int64],
        ids_per_feature: NDArray[np.int64],
    ) -> None:
        assert view in self.views
        assert ids_per_feature.sum() == ids.size
        if self.id_failure is not None:
            raise self.id_failure
        rows[ids == 5050505] = view - 1

    def rows_in_view(
        self, ids: NDArray[np.int64], ids_per_feature: NDArray[np.int64], view: int
    ) -> NDArray[np.int64]:
        assert view in self.views
        assert ids_per_feature.sum() == ids.size
        if self.failure is not None:
            raise self.failure
        return ids + 1


@pytest.fixture
def rows(engine: FakeEngine) -> NextRows:
    engine.rows_reader = NextRows()
    return engine.rows_reader


def batcher_of(engine: FakeEngine, limits: Limits, executor: Executor) -> Batcher:
    return Batcher(engine, engine.model, limits, ModelMetrics(engine.model), executor, threads=2)


@pytest.mark.parametrize("limits", [INLINE, IN_THREAD])
async def test_each_batch_is_looked_up_in_its_own_view(
    engine: FakeEngine, rows: NextRows, limits: Limits, executor: ThreadPoolExecutor
) -> None:
    batcher = batcher_of(engine, limits, executor)
    for batch in range(1, 4):
        result = await submit(batcher, engine.request(USER))
        values = np.concatenate([result.values, *result.extra_chunks])
        assert np.array_equal(values, engine.expected(NEXT))
        assert result.seq == 10 * batch
        assert not rows.views


@pytest.mark.parametrize("waits_for_device", [False, True])
@pytest.mark.parametrize("limits", [INLINE, IN_THREAD])
@pytest.mark.parametrize("fails", ["rows", "lookup"])
async def test_view_ends_if_its_lookup_fails(
    engine: FakeEngine,
    rows: NextRows,
    limits: Limits,
    fails: str,
    waits_for_device: bool,
    executor: ThreadPoolExecutor,
) -> None:
    engine.waits_for_device = waits_for_device
    batcher = batcher_of(engine, limits, executor)
    if fails == "rows":
        rows.failure = StoreError("more than 100 deltas")
    else:
        engine.failure = RuntimeError("a kernel")
    with pytest.raises(EngineError, match="the lookup failed"):
        await submit(batcher, engine.request(USER))
    rows.failure = engine.failure = None
    assert (await submit(batcher, engine.request(USER))).seq == 20
    assert not rows.views


async def test_view_ends_if_the_executor_is_shut_down(engine: FakeEngine, rows: NextRows) -> None:
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    with pytest.raises(EngineError):
        await submit(batcher_of(engine, IN_THREAD, executor), engine.request(USER))
    assert rows.begun
    assert not rows.views


async def test_skipped_ids_do_not_shift_features(executor: ThreadPoolExecutor) -> None:
    engine = FakeEngine(ruled_info())
    engine.rows_reader = NextRows()
    request = engine.request({"user": [[7, 4040404]], "day": [[2]]})
    assert (await submit(batcher_of(engine, INLINE, executor), request)).seq == 10


@pytest.mark.parametrize("ids", [[[6]], [[4040404]], [[5050505]]])
async def test_ids_are_translated_by_the_view_of_the_batch(
    ids: list[list[int]], executor: ThreadPoolExecutor
) -> None:
    """Looks up an id that has a row in the view only. Checks that a view also ends if ids are
    unknown."""
    engine = FakeEngine(ruled_info())
    rows = engine.rows_reader = NextRows()
    batcher = batcher_of(engine, INLINE, executor)
    await submit(batcher, engine.request({"day": [[1]]}))
    request = engine.request({"shelf": ids})
    if ids == [[5050505]]:
        result = await submit(batcher, request)
        assert result.seq == 20
    else:
        with pytest.raises(InvalidRequestError, match=f"shelf.* is {ids[0][0]}: not one of the"):
            await submit(batcher, request)
    assert rows.begun == 2
    assert not rows.views


async def test_results_without_a_rows_reader_have_no_seq(
    engine: FakeEngine, executor: ThreadPoolExecutor
) -> None:
    assert (await submit(batcher_of(engine, INLINE, executor), engine.request(USER))).seq is None


@pytest.mark.parametrize("fails", [False, True])
def test_a_shadow_compares_the_rows_in_the_view_of_its_batch(
    engine: FakeEngine, fails: bool
) -> None:
    rows = engine.rows_reader = NextRows()
    served = FakeEngine(engine.model)
    requests = [adapt_to_model(make_request(USER), engine.model)]
    if fails:
        rows.failure = StoreError("more than 100 deltas")
        with pytest.raises(StoreError):
            compare(requests, served.expected(NEXT), None, served.model, engine, engine.model)
    else:
        model = replace(served.model)
        found = compare(requests, served.expected(NEXT), None, model, engine, engine.model)
        assert found.sums[2].tolist() == [0] * len(model.keys)
    assert not rows.views
