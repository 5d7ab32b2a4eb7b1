"""A bounded queue of requests that wait for a batch of one model.

A batch takes all queued requests. Where they exceed the batch limits, it takes a fair share from
each source. Abandoned and expired requests cost no lookup.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from embedserve.batching.fair_queue import GONE_MIN, FairQueue
from embedserve.batching.pending_request import PendingRequest
from embedserve.config import Limits
from embedserve.errors import DeadlineExceededError, OverloadedError
from embedserve.lookup import LookupRequest
from embedserve.model_info import ModelInfo

OPEN_SHARE = 7 / 8
"""Fraction of the queue's limits below which a full queue accepts requests again.

The gap of an eighth keeps the queue from alternating between full and open."""
SOURCE_SHARE = 1 / 2
"""Fraction of the queue's limits that one source may hold.

It keeps a single source from filling the queue and so causing all others to be rejected."""


class RequestQueue:
    """Pending requests, and the number of their batches that are being looked up.

    Times are perf_counter seconds.

    Attributes:
        callers: pending requests since the last batch, in order of arrival. Each waits until it is
            taken or withdrawn; its ``queue`` is None from then on.
        examples, ids: totals of all queued requests. Code that appends to ``callers`` adds the
            sizes of the request.
        full: rejection message while the queue is full, until an eighth is free; "" otherwise.
        under_way: number of batches of this queue that are being looked up in threads.
        is_working: whether that number is at its limit, so that the next batch has to wait.
        per_source_examples_max, share_ids: limits for one source. While the totals of the queue
            stay within them, there is room and no further check is needed.
    """

    __slots__ = (
        "_at_once",
        "_backlog",
        "_bytes_per_example",
        "_bytes_per_id",
        "_ids_max",
        "_limits",
        "_model",
        "_name",
        "_output_bytes_max",
        "_withdrawn",
        "_work_bytes",
        "callers",
        "examples",
        "full",
        "ids",
        "is_working",
        "per_source_examples_max",
        "share_ids",
        "under_way",
    )

    def __init__(
        self,
        name: str,
        model: ModelInfo,
        limits: Limits,
        work_bytes: Callable[[int, int], int],
        at_once: int = 1,
    ) -> None:
        """
        Args:
            name: name of the queue in rejection messages.
            work_bytes: function from (examples, ids) to work in bytes, which sources share fairly.
            at_once: maximum number of batches that are looked up in threads concurrently.
        """
        self._name = name
        self._model = model
        self._limits = limits
        self.per_source_examples_max = int(SOURCE_SHARE * limits.queue_examples_max)
        self.share_ids = int(SOURCE_SHARE * limits.queue_ids_max)
        self.examples = self.ids = 0
        self.full = ""
        self.under_way = 0
        self.is_working = False
        self._at_once = at_once
        self.callers: deque[PendingRequest] = deque()
        self._backlog = FairQueue()  # earlier requests, which did not fit into a batch
        self._withdrawn = 0  # withdrawn requests that are still in self.callers
        self._work_bytes = work_bytes
        self._bytes_per_example = model.response_bytes_per_example
        self._bytes_per_id = model.response_bytes_per_id
        self._ids_max = limits.batch_ids_max
        self._output_bytes_max = limits.batch_output_bytes_max

    def check_open(self) -> None:
        """Raises OverloadedError while the queue is full."""
        if self.full:
            raise OverloadedError(self.full).of(self._model)

    def check_room(self, examples: int, ids: int, source: object) -> None:
        """Raises OverloadedError if the queue has no room for a request from ``source``.

        It may mark the queue as full. An empty queue has room for any request: the size of a single
        request is limited elsewhere.
        """
        self.check_open()
        held_examples, held_ids = self.held_by(source)
        for what, held, more, share in (
            ("examples", held_examples, examples, self.per_source_examples_max),
            ("ids", held_ids, ids, self.share_ids),
        ):
            if held and held + more > share:
                raise OverloadedError(
                    f"{self._name} holds {held} {what} of this connection, {more} more pass its "
                    f"share of {share}"
                )
        for what, held, more, most in (
            ("examples", self.examples, examples, self._limits.queue_examples_max),
            ("ids", self.ids, ids, self._limits.queue_ids_max),
        ):
            if held and held + more > most:
                if not self._has_room():
                    self.full = (
                        f"{self._name} is full: it holds {self.examples} examples and "
                        f"{self.ids} ids"
                    )
                raise OverloadedError(
                    f"{self._name} holds {held} {what}, {more} more pass its limit of {most}"
                )

    def try_reopen(self) -> bool:
        """Reopens a full queue if enough of it is free; returns whether the queue is open."""
        if self._has_room():
            self.full = ""
        return not self.full

    def _has_room(self) -> bool:
        """Whether an eighth is free; a request rejected then is rejected for its own size."""
        return (
            self.examples <= OPEN_SHARE * self._limits.queue_examples_max
            and self.ids <= OPEN_SHARE * self._limits.queue_ids_max
        )

    def withdraw(self, pending: PendingRequest) -> None:
        """Removes ``pending``, whose queue is already None and whose request is still set."""
        self._uncount(pending.request)
        if self._backlog.withdraw(pending):
            return
        self._withdrawn += 1
        if not self.examples:
            self.callers.clear()
            self._withdrawn = 0
        elif self._withdrawn >= GONE_MIN and 2 * self._withdrawn >= len(self.callers):
            self.callers = deque([one for one in self.callers if one.queue is not None])
            self._withdrawn = 0

    @property
    def requests(self) -> int:
        """Number of requests that wait."""
        return len(self.callers) + len(self._backlog.source_of) - self._withdrawn

    def begin(self) -> None:
        """Records the start of a lookup in a thread; ``end`` records its completion."""
        self.under_way += 1
        self.is_working = self.under_way >= self._at_once

    def end(self) -> None:
        self.under_way -= 1
        self.is_working = False

    def is_ready(self) -> bool:
        """Whether a batch may be taken."""
        return bool(self.examples) and not self.is_working

    def first_s(self) -> float:
        """Returns the time when the next request was queued."""
        return (self._backlog.first() or self.callers[0]).queued_s

    def held_by(self, source: object) -> tuple[int, int]:
        """Returns (examples, ids) of the queued requests from ``source``."""
        self._queue_up()
        return self._backlog.held_by(source)

    def _queue_up(self) -> None:
        callers, self.callers = self.callers, deque()
        self._withdrawn = 0
        for caller in callers:
            if caller.queue is not None:
                self._backlog.put(caller)

    def fills_a_batch(self) -> bool:
        """Whether the queued requests fill a batch, so that more waiting gains nothing."""
        output_bytes = self.examples * self._bytes_per_example + self.ids * self._bytes_per_id
        return self.ids >= self._ids_max or output_bytes >= self._output_bytes_max

    def take(self, now_s: float) -> list[PendingRequest]:
        """Takes the requests of the next batch: as many as it may hold, and at least one.

        Requests whose deadline has passed are rejected instead. The queue is emptied first, as a
        rejection may queue or withdraw other requests.
        """
        output_bytes = self.examples * self._bytes_per_example + self.ids * self._bytes_per_id
        is_too_much = self.ids > self._ids_max or output_bytes > self._output_bytes_max
        if is_too_much or self._backlog.source_of or self._withdrawn:
            return self._take_some(now_s)
        callers, self.callers = self.callers, deque()
        self.examples = self.ids = 0
        for caller in callers:
            caller.queue = None
        return [
            one for one in callers if now_s < one.deadline_s or self._reject_expired(one, now_s)
        ]

    def _take_some(self, now_s: float) -> list[PendingRequest]:
        callers: list[PendingRequest] = []
        all_ids = all_examples = 0
        self._queue_up()
        while (caller := self._backlog.first()) is not None:
            examples, ids = caller.request.batch_size, caller.request.ids.size
            is_late = now_s >= caller.deadline_s
            if not is_late:
                all_examples += examples
                all_ids += ids
                if callers and self._is_too_much(all_examples, all_ids):
                    break
            self._backlog.pop(0 if is_late else self._work_bytes(examples, ids))
            self._uncount(caller.request)
            caller.queue = None
            if is_late:
                self._reject_expired(caller, now_s)
            else:
                callers.append(caller)
        return callers

    def _uncount(self, request: LookupRequest) -> None:
        self.examples -= request.batch_size
        self.ids -= request.ids.size

    def _is_too_much(self, examples: int, ids: int) -> bool:
        """Whether the sizes exceed the limits for a batch of several requests."""
        output_bytes = examples * self._bytes_per_example + ids * self._bytes_per_id
        return ids > self._ids_max or output_bytes > self._output_bytes_max

    def _reject_expired(self, pending: PendingRequest, now_s: float) -> bool:
        """Rejects a request whose deadline passed in the queue; returns False for a filter."""
        waited_ms = (now_s - pending.queued_s) * 1000
        error = DeadlineExceededError(f"the deadline passed after {waited_ms:.1f} ms in the queue")
        pending.reject(error.of(self._model))
        return False
