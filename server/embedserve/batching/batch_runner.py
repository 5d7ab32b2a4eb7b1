"""Runs the batches of one version: joins, looks up, splits, and completes the requests.

A small batch is joined and split on the event loop, and looked up there too unless its engine waits
for a device or for other servers. For a large batch threads do all that takes long, and the event
loop does what lies between: metrics, rejections and responses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from time import perf_counter

import numpy as np

from embedserve.batching.join import join_valid
from embedserve.batching.lookup_engine import LookupEngine
from embedserve.batching.lookup_executor import FAILED, Joined, LookedUp, LookupExecutor
from embedserve.batching.pending_request import PendingRequest
from embedserve.batching.request_queue import RequestQueue
from embedserve.batching.shadow import Shadow, ShadowExecutor
from embedserve.batching.split import errors_by_request
from embedserve.deltas.rows_reader import BatchView, begin_view, end_view
from embedserve.errors import DeadlineExceededError, EmbedServeError, EngineError
from embedserve.lookup_types import Batch, LookupResult
from embedserve.metrics.model_metrics import ModelMetrics
from embedserve.model_info import ModelInfo


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
            threads: number of sub-batches that a large batch is split into; see LookupExecutor.
            on_ended: callback after the end of a batch that had left the event loop: its queue may
                run the next one.
        """
        self.on_batch_done: Callable[[], None] = lambda: None
        self.shadow: Shadow | None = None
        self._model = model
        self._lookups = LookupExecutor(engine, model, executor, threads)
        self._counts = metrics.version
        self._is_inline = not engine.waits_for_device and engine.remote is None
        self._on_ended = on_ended

    def run_small(self, queue: RequestQueue, taken: list[PendingRequest]) -> None:
        """Joins a batch from ``queue``, whose requests are in the model's order, on the event loop.
        Looks it up there too, unless the engine waits for a device or for other servers."""
        if not taken:
            self.on_batch_done()
            return
        view = begin_view(self._lookups.engine.rows_reader)
        try:
            requests = [pending.request for pending in taken]
            change = None if view is None else view.id_overrides()
            batch, errors = join_valid(requests, self._model, change)
        except Exception:
            end_view(view)
            self._lookups.log_failure(f"joining {len(taken)} requests")
            self._fail(taken, EngineError(FAILED))
            return
        if errors:
            self._reject(taken, errors)
            taken = [pending for i, pending in enumerate(taken) if i not in errors]
        if batch is None:
            end_view(view)
            self.on_batch_done()
            return
        batch.view = view  # ends with the lookup
        self._counts.observe_batch(batch)
        if self._is_inline:
            self._finish(taken, batch, [self._lookups.run(batch)])
        else:
            queue.begin_batch()
            self._look_up(queue, taken, batch)

    def run_large(self, queue: RequestQueue, taken: list[PendingRequest]) -> None:
        """Joins a batch from ``queue`` and looks it up in threads. Its requests have the model's
        features, or some of them, in any order."""
        queue.begin_batch()
        view = begin_view(self._lookups.engine.rows_reader)
        try:
            requests = [pending.request for pending in taken]
            joining = self._lookups.join_in_thread(requests, view)
        except Exception:  # the executor has been shut down
            end_view(view)
            self._drop(queue, taken, "joining")
        else:
            joining.add_done_callback(partial(self._on_joined, queue, taken, view))

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
            self._fail(valid, late.of(self._model))  # `valid` is empty if no request was valid
            self._on_ended()
        else:
            self._counts.observe_batch(batch)
            self._look_up(queue, valid, batch, sub_batches)

    def _look_up(
        self,
        queue: RequestQueue,
        taken: list[PendingRequest],
        batch: Batch,
        sub_batches: Sequence[Batch] = (),
    ) -> None:
        """Looks a joined batch up in threads, on a device or in other servers.

        Args:
            sub_batches: ``batch``, divided, if it was joined in a thread; empty for a small one.
        """
        lookups, is_large = self._lookups, bool(sub_batches)
        as_float16 = lookups.waits_for_device and self._all_request_float16(taken)
        deadline_s = max([pending.deadline_s for pending in taken])
        if lookups.traces_calls and (ticket := taken[0].ticket) is not None:
            batch.calls = ticket.trace_calls(taken)
        finish = partial(self._on_looked_up, queue, taken, batch, is_large)
        try:
            lookups.submit(batch, sub_batches, as_float16, deadline_s, finish)
        except Exception:  # the executor has been shut down, or the rows were not found
            self._drop(queue, taken, "looking up")

    def _all_request_float16(self, taken: Sequence[PendingRequest]) -> bool:
        """Whether all requests want float16 and no shadow needs the float32 values."""
        return self.shadow is None and all(
            pending.request.output_dtype == "float16" for pending in taken
        )

    def _on_looked_up(
        self,
        queue: RequestQueue,
        taken: list[PendingRequest],
        batch: Batch,
        is_large: bool,
        looked_up: list[LookedUp],
    ) -> None:
        requests = [pending.request for pending in taken]
        values = [one for one, _ in looked_up if isinstance(one, np.ndarray)]
        may_split_in_thread = is_large and len(values) == len(looked_up)
        if not may_split_in_thread or self._lookups.is_split_quick(requests):
            queue.end_batch()
            self._finish(taken, batch, looked_up)
            self._on_ended()
            return
        try:
            splitting = self._lookups.split_in_thread(requests, batch, values)
        except Exception:  # the executor has been shut down
            self._drop(queue, taken, "splitting the batch of")
        else:
            splitting.add_done_callback(partial(self._on_split, queue, taken, batch, looked_up))

    def _on_split(
        self,
        queue: RequestQueue,
        taken: list[PendingRequest],
        batch: Batch,
        looked_up: list[LookedUp],
        splitting: asyncio.Future[list[LookupResult]],
    ) -> None:
        queue.end_batch()
        self._finish(taken, batch, looked_up, splitting.result)
        self._on_ended()

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
                results = self._lookups.split(requests, batch, value_chunks)
            else:
                results = results_of_thread()
        except Exception:
            self._lookups.log_failure(f"splitting the batch of {len(taken)} requests")
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
        return Shadow(self._lookups.engine, self._model, percent, self._counts.shadow, executor)

    async def find_damage(self) -> str:
        """Returns how the rows have changed since the start, "" if they have not."""
        return await self._lookups.find_damage()

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
        self._lookups.log_failure(f"{doing} {len(taken)} requests")
        queue.end_batch()
        self._fail(taken, EngineError(FAILED))
        self._on_ended()
