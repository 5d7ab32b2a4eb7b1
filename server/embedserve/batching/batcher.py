"""The batcher: joins waiting requests, looks the batch up, gives everyone their slice.

Continuous, not timed: an idle engine takes what is there at the end of the event loop's turn;
while it works, requests gather for the next batch. It runs on one event loop and never blocks
it for long: small batches are looked up inline, large ones in a thread. Every accepted request
gets exactly one answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor
from time import perf_counter
from typing import Protocol

import numpy as np

from embedserve.batching.caller import Caller, FutureCaller
from embedserve.batching.checks import find_invalid
from embedserve.batching.join import cut, join
from embedserve.batching.split import in_request_order, split
from embedserve.config import Limits
from embedserve.errors import (
    DeadlineExceededError,
    EmbedServeError,
    EngineError,
    OverloadedError,
)
from embedserve.metrics.metrics import ModelMetrics
from embedserve.types import Batch, LookupRequest, LookupResult, ModelInfo

logger = logging.getLogger(__name__)

LookedUp = tuple[np.ndarray | EmbedServeError, float]
"""The values of a batch, or what to answer instead; and the seconds it took."""

OPEN_SHARE = 7 / 8
"""Of its limits; a queue that was full and holds less takes requests again."""
FAILED = "the lookup failed; the server's log says why"


class LookupEngine(Protocol):
    """What the batcher asks of an engine."""

    def lookup(
        self, ids: np.ndarray, lengths: np.ndarray, weights: np.ndarray | None = None
    ) -> np.ndarray: ...

    def to_float16(self, values: np.ndarray) -> np.ndarray: ...


class Entry:
    """A waiting request: who waits for it, when it came and until when it is wanted."""

    __slots__ = ("arrived_s", "caller", "deadline_s", "request")

    def __init__(
        self,
        request: LookupRequest,
        caller: Caller,
        arrived_s: float,
        deadline_s: float,
    ) -> None:
        self.request = request
        self.caller = caller
        self.arrived_s = arrived_s
        self.deadline_s = deadline_s


class Batcher:
    """The queue of one model and the loop that empties it.

    Used from one event loop, that of its first request. Times are perf_counter seconds.
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
            executor: runs batches that are too large for the event loop's thread.
            threads: of the executor; a large batch is cut into as many pieces.
        """
        self.model = model
        self._threads = threads if model.is_pooled else 1
        self._engine = engine
        self._limits = limits
        self._metrics = metrics
        self._executor = executor
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queue: deque[Entry] = deque()
        self._queued_ids = 0
        self._is_closed = False
        self._is_scheduled = False
        self._is_working = False
        self._timer: asyncio.TimerHandle | None = None
        self._bytes_per_example = model.answer_bytes_per_example
        self._bytes_per_id = model.answer_bytes_per_id
        self._row_bytes = 4 * max(model.length_per_key)

    def submit(
        self, request: LookupRequest, deadline_s: float = float("inf")
    ) -> asyncio.Future[LookupResult]:
        """Queues ``request`` (in the model's order); the future is its one answer.

        Cancelling the future takes the request out before it costs a lookup.

        Raises:
            OverloadedError: the queue is full.
        """
        future: asyncio.Future[LookupResult] = asyncio.get_running_loop().create_future()
        self.enqueue(request, FutureCaller(future), deadline_s)
        return future

    def enqueue(
        self, request: LookupRequest, caller: Caller, deadline_s: float = float("inf")
    ) -> None:
        """As submit, but ``caller`` is told the answer: futures and tasks cost as much as a lookup.

        Raises:
            OverloadedError: the queue is full.
        """
        self._check_room(request)
        if self._loop is None:
            # Asked for once: in Python 3.11 it is a system call.
            self._loop = asyncio.get_running_loop()
        self._queue.append(Entry(request, caller, perf_counter(), deadline_s))
        self._queued_ids += request.ids.size
        self._metrics.queued_requests += 1
        self._metrics.queued_examples += request.batch_size
        if not self._is_scheduled and not self._is_working:
            self._schedule(self._loop)

    def check_open(self) -> None:
        """Raises OverloadedError from when the queue was full until an eighth of it is free.

        Asked before a request is decoded: refusing the many that come meanwhile costs little.
        """
        if self._is_closed:
            raise OverloadedError(
                f"the queue of {self.model.name!r} is full: it holds "
                f"{self._metrics.queued_examples} examples and {self._queued_ids} ids"
            )

    def _check_room(self, request: LookupRequest) -> None:
        """A lone request always has room: what one may hold is limited elsewhere."""
        self.check_open()
        queued = self._metrics.queued_examples
        if queued and queued + request.batch_size > self._limits.queue_examples_max:
            self._is_closed = True
            raise OverloadedError(
                f"the queue of {self.model.name!r} holds {queued} examples, "
                f"{request.batch_size} more pass its limit of {self._limits.queue_examples_max}"
            )
        ids = self._queued_ids
        if ids and ids + request.ids.size > self._limits.queue_ids_max:
            self._is_closed = True
            raise OverloadedError(
                f"the queue of {self.model.name!r} holds {ids} ids, "
                f"{request.ids.size} more pass its limit of {self._limits.queue_ids_max}"
            )

    def _has_room_again(self) -> bool:
        return (
            self._metrics.queued_examples <= OPEN_SHARE * self._limits.queue_examples_max
            and self._queued_ids <= OPEN_SHARE * self._limits.queue_ids_max
        )

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        """Has the next batch start: soon, or once its first request waited for company."""
        if self._is_scheduled or self._is_working:
            return
        if self._limits.delay_ms_max and not self._is_full():
            if self._timer is None:
                start_s = self._queue[0].arrived_s + self._limits.delay_ms_max / 1000
                self._timer = loop.call_later(start_s - perf_counter(), self._step, loop)
            return
        self._stop_timer()
        self._is_scheduled = True
        loop.call_soon(self._step, loop)

    def _is_full(self) -> bool:
        """Whether what is queued fills a batch: nothing is gained by waiting for more."""
        output_bytes = self._output_bytes(self._metrics.queued_examples, self._queued_ids)
        return (
            self._queued_ids >= self._limits.batch_ids_max
            or output_bytes >= self._limits.batch_output_bytes_max
        )

    def _output_bytes(self, examples: int, ids: int) -> int:
        return examples * self._bytes_per_example + ids * self._bytes_per_id

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _step(self, loop: asyncio.AbstractEventLoop) -> None:
        """One batch: take, join, look up, split."""
        self._is_scheduled = False
        self._stop_timer()
        entries = self._take()
        try:
            entries, batch = self._join(entries)
        except Exception:
            logger.exception("joining %d requests to %r failed", len(entries), self.model.name)
            self._fail(entries, EngineError(FAILED))
        else:
            if batch is not None:
                self._work(loop, entries, batch)
        if self._queue:
            self._schedule(loop)

    def _take(self) -> list[Entry]:
        """The requests of the next batch, without those that nobody waits for any more."""
        now = perf_counter()
        entries: list[Entry] = []
        ids = examples = 0
        while self._queue:
            request = self._queue[0].request
            ids += request.ids.size
            examples += request.batch_size
            if entries and (
                ids > self._limits.batch_ids_max
                or self._output_bytes(examples, ids) > self._limits.batch_output_bytes_max
            ):
                break
            entry = self._pop()
            if _is_wanted(entry, now):
                entries.append(entry)
        if self._is_closed:
            self._is_closed = not self._has_room_again()
        self._metrics.wait_seconds.observe_many([now - entry.arrived_s for entry in entries])
        return entries

    def _pop(self) -> Entry:
        entry = self._queue.popleft()
        self._queued_ids -= entry.request.ids.size
        self._metrics.queued_requests -= 1
        self._metrics.queued_examples -= entry.request.batch_size
        return entry

    def _join(self, entries: list[Entry]) -> tuple[list[Entry], Batch | None]:
        """The batch of the valid entries; the others are answered with their error."""
        if not entries:
            return [], None
        requests = [entry.request for entry in entries]
        batch = join(requests, self.model)
        if batch is not None:
            return entries, batch
        errors = find_invalid(requests, self.model)
        if not errors:
            raise AssertionError("a batch is invalid, but none of its requests")
        for i, error in errors.items():
            entries[i].caller.refuse(error)
        return self._join([entry for i, entry in enumerate(entries) if i not in errors])

    def _work(self, loop: asyncio.AbstractEventLoop, entries: list[Entry], batch: Batch) -> None:
        self._metrics.batch_examples.observe(batch.batch_size)
        self._metrics.batch_ids.observe(batch.ids.size)
        if batch.unknown_counts is not None:
            self._metrics.unknown_ids += batch.unknown_counts.sum(axis=0)
        ids = batch.ids.size
        work_bytes = ids * self._row_bytes + self._output_bytes(batch.batch_size, ids)
        if work_bytes <= self._limits.inline_bytes_max:
            self._finish(entries, batch, [self._look_up(batch)])
            return
        self._is_working = True
        # The kernel uses one thread, so that a piece for each makes use of all.
        pieces = cut(batch, len(self.model.features), self._threads)
        looking_up = asyncio.gather(
            *(loop.run_in_executor(self._executor, self._look_up, piece) for piece in pieces)
        )
        looking_up.add_done_callback(
            lambda done: self._finish_in_loop(loop, entries, batch, done.result())
        )

    def _finish_in_loop(
        self,
        loop: asyncio.AbstractEventLoop,
        entries: list[Entry],
        batch: Batch,
        looked_up: list[LookedUp],
    ) -> None:
        self._is_working = False
        self._finish(entries, batch, looked_up)
        if self._queue:
            self._schedule(loop)

    def _look_up(self, batch: Batch) -> LookedUp:
        """The values, or what to answer instead; and the seconds it took."""
        start = perf_counter()
        values: np.ndarray | EmbedServeError
        try:
            values = self._engine.lookup(batch.ids, batch.lengths, batch.weights)
            values = in_request_order(values, batch, self.model)
        except Exception:
            logger.exception(
                "lookup of %d ids in %d examples of %r failed",
                batch.ids.size,
                batch.batch_size,
                self.model.name,
            )
            values = EngineError(FAILED)
        return values, perf_counter() - start

    def _finish(
        self, entries: Sequence[Entry], batch: Batch, looked_up: Sequence[LookedUp]
    ) -> None:
        self._metrics.lookup_seconds.observe(max([seconds for _, seconds in looked_up]))
        pieces = []
        for values, _ in looked_up:
            if isinstance(values, EmbedServeError):
                self._fail(entries, values)
                return
            pieces.append(values)
        results = split(pieces, batch, [entry.request for entry in entries], self.model)
        for entry, result in zip(entries, results, strict=True):
            if entry.request.output_dtype == "float16":
                self._round(result)
            if entry.caller.is_waiting:  # its client may have gone meanwhile
                entry.caller.answer(result)

    def _round(self, result: LookupResult) -> None:
        result.values = self._engine.to_float16(result.values)
        result.more = [self._engine.to_float16(piece) for piece in result.more]

    def _fail(self, entries: Sequence[Entry], error: EmbedServeError) -> None:
        for entry in entries:
            if entry.caller.is_waiting:
                entry.caller.refuse(error)


def _is_wanted(entry: Entry, now_s: float) -> bool:
    """False for a client that went away, and for a deadline that passed (which is answered)."""
    if not entry.caller.is_waiting:
        return False
    if now_s < entry.deadline_s:
        return True
    waited_ms = (now_s - entry.arrived_s) * 1000
    entry.caller.refuse(
        DeadlineExceededError(f"the deadline passed after {waited_ms:.1f} ms in the queue")
    )
    return False
