"""The batcher: queues requests, and takes them as batches that its runner runs.

Batching is continuous, not timed. An idle engine takes the queued requests, up to the limits of a
batch, in the next event-loop iteration; while it is busy, requests accumulate for the next batch.
Every accepted request gets exactly one response, unless its client disconnects first.

The batcher runs on one event loop and never blocks it for long. The work of a request or a batch is
the bytes that it reads and writes. With M = ``inline_bytes_max`` it decides where a batch runs:

    engine  queue of requests  batch  joined in   looked up in
    local   of M at most       <= M   event loop  event loop
    local   either             > M    a thread    threads, by examples if pooled; 1 in flight
    GPU     all                <= M   event loop  a thread; BATCHES_PER_REPLICA in flight
    GPU     all                > M    a thread    a thread; BATCHES_PER_REPLICA in flight
    router  all                <= M   event loop  shards; ``batches_max`` in flight
    router  all                > M    a thread    shards; ``batches_max`` in flight
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from time import perf_counter

from embedserve.batching.batch_runner import BatchRunner
from embedserve.batching.join import adapt_to_model, check_names
from embedserve.batching.lookup_engine import LookupEngine
from embedserve.batching.pending_request import BatchTicket, PendingRequest
from embedserve.batching.request_queue import RequestQueue, work_bytes
from embedserve.config import Limits
from embedserve.lookup_types import LookupRequest
from embedserve.metrics.model_metrics import ModelMetrics
from embedserve.model_info import ModelInfo

BATCHES_PER_REPLICA = 2
"""Maximum number of batches in flight for each replica of an engine that waits for its device. With
two, one batch can be copied to or from the device while the other is looked up."""
BAG_BYTES = 16
"""Cost of joining one bag, in bytes: the number of row bytes that are read in the same time. It is
added to the work of a request for each of its bags."""


class Batcher:
    """The two queues of one version of a model, and the loop that drains them.

    All calls come from one event loop, that of the first request. Times are perf_counter seconds.

    Attributes:
        queues: the two queues.
        unsized_queue: queue that a request of unknown size is checked against, before it is
            decoded: rejections under overload are cheap.
        runner: runner of the batches.
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
            threads: number of sub-batches that a large batch is split into; see BatchRunner.
        """
        self.model = model
        self.runner = BatchRunner(engine, model, metrics, executor, threads, self._schedule_next)
        self._limits = limits
        self._metrics = metrics
        self._counts = metrics.version
        self._loop: asyncio.AbstractEventLoop | None = None  # of the first request
        metrics.count_queue = self._count_queue
        waits, remote = engine.waits_for_device, engine.remote
        # With 0 no batch is inline: the work of every batch exceeds it.
        self._inline_bytes_max = 0 if waits or remote is not None else limits.inline_bytes_max
        self._join_bytes_max = limits.inline_bytes_max  # with any engine
        bags_bytes = BAG_BYTES * len(model.features)
        self._work_per_example = model.response_bytes_per_example + bags_bytes
        self._work_per_id = model.response_bytes_per_id + 4 * max(model.length_per_key)
        self._work_bytes = partial(work_bytes, self._work_per_example, self._work_per_id)
        queue = f"the queue of {model.name!r}"
        of_large = " for large requests" if self._inline_bytes_max else ""
        in_flight_max = BATCHES_PER_REPLICA * engine.replicas if waits else 1
        if remote is not None:
            in_flight_max = remote.batches_max
        # On GPUs and in routers nothing is looked up inline, so the inline queue stays empty.
        self._inline_queue = RequestQueue(queue, model, limits, self._work_bytes, in_flight_max)
        self._offloaded_queue = RequestQueue(
            queue + of_large, model, limits, self._work_bytes, in_flight_max
        )
        self.queues = (self._inline_queue, self._offloaded_queue)
        self.unsized_queue = self.queues[0 if self._inline_bytes_max else 1]
        self._is_scheduled = False
        self._on_retired: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0  # when the timer fires

    def enqueue(self, request: LookupRequest, pending: PendingRequest) -> None:
        """Queues ``request``, whose features may be in any order.

        ``pending`` is completed or rejected exactly once, unless it is abandoned before. It is not
        notified of an error that is raised here.

        Raises:
            InvalidRequestError: the features or ids do not fit the model, as in adapt_to_model. Of
                a large request only its features are checked here, as in check_names.
            OverloadedError: the queue is full, or the request would exceed the share of its
                source.
        """
        examples, ids = request.batch_size, request.ids.size
        # Inlines _work_bytes, as this runs for every request.
        work_bytes = examples * self._work_per_example + ids * self._work_per_id
        queue = self._offloaded_queue if work_bytes > self._inline_bytes_max else self._inline_queue
        if work_bytes <= self._join_bytes_max:
            request = adapt_to_model(request, self.model)
        else:  # the thread that joins its batch does the rest
            check_names(request, self.model)
        if (
            queue.examples + examples > queue.per_source_examples_max
            or queue.ids + ids > queue.per_source_ids_max
        ):
            queue.check_room(examples, ids, pending.source)
        if self._loop is None:
            # Cached: in Python 3.11 get_running_loop makes a system call.
            self._loop = asyncio.get_running_loop()
        pending.request = request
        pending.queue = queue
        pending.queued_s = perf_counter()
        queue.pending[pending] = None
        queue.examples += examples
        queue.ids += ids
        if not self._is_scheduled and not queue.is_saturated:
            self._schedule()

    def _count_queue(self) -> tuple[int, int]:
        inline, offloaded = self._inline_queue, self._offloaded_queue
        return inline.requests + offloaded.requests, inline.examples + offloaded.examples

    @property
    def has_full_queue(self) -> bool:
        """Whether a queue is full: from the time it fills up until an eighth of it is free."""
        return self._inline_queue.is_full or self._offloaded_queue.is_full

    def queue_for(self, bags: int, ids: int) -> RequestQueue:
        """Returns the queue that a request of this estimated size is checked against."""
        work_bytes = self._work_bytes(bags // len(self.model.features), ids)
        is_offloaded = work_bytes > self._inline_bytes_max
        return self._offloaded_queue if is_offloaded else self.unsized_queue

    def note_damage(self) -> None:
        """Marks the model as damaged in the metrics; called only while this version is active."""
        self._metrics.is_damaged = True

    def _schedule(self) -> None:
        """Schedules the next batch; at least one queue is ready.

        The batch starts in the next event-loop iteration, or with ``delay_ms_max`` once its first
        request has waited that long.
        """
        if self._is_scheduled or (self._limits.delay_ms_max and self._delays_batch()):
            return
        if self._timer is not None:
            self._stop_timer(self._timer)
        self._is_scheduled = True
        assert self._loop is not None
        self._loop.call_soon(self._step)

    def _delays_batch(self) -> bool:
        """Returns whether the next batch waits for more requests; sets the timer that ends the
        wait."""
        ready = [queue for queue in self.queues if queue.is_ready()]
        if any(queue.fills_a_batch() for queue in ready):
            return False
        start_s = min(queue.first_s() for queue in ready) + self._limits.delay_ms_max / 1000
        if self._timer is None or start_s < self._timer_s:
            if self._timer is not None:
                self._stop_timer(self._timer)
            assert self._loop is not None
            self._timer = self._loop.call_later(start_s - perf_counter(), self._step)
            self._timer_s = start_s
        return True

    def _schedule_next(self) -> None:
        inline, offloaded = self._inline_queue, self._offloaded_queue
        can_run = inline.examples and not inline.is_saturated
        if can_run or (offloaded.examples and not offloaded.is_saturated):
            self._schedule()
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
        if not any(queue.requests or queue.in_flight for queue in self.queues):
            self._on_retired = None
            del self.runner  # a reference to this batcher must not keep the rows mapped
            on_retired()

    def _stop_timer(self, timer: asyncio.TimerHandle) -> None:
        timer.cancel()
        self._timer = None

    def _step(self) -> None:
        """Takes one batch from each queue that is ready, and runs it."""
        self._is_scheduled = False
        if self._timer is not None:
            self._stop_timer(self._timer)
        for queue in self.queues:
            if queue.examples and not queue.is_saturated:
                work_bytes = queue.examples * self._work_per_example + queue.ids * self._work_per_id
                taken = self._take(queue)
                # The batch may be small even if the queue held much: it ends at its limits.
                if work_bytes > self._join_bytes_max and self._joins_in_thread(taken):
                    self.runner.run_joined_in_thread(queue, taken)
                else:
                    self.runner.run_joined_inline(queue, taken)
        self._schedule_next()

    def _joins_in_thread(self, taken: Sequence[PendingRequest]) -> bool:
        requests = [pending.request for pending in taken]
        examples = sum([request.batch_size for request in requests])
        ids = sum([request.ids.size for request in requests])
        return self._work_bytes(examples, ids) > self._join_bytes_max

    def _take(self, queue: RequestQueue) -> list[PendingRequest]:
        """Takes the requests of the next batch, without abandoned and expired requests."""
        now_s = perf_counter()
        taken = queue.take(now_s)
        if queue.is_full:
            queue.try_reopen()
        counts = self._counts
        counts.flush_if_full()
        ticket = BatchTicket(self.model, now_s, counts.requests.count_answered)
        for pending in taken:
            pending.ticket = ticket
        counts.wait_seconds.observe_many([now_s - pending.queued_s for pending in taken])
        return taken
