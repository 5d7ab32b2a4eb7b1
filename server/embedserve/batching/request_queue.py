"""A bounded queue of requests that wait for a batch of one model.

A batch takes all queued requests. Where they exceed the batch limits, it takes a fair share from
each source. Abandoned and expired requests cost no lookup.
"""

from __future__ import annotations

from collections.abc import Callable

from embedserve.batching.fair_queue import FairQueue
from embedserve.batching.pending_request import NO_REQUEST, PendingRequest
from embedserve.config import Limits
from embedserve.errors import DeadlineExceededError, OverloadedError
from embedserve.lookup_types import LookupRequest
from embedserve.model_info import ModelInfo

OPEN_SHARE = 7 / 8
"""Fraction of the queue's limits below which a full queue accepts requests again.

The gap of an eighth keeps the queue from alternating between full and open."""
BATCH_REQUESTS_MAX = 1024
"""Requests of one batch, and those rejected for their deadline when it is taken. The event loop
completes a batch in one iteration, and 1,024 requests take about 10 ms."""
REQUEST_BYTES = 64 << 10
"""Cost of completing or rejecting a request, in bytes: the number of row bytes that are read in the
same time, about 9 us. Sources share it fairly, together with the work of their requests."""
SOURCE_SHARE = 1 / 2
"""Fraction of the queue's limits that one source may hold.

It keeps a single source from filling the queue and so causing all others to be rejected."""


class RequestQueue:
    """Pending requests, and the number of their batches that are being looked up.

    Times are perf_counter seconds.

    Attributes:
        pending: requests since the last batch, in order of arrival, as keys: any of them may be
            withdrawn.
        examples, ids: totals of all queued requests. Code that adds to ``pending`` adds the sizes
            of the request.
        is_full: whether the queue is full: from the time it fills up until an eighth of it is free.
        on_full: callback when the queue becomes full.
        on_room: callback when the full queue accepts requests again.
        model: model that the requests are for.
        in_flight: number of batches of this queue that have left the event loop: they are looked up
            in threads, on a GPU or in shards.
        is_saturated: whether that number is at its limit, so that the next batch has to wait.
        per_source_examples_max, per_source_ids_max: limits for one source: a caller with a token or
            certificate, over all its connections, or else a connection. While the totals of the
            queue stay within them, it is not full, and no further check is needed.
    """

    def __init__(
        self,
        name: str,
        model: ModelInfo,
        limits: Limits,
        work_bytes: Callable[[int, int], int],
        in_flight_max: int = 1,
    ) -> None:
        """
        Args:
            name: name of the queue in rejection messages.
            work_bytes: function from (examples, ids) to work in bytes, which sources share fairly.
            in_flight_max: maximum number of batches off the event loop.
        """
        self._name = name
        self.model = model
        self._limits = limits
        self.per_source_examples_max = int(SOURCE_SHARE * limits.queue_examples_max)
        self.per_source_ids_max = int(SOURCE_SHARE * limits.queue_ids_max)
        self.examples = self.ids = 0
        self.is_full = False
        self.on_full: Callable[[], None] = lambda: None
        self.on_room: Callable[[], None] = lambda: None
        self.in_flight = 0
        self.is_saturated = False
        self._in_flight_max = in_flight_max
        self.pending: dict[PendingRequest, None] = {}
        # Earlier requests, by source: they did not fit into a batch, or a share had to be checked.
        self._backlog = FairQueue()
        self._work_bytes = work_bytes
        self._output_per_example = model.response_bytes_per_example
        self._output_per_id = model.response_bytes_per_id
        # A router sends a batch to shards as one request, so the limits of a request hold as well.
        self._examples_max = limits.request_examples_max
        self._ids_max = min(limits.batch_ids_max, limits.request_ids_max)
        self._output_bytes_max = min(limits.batch_output_bytes_max, limits.request_output_bytes_max)

    def check_not_full(self) -> None:
        """Raises OverloadedError while the queue is full."""
        if self.is_full:
            raise OverloadedError(
                f"{self._name} is full: it holds {self.examples} examples and {self.ids} ids"
            ).set_model(self.model)

    def check_room(self, examples: int, ids: int, source: object) -> None:
        """Raises OverloadedError if the queue has no room for a request from ``source``.

        It may mark the queue as full. An empty queue has room for any request: the size of a single
        request is limited elsewhere.
        """
        self.check_not_full()
        self._move_to_backlog()  # which knows what each source holds
        held_examples, held_ids = self._backlog.held_by(source)
        for what, held, more, share in (
            ("examples", held_examples, examples, self.per_source_examples_max),
            ("ids", held_ids, ids, self.per_source_ids_max),
        ):
            if held and held + more > share:
                raise OverloadedError(
                    f"{self._name} holds {held} {what} of this caller; {more} more would exceed "
                    f"its share of {share}"
                )
        for what, held, more, most in (
            ("examples", self.examples, examples, self._limits.queue_examples_max),
            ("ids", self.ids, ids, self._limits.queue_ids_max),
        ):
            if held and held + more > most:
                if not self._has_free_eighth():
                    self.is_full = True
                    self.on_full()
                raise OverloadedError(
                    f"{self._name} holds {held} {what}; {more} more would exceed its limit "
                    f"of {most}"
                )

    def try_reopen(self) -> None:
        """Reopens a full queue if enough of it is free."""
        if self.is_full and self._has_free_eighth():
            self.is_full = False
            self.on_room()

    def _has_free_eighth(self) -> bool:
        """Whether an eighth is free. The queue is then not full: it rejects a request only for the
        size of that request."""
        return (
            self.examples <= OPEN_SHARE * self._limits.queue_examples_max
            and self.ids <= OPEN_SHARE * self._limits.queue_ids_max
        )

    def withdraw(self, pending: PendingRequest) -> None:
        """Removes ``pending``, which is in this queue."""
        self._uncount(pending.request)
        if not self._backlog.withdraw(pending):
            del self.pending[pending]
        pending.queue = None
        pending.request = NO_REQUEST  # frees its arrays
        self.try_reopen()

    @property
    def requests(self) -> int:
        """Number of requests that wait."""
        return len(self.pending) + len(self._backlog.source_of)

    def begin_batch(self) -> None:
        """Records that a batch leaves the event loop; ``end_batch`` records its end."""
        self.in_flight += 1
        self.is_saturated = self.in_flight >= self._in_flight_max

    def end_batch(self) -> None:
        self.in_flight -= 1
        self.is_saturated = False

    def is_ready(self) -> bool:
        """Whether a batch may be taken."""
        return bool(self.examples) and not self.is_saturated

    def first_s(self) -> float:
        """Returns the time when the next request was queued."""
        return (self._backlog.first() or next(iter(self.pending))).queued_s

    def _move_to_backlog(self) -> None:
        taken, self.pending = self.pending, {}
        for pending in taken:
            self._backlog.put(pending)

    def fills_a_batch(self) -> bool:
        """Whether the queued requests fill a batch, so that more waiting gains nothing."""
        output_bytes = self.examples * self._output_per_example + self.ids * self._output_per_id
        return (
            self.ids >= self._ids_max
            or self.examples >= self._examples_max
            or output_bytes >= self._output_bytes_max
            or self.requests >= BATCH_REQUESTS_MAX
        )

    def take(self, now_s: float) -> list[PendingRequest]:
        """Takes the requests of the next batch: as many as it may hold.

        Requests whose deadline has passed are rejected instead, so that none may be left. The queue
        is emptied first, as a rejection may queue or withdraw other requests.
        """
        is_too_much = self._is_too_much(self.examples, self.ids)
        is_too_much = is_too_much or len(self.pending) > BATCH_REQUESTS_MAX
        if is_too_much or self._backlog.source_of:
            return self._take_some(now_s)
        taken, self.pending = self.pending, {}
        self.examples = self.ids = 0
        for pending in taken:
            pending.queue = None
        return [
            pending
            for pending in taken
            if now_s < pending.deadline_s or self._reject_expired(pending, now_s)
        ]

    def _take_some(self, now_s: float) -> list[PendingRequest]:
        taken: list[PendingRequest] = []
        all_ids = all_examples = 0
        self._move_to_backlog()
        for _ in range(BATCH_REQUESTS_MAX):
            if (pending := self._backlog.first()) is None:
                break
            examples, ids = pending.request.batch_size, pending.request.ids.size
            is_late = now_s >= pending.deadline_s
            if not is_late:
                all_examples += examples
                all_ids += ids
                if taken and self._is_too_much(all_examples, all_ids):
                    break
            work_bytes = 0 if is_late else self._work_bytes(examples, ids)
            self._backlog.pop(REQUEST_BYTES + work_bytes)
            self._uncount(pending.request)
            pending.queue = None
            if is_late:
                self._reject_expired(pending, now_s)
            else:
                taken.append(pending)
        return taken

    def _uncount(self, request: LookupRequest) -> None:
        self.examples -= request.batch_size
        self.ids -= request.ids.size

    def _is_too_much(self, examples: int, ids: int) -> bool:
        """Whether the sizes exceed the limits for a batch of several requests."""
        output_bytes = examples * self._output_per_example + ids * self._output_per_id
        return (
            ids > self._ids_max
            or examples > self._examples_max
            or output_bytes > self._output_bytes_max
        )

    def _reject_expired(self, pending: PendingRequest, now_s: float) -> bool:
        """Rejects a request whose deadline passed in the queue; returns False for a filter."""
        waited_ms = (now_s - pending.queued_s) * 1000
        error = DeadlineExceededError(f"the deadline passed after {waited_ms:.1f} ms in the queue")
        pending.reject(error.set_model(self.model))
        return False


def work_bytes(bytes_per_example: int, bytes_per_id: int, examples: int, ids: int) -> int:
    """Returns the work of a batch in bytes: rows read, values written and, in
    ``bytes_per_example``, BAG_BYTES for each bag."""
    return examples * bytes_per_example + ids * bytes_per_id
