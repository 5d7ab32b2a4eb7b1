"""Runs the batches of one version: joins, looks up, splits, and completes the requests.

A small batch is joined and split on the event loop, and looked up there too unless its engine waits
for a device or for other servers. For a large batch threads do all that takes long, and the event
loop does what lies between: metrics, rejections and responses. A failure is logged, and the
requests of its batch get an error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from time import perf_counter

import numpy as np
from msgspec.structs import replace

from embedserve.batching.join import adapt_and_join, begin_view, join_valid
from embedserve.batching.lookup_engine import FAILED, LookupEngine
from embedserve.batching.pending_request import PendingRequest
from embedserve.batching.request_queue import RequestQueue
from embedserve.batching.shadow import Shadow, ShadowExecutor
from embedserve.batching.split import (
    errors_by_request,
    in_request_order,
    is_split_quick,
    split,
    split_by_examples,
)
from embedserve.deltas.rows_reader import BatchView, end_view
from embedserve.errors import (
    DeadlineExceededError,
    EmbedServeError,
    EngineError,
    InvalidRequestError,
)
from embedserve.lookup_types import Batch, LookupRequest, LookupResult
from embedserve.metrics.model_metrics import ModelMetrics
from embedserve.metrics.rate_limited_logger import RateLimitedLogger
from embedserve.model_info import ModelInfo
from embedserve_store.errors import StoreError

logger = logging.getLogger(__name__)

LookedUp = tuple[np.ndarray | EmbedServeError, float]
"""Values of a batch or the error of its lookup, and the duration of the lookup in seconds."""
Joined = tuple[
    Batch | None, dict[int, LookupRequest], dict[int, InvalidRequestError], Sequence[Batch]
]
"""Result of ``adapt_and_join``, and the batch, divided for the threads that look it up."""


class BatchRunner:
    """Runs the batches of one version of a model. All calls come from one event loop.

    Attributes:
        on_batch_done: callback once every request of a batch is completed or rejected; the
            responses can then be flushed.
        shadow: comparison of a share of the batches with another version; None without one.
    """

    def __init__(
        self,
        engine: LookupEngine,
        model: ModelInfo,
        metrics: ModelMetrics,
        executor: Executor,
        threads: int,
        on_ended: Callable[[], None],
    ) -> None:
        """
        Args:
            executor: thread pool for batches that are too large for the event loop's thread.
            threads: number of sub-batches of a large batch of a pooled model. Not used for an
                engine that waits for its device. The executor has more threads than that, so that
                another batch can run concurrently.
            on_ended: callback after the end of a batch that had left the event loop: its queue may
                run the next one.
        """
        self.on_batch_done: Callable[[], None] = lambda: None
        self.shadow: Shadow | None = None
        self._engine = engine
        self._model = model
        self._counts = metrics.version
        self._executor = executor
        self._on_ended = on_ended
        self._is_inline = not engine.waits_for_device and engine.remote is None
        self._sub_batches_max = threads if model.is_pooled and self._is_inline else 1
        self._log = RateLimitedLogger(logger)

    def run_joined_inline(self, queue: RequestQueue, taken: list[PendingRequest]) -> None:
        """Joins a batch from ``queue``, whose requests are in the model's order, on the event loop.
        Looks it up there too, unless the engine waits for a device or for other servers."""
        if not taken:
            self.on_batch_done()
            return
        view = begin_view(self._engine.rows_reader)
        try:
            batch, errors = join_valid([one.request for one in taken], self._model, view)
        except Exception:
            end_view(view)
            self._log_failure(f"joining {len(taken)} requests")
            self._fail(taken, EngineError(FAILED))
            return
        if errors:
            self._reject(taken, errors)
            taken = [pending for i, pending in enumerate(taken) if i not in errors]
        if batch is None:
            end_view(view)
            self.on_batch_done()
            return
        self._counts.observe_batch(batch)
        if self._is_inline:
            self._finish(taken, batch, [self._look_up(batch)])
        else:
            queue.begin_batch()
            self._submit(queue, taken, batch)

    def _look_up(self, batch: Batch, as_float16: bool = False) -> LookedUp:
        """Looks ``batch`` up on the calling thread, and ends its view.

        Returns values in request order, in float16 with ``as_float16``, or the error of a failure
        that it has logged.
        """
        start_s, view = perf_counter(), batch.view
        values: np.ndarray | EmbedServeError
        try:
            ids = batch.ids if view is None else batch.resolve_rows()
            values = self._engine.lookup(ids, batch.lengths, batch.weights, as_float16)
            values = in_request_order(values, batch, self._model)
        except Exception:
            self._log_failure(f"lookup of {batch.ids.size} ids in {batch.batch_size} examples")
            values = EngineError(FAILED)
        finally:
            if view is not None:
                view.end()
        return values, perf_counter() - start_s

    def run_joined_in_thread(self, queue: RequestQueue, taken: list[PendingRequest]) -> None:
        """Joins a batch from ``queue`` and looks it up in threads. Its requests have the model's
        features, or some of them, in any order."""
        queue.begin_batch()
        view = begin_view(self._engine.rows_reader)
        requests = [pending.request for pending in taken]
        loop = asyncio.get_running_loop()
        try:
            joining = loop.run_in_executor(self._executor, self._join, requests, view)
        except Exception:  # the executor has been shut down
            end_view(view)
            self._drop(queue, taken, "joining")
        else:
            joining.add_done_callback(partial(self._on_joined, queue, taken, view))

    def _join(self, requests: Sequence[LookupRequest], view: BatchView | None) -> Joined:
        batch, valid, errors = adapt_and_join(requests, self._model, view)
        return batch, valid, errors, [] if batch is None else self._divide(batch)

    def _divide(self, batch: Batch) -> list[Batch]:
        """Divides ``batch`` by examples. The ids of its sub-batches are the rows in its view
        already, so that they have no view.

        The batch itself keeps the published rows, as metrics count those.
        """
        resolved = replace(batch, ids=batch.resolve_rows(), view=None)
        return split_by_examples(resolved, len(self._model.features), self._sub_batches_max)

    def _on_joined(
        self,
        queue: RequestQueue,
        taken: list[PendingRequest],
        view: BatchView | None,
        joining: asyncio.Future[Joined],
    ) -> None:
        """Rejects the invalid requests of a large batch, and looks the others up if one of them
        still waits."""
        try:
            batch, requests, errors, sub_batches = joining.result()
        except Exception:
            end_view(view)
            self._drop(queue, taken, "joining")
            return
        self._reject(taken, errors)
        for i, request in requests.items():
            taken[i].request = request
        valid = [taken[i] for i in requests]
        now_s = perf_counter()
        if batch is None or not any(one.is_waiting and now_s < one.deadline_s for one in valid):
            end_view(view)
            queue.end_batch()
            late = DeadlineExceededError("the deadline passed while its batch was joined")
            self._fail(valid, late.set_model(self._model))  # `valid` may be empty
            self._on_ended()
        else:
            self._counts.observe_batch(batch)
            self._submit(queue, valid, batch, sub_batches)

    def _submit(
        self,
        queue: RequestQueue,
        taken: list[PendingRequest],
        batch: Batch,
        sub_batches: Sequence[Batch] = (),
    ) -> None:
        """Looks a joined batch up in other servers, or in threads or on a device, and ends its
        view. Each thread gets one sub-batch, because a kernel call uses one thread.

        Args:
            sub_batches: ``batch``, divided, if it was joined in a thread; empty for a small one.
        """
        finish = partial(self._on_looked_up, queue, taken, batch, bool(sub_batches))

        def end(done: asyncio.Future[list[LookedUp]]) -> None:
            end_view(batch.view)
            finish(done.result())

        try:
            if (remote := self._engine.remote) is not None:
                assert batch.view is None  # rows of a model in parts never change
                if remote.traces_calls and (ticket := taken[0].ticket) is not None:
                    batch.calls = ticket.trace_calls(taken)
                deadline_s = max([pending.deadline_s for pending in taken])
                end_remote = partial(self._end_remote, batch, finish, perf_counter())
                remote.begin(batch, deadline_s, end_remote)
                return
            loop, as_float16 = asyncio.get_running_loop(), self._may_round(taken)
            looking_up = [
                loop.run_in_executor(self._executor, self._look_up, one, as_float16)
                for one in sub_batches or self._divide(batch)
            ]
            asyncio.gather(*looking_up).add_done_callback(end)
        except Exception:  # the executor has been shut down, or the rows were not found
            end_view(batch.view)
            self._drop(queue, taken, "looking up")

    def _end_remote(
        self,
        batch: Batch,
        finish: Callable[[list[LookedUp]], None],
        start_s: float,
        values: np.ndarray | EmbedServeError,
    ) -> None:
        if isinstance(values, np.ndarray):
            try:
                values = in_request_order(values, batch, self._model)
            except Exception:
                self._log_failure(f"lookup of {batch.ids.size} ids in other servers")
                values = EngineError(FAILED)
        finish([(values, perf_counter() - start_s)])

    def _may_round(self, taken: Sequence[PendingRequest]) -> bool:
        """Whether a device may round the values: all requests want float16, and no shadow needs the
        float32 values."""
        is_possible = self._engine.waits_for_device and self.shadow is None
        return is_possible and all(one.request.output_dtype == "float16" for one in taken)

    def _on_looked_up(
        self,
        queue: RequestQueue,
        taken: list[PendingRequest],
        batch: Batch,
        is_joined_in_thread: bool,
        looked_up: list[LookedUp],
    ) -> None:
        def end(results_of_thread: Callable[[], list[LookupResult]] | None = None) -> None:
            queue.end_batch()
            self._finish(taken, batch, looked_up, results_of_thread)
            self._on_ended()

        requests = [pending.request for pending in taken]
        values = [one for one, _ in looked_up if isinstance(one, np.ndarray)]
        may_split_in_thread = is_joined_in_thread and len(values) == len(looked_up)
        if not may_split_in_thread or is_split_quick(requests, self._model):
            end()
            return
        loop = asyncio.get_running_loop()
        try:
            splitting = loop.run_in_executor(self._executor, self._split, requests, batch, values)
        except Exception:  # the executor has been shut down
            self._drop(queue, taken, "splitting the batch of")
        else:
            splitting.add_done_callback(lambda done: end(done.result))

    def _split(
        self, requests: Sequence[LookupRequest], batch: Batch, value_chunks: Sequence[np.ndarray]
    ) -> list[LookupResult]:
        """Returns the result of each request of ``batch``, with the keys and in the dtype that it
        requests; ``value_chunks`` are the values of the batch in request order."""
        results = split(value_chunks, batch, requests, self._model)
        for request, result in zip(requests, results, strict=True):
            if request.output_dtype == "float16":
                to_float16 = self._engine.to_float16
                result.values = to_float16(result.values)
                result.extra_chunks = [to_float16(chunk) for chunk in result.extra_chunks]
        return results

    def _finish(
        self,
        taken: Sequence[PendingRequest],
        batch: Batch,
        looked_up: Sequence[LookedUp],
        results_of_thread: Callable[[], list[LookupResult]] | None = None,
    ) -> None:
        """Splits the values of a batch, unless a thread has done so, and completes its requests."""
        self._counts.lookup_seconds.observe(max([seconds for _, seconds in looked_up]))
        value_chunks = []
        for values, _ in looked_up:
            if isinstance(values, EmbedServeError):
                self._fail(taken, values)
                return
            value_chunks.append(values)
        if batch.missing_parts or batch.cached_count:
            self._counts.count_parts(batch)
        try:
            requests = [pending.request for pending in taken]
            if results_of_thread is None:
                results = self._split(requests, batch, value_chunks)
            else:
                results = results_of_thread()
        except Exception:
            self._log_failure(f"splitting the batch of {len(taken)} requests")
            self._fail(taken, EngineError(FAILED))
            return
        ticket = taken[0].ticket  # the whole batch shares it
        assert ticket is not None
        ticket.looked_up_s = perf_counter()
        errors = errors_by_request(batch) if batch.failures else {}
        for i, (pending, result) in enumerate(zip(taken, results, strict=True)):
            if not pending.is_waiting:  # the client has disconnected in the meantime
                continue
            if i in errors:
                pending.reject(errors[i])
            else:
                pending.complete(result)
        self.on_batch_done()
        if self.shadow is not None and value_chunks[0].dtype == np.float32 and batch.is_whole:
            self.shadow.offer(requests, value_chunks, batch.unknown_counts, self._model)

    def shadow_of(self, served: ModelInfo, percent: float, executor: ShadowExecutor) -> Shadow:
        """Returns a Shadow that compares results of version ``served`` with this version's.

        It compares ``percent`` of the batches of ``served``.
        """
        self._counts.shadow.begin(served.version)
        return Shadow(self._engine, self._model, percent, self._counts.shadow, executor)

    async def find_damage(self) -> str:
        """Returns how the rows have changed since the start, "" if they have not.

        The check runs in a thread of the executor, concurrently with lookups.
        """
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._executor, self._engine.check)
        except StoreError as error:
            return str(error)
        except Exception:
            self._log_failure("looking whether the rows have changed")
        return ""

    def _reject(
        self, taken: Sequence[PendingRequest], errors: Mapping[int, EmbedServeError]
    ) -> None:
        for i, error in errors.items():
            if taken[i].is_waiting:
                taken[i].reject(error)

    def _fail(self, taken: Sequence[PendingRequest], error: EmbedServeError) -> None:
        for pending in taken:
            if pending.is_waiting:
                pending.reject(error)
        self.on_batch_done()

    def _drop(self, queue: RequestQueue, taken: Sequence[PendingRequest], doing: str) -> None:
        """Fails a batch that had left the event loop, for the exception that is being handled."""
        self._log_failure(f"{doing} {len(taken)} requests")
        queue.end_batch()
        self._fail(taken, EngineError(FAILED))
        self._on_ended()

    def _log_failure(self, what: str) -> None:
        """Logs the unexpected error that is being handled, with a rate limit."""
        kind = f"lookups of {self._model.name!r} fail"
        self._log.log(logging.ERROR, kind, what, with_traceback=True)
