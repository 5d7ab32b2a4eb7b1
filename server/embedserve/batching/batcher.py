"""The batcher: joins queued requests into a batch, looks it up and splits the result.

Batching is continuous, not timed. An idle engine takes all queued requests at the end of the
event-loop iteration; while it is busy, requests accumulate for the next batch. The batcher runs on
one event loop and never blocks it for long: small batches are looked up inline, large batches in a
thread. A request that is a large batch by itself waits in a separate queue, so that small requests
do not wait behind it. Every accepted request gets exactly one response, unless its client
disconnects first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from time import perf_counter

import numpy as np

from embedserve.batching.join import join
from embedserve.batching.lookup_engine import LookupEngine, begin_view, changed_ids, end_view
from embedserve.batching.lookup_executor import FAILED, LookedUp, LookupExecutor
from embedserve.batching.pending_request import NO_REQUEST, BatchTicket, PendingRequest
from embedserve.batching.request_queue import RequestQueue, work_bytes
from embedserve.batching.shadow import Shadow
from embedserve.batching.split import errors_by_request
from embedserve.batching.validation import find_invalid
from embedserve.config import Limits
from embedserve.errors import EmbedServeError, EngineError, OverloadedError
from embedserve.lookup_types import Batch, LookupRequest
from embedserve.metrics.model_metrics import ModelMetrics
from embedserve.model_info import ModelInfo
from embedserve_store.ids.translate import ChangeRows

AT_ONCE = 2
"""Maximum number of batches in flight for each replica of an engine that waits for its device. With
two, one batch can be copied to or from the device while the other is looked up."""
BAG_BYTES = 16
"""Cost of joining one bag, in bytes: the number of row bytes that are read in the same time. It is
added to the work of a request for each of its bags."""


def _do_nothing() -> None:
    return None


class Batcher:
    """The two queues of one version of a model, and the loop that drains them.

    All calls come from one event loop, that of the first request. Times are perf_counter seconds.

    Attributes:
        on_batch_done: callback once every request of a batch is completed or rejected; the
            responses can then be flushed.
        on_full: callback when a queue becomes full.
        on_room: callback when a full queue accepts requests again.
        shadow: comparison of a share of the batches with another version; None without one.
    """

    def __init__(
        self,
        engine: LookupEngine,
        model: ModelInfo,
        limits: Limits,
        metrics: ModelMetrics,
        executor: Executor,
        threads: int = 1,
    ) -> None:
        """
        Args:
            executor: thread pool for batches that are too large for the event loop's thread.
            threads: number of chunks that a large batch is split into; see LookupExecutor.
        """
        self.on_batch_done: Callable[[], None] = _do_nothing
        self.on_full: Callable[[], None] = _do_nothing
        self.on_room: Callable[[], None] = _do_nothing
        self.shadow: Shadow | None = None
        self.model = model
        self._lookups = LookupExecutor(engine, model, executor, threads)
        self._limits = limits
        self._metrics = metrics
        self._counts = metrics.version
        self._loop: asyncio.AbstractEventLoop | None = None
        metrics.count_queue = self._count_queue
        waits, remote = engine.waits_for_device, engine.remote
        # With 0 no batch is inline: the work of every batch exceeds it.
        self._inline_bytes_max = 0 if waits or remote is not None else limits.inline_bytes_max
        bags_bytes = BAG_BYTES * len(model.features)
        self._work_per_example = model.response_bytes_per_example + bags_bytes
        self._work_per_id = model.response_bytes_per_id + 4 * max(model.length_per_key)
        self._work_bytes = partial(work_bytes, self._work_per_example, self._work_per_id)
        queue = f"the queue of {model.name!r}"
        of_large = " for large requests" if self._inline_bytes_max else ""
        at_once = AT_ONCE * engine.replicas if waits else 1
        at_once = at_once if remote is None else remote.batches_max
        # On GPUs and in routers nothing is looked up inline, and all requests are in `_large`.
        self._small = RequestQueue(queue, model, limits, self._work_bytes, at_once)
        self._large = RequestQueue(queue + of_large, model, limits, self._work_bytes, at_once)
        self._queues = (self._small, self._large)
        # The queue of requests whose size is not known yet: the small one, where it is used.
        self._unsized_queue = self._small if self._inline_bytes_max else self._large
        self._is_scheduled = False
        self._on_retired: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0  # when the timer fires

    def enqueue(self, request: LookupRequest, pending: PendingRequest) -> None:
        """Queues ``request``, whose features are in the model's order.

        ``pending`` is completed or rejected exactly once, unless it is abandoned before.

        Raises:
            OverloadedError: the queue is full, or the request would exceed the share of its
                source. ``pending`` is not notified.
        """
        examples, ids = request.batch_size, request.ids.size
        # Inlines _is_large, as this runs for every request.
        work_bytes = examples * self._work_per_example + ids * self._work_per_id
        queue = self._large if work_bytes > self._inline_bytes_max else self._small
        if (
            queue.full
            or queue.examples + examples > queue.per_source_examples_max
            or queue.ids + ids > queue.per_source_ids_max
        ):
            self._check_room(request, queue, pending.source)
        if self._loop is None:
            # Cached: in Python 3.11 get_running_loop makes a system call.
            self._loop = asyncio.get_running_loop()
        pending.request = request
        pending.batcher = self
        pending.queued_s = perf_counter()
        queue.pending.append(pending)
        queue.examples += examples
        queue.ids += ids
        if not self._is_scheduled and not queue.is_saturated:
            self._schedule(self._loop)

    def withdraw(self, pending: PendingRequest) -> None:
        """Removes ``pending`` from its queue and from the queue's totals."""
        pending.batcher = None
        request = pending.request
        queue = self._large if self._is_large(request.batch_size, request.ids.size) else self._small
        queue.withdraw(pending)
        # Frees its arrays: the entry may stay in the deque for a while.
        pending.request = NO_REQUEST
        if queue.full:
            self._try_reopen(queue)

    def _is_large(self, examples: int, ids: int) -> bool:
        return self._work_bytes(examples, ids) > self._inline_bytes_max

    def _count_queue(self) -> tuple[int, int]:
        small, large = self._small, self._large
        return small.requests + large.requests, small.examples + large.examples

    @property
    def has_full_queue(self) -> bool:
        """Whether a queue is full: from the time it fills up until an eighth of it is free."""
        return bool(self._small.full or self._large.full)

    @property
    def has_full_unsized_queue(self) -> bool:
        """Whether even the queue for requests of unknown size is full."""
        return bool(self._unsized_queue.full)

    def check_unsized_queue(self) -> None:
        """Raises OverloadedError while the queue for requests of unknown size is full.

        Called before a request is decoded, so that rejections under overload are cheap.
        """
        self._unsized_queue.check_not_full()

    def check_queue_for(self, bags: int, ids: int) -> None:
        """Raises OverloadedError while the queue for a request of this estimated size is full."""
        # One less: in JSON another pair of brackets surrounds the bags of a feature.
        examples = max(bags // len(self.model.features) - 1, 0)
        queue = self._large if self._is_large(examples, ids) else self._unsized_queue
        queue.check_not_full()

    def note_damage(self) -> None:
        """Marks the model as damaged in the metrics; called only while this version is active."""
        self._metrics.is_damaged = True

    async def find_damage(self) -> str:
        """Returns how the rows have changed since the start, "" if they have not.

        Must not be called on a retired batcher.
        """
        return await self._lookups.find_damage()

    def _check_room(self, request: LookupRequest, queue: RequestQueue, source: object) -> None:
        """Raises OverloadedError if ``queue`` has no room; calls on_full if that fills it."""
        was_open = not queue.full
        try:
            queue.check_room(request.batch_size, request.ids.size, source)
        except OverloadedError:
            if queue.full and was_open:
                self.on_full()
            raise

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        """Schedules the next batch; at least one queue is ready.

        The batch starts in the next event-loop iteration, or with ``delay_ms_max`` once its first
        request has waited that long.
        """
        if self._is_scheduled or (self._limits.delay_ms_max and self._waits_for_company(loop)):
            return
        if self._timer is not None:
            self._stop_timer(self._timer)
        self._is_scheduled = True
        loop.call_soon(self._step, loop)

    def _waits_for_company(self, loop: asyncio.AbstractEventLoop) -> bool:
        ready = [queue for queue in self._queues if queue.is_ready()]
        if any(queue.fills_a_batch() for queue in ready):
            return False
        start_s = min(queue.first_s() for queue in ready) + self._limits.delay_ms_max / 1000
        if self._timer is None or start_s < self._timer_s:
            if self._timer is not None:
                self._stop_timer(self._timer)
            self._timer = loop.call_later(start_s - perf_counter(), self._step, loop)
            self._timer_s = start_s
        return True

    def _schedule_next(self, loop: asyncio.AbstractEventLoop) -> None:
        small, large = self._small, self._large
        can_run = small.examples and not small.is_saturated
        if can_run or (large.examples and not large.is_saturated):
            self._schedule(loop)
        elif self._on_retired is not None:
            self._retire_if_idle(self._on_retired)

    def retire(self, on_retired: Callable[[], None]) -> None:
        """Drains the batcher; no request may be queued after this call.

        Once the last queued request is finished, the engine is released and ``on_retired`` is
        called.
        """
        self._on_retired = on_retired
        self._retire_if_idle(on_retired)

    def _retire_if_idle(self, on_retired: Callable[[], None]) -> None:
        if not any(queue.requests or queue.in_flight for queue in self._queues):
            self._on_retired = None
            del self._lookups  # a reference to this batcher must not keep the rows mapped
            on_retired()

    def _stop_timer(self, timer: asyncio.TimerHandle) -> None:
        timer.cancel()
        self._timer = None

    def _step(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs one batch of each queue that is ready: takes, joins, looks up and splits it."""
        self._is_scheduled = False
        if self._timer is not None:
            self._stop_timer(self._timer)
        for queue in self._queues:
            if queue.examples and not queue.is_saturated:
                self._run(loop, queue)
        self._schedule_next(loop)

    def _run(self, loop: asyncio.AbstractEventLoop, queue: RequestQueue) -> None:
        taken = self._take(queue)
        engine = self._lookups.engine
        view = begin_view(engine)
        try:
            taken, batch = self._join(taken, changed_ids(engine, view))
        except Exception:
            end_view(engine, view)
            self._lookups.log_failure(f"joining {len(taken)} requests")
            self._fail(taken, EngineError(FAILED))
            return
        if batch is None:
            end_view(engine, view)
            self.on_batch_done()
        else:
            batch.view = view  # ends with the lookup
            self._work(loop, queue, taken, batch)

    def _take(self, queue: RequestQueue) -> list[PendingRequest]:
        """Takes the requests of the next batch, without abandoned and expired requests."""
        now_s = perf_counter()
        taken = queue.take(now_s)
        if queue.full:
            self._try_reopen(queue)
        counts = self._counts
        counts.bound()
        ticket = BatchTicket(self.model, now_s, counts.requests.count_answered)
        for pending in taken:
            pending.ticket = ticket
        counts.wait_seconds.observe_many([now_s - pending.queued_s for pending in taken])
        return taken

    def _try_reopen(self, queue: RequestQueue) -> None:
        if queue.try_reopen():
            self.on_room()

    def _join(
        self, taken: list[PendingRequest], change: ChangeRows | None
    ) -> tuple[list[PendingRequest], Batch | None]:
        """Returns the valid requests and their batch; rejects the invalid requests."""
        if not taken:
            return [], None
        requests = [pending.request for pending in taken]
        batch = join(requests, self.model, change)
        if batch is not None:
            return taken, batch
        errors = find_invalid(requests, self.model, change)
        if not errors:
            raise AssertionError("a batch is invalid, but none of its requests")
        for i, error in errors.items():
            taken[i].reject(error)
        return self._join([one for i, one in enumerate(taken) if i not in errors], change)

    def _work(
        self,
        loop: asyncio.AbstractEventLoop,
        queue: RequestQueue,
        taken: list[PendingRequest],
        batch: Batch,
    ) -> None:
        examples, ids = batch.batch_size, batch.ids.size
        self._counts.observe_batch(batch)
        work_bytes = examples * self._work_per_example + ids * self._work_per_id
        if work_bytes <= self._inline_bytes_max:
            self._finish(taken, batch, [self._lookups.run(batch)])
            return

        def finish(looked_up: list[LookedUp]) -> None:
            queue.end()
            self._finish(taken, batch, looked_up)
            self._schedule_next(loop)

        queue.begin()
        as_float16 = self._lookups.waits_for_device and self._all_request_float16(taken)
        deadline_s = max([pending.deadline_s for pending in taken])
        if self._lookups.traces_calls and (ticket := taken[0].ticket) is not None:
            batch.calls = ticket.trace_calls(taken)
        try:
            self._lookups.submit(loop, batch, as_float16, deadline_s, finish)
        except Exception:  # the executor has been shut down, or the rows were not found
            self._lookups.log_failure(f"looking up {len(taken)} requests")
            queue.end()
            self._fail(taken, EngineError(FAILED))

    def _all_request_float16(self, taken: Sequence[PendingRequest]) -> bool:
        """Whether all requests want float16 and no shadow needs the float32 values."""
        return self.shadow is None and all(
            pending.request.output_dtype == "float16" for pending in taken
        )

    def _finish(
        self, taken: Sequence[PendingRequest], batch: Batch, looked_up: Sequence[LookedUp]
    ) -> None:
        self._counts.lookup_seconds.observe(max([seconds for _, seconds in looked_up]))
        pieces = []
        for values, _ in looked_up:
            if isinstance(values, EmbedServeError):
                self._fail(taken, values)
                return
            pieces.append(values)
        if batch.missing_parts:
            self._counts.count_missing(batch.missing_parts)
        try:
            requests = [pending.request for pending in taken]
            results = self._lookups.split(requests, batch, pieces)
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
        if self.shadow is not None and pieces[0].dtype == np.float32 and batch.is_whole:
            self.shadow.offer(requests, pieces, batch.unknown_counts, self.model)

    def shadow_of(self, served: ModelInfo, percent: float, executor: Executor) -> Shadow:
        """Returns a Shadow that compares results of version ``served`` with this version's.

        It compares ``percent`` of the batches of ``served``.
        """
        self._counts.shadow.begin(served.version)
        return Shadow(self._lookups.engine, self.model, percent, self._counts.shadow, executor)

    def _fail(self, taken: Sequence[PendingRequest], error: EmbedServeError) -> None:
        for pending in taken:
            if pending.is_waiting:
                pending.reject(error)
        self.on_batch_done()
