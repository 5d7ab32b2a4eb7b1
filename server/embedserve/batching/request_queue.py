"""Requests that wait for a batch of one model.

A batch takes all of them, or where they are more than a batch may hold a fair share of each
source's. Those that nobody waits for any more cost no lookup.
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
"""Of its limits; a queue that was full and holds less takes requests again."""
SOURCE_SHARE = 1 / 2
"""Of its limits, that one source may hold: it cannot have all others refused."""


class RequestQueue:
    """Callers that wait, and how many batches of them are being looked up. Times are perf_counter
    seconds.

    Attributes:
        callers: those that came since the last batch, in the order that they came; who is put here
            waits until taken or withdrawn: its queue is None then.
        examples, ids: of all that wait; who puts a caller adds its request's.
        full: why no more may wait, from when it was full until an eighth is free; "" otherwise.
        under_way: batches of this lane that are looked up in threads.
        is_working: these are as many as may be: the next one waits.
        share_examples, share_ids: what one source may hold. While no more than these wait in all
            there is room, and nothing to check.
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
            name: of the queue, in refusals.
            work_bytes: of so many examples and ids, is what sources share fairly.
            at_once: batches that may be looked up in threads.
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
        self._backlog = FairQueue()  # those that were before them, and too many for a batch
        self._withdrawn = 0  # still among the callers
        self._work_bytes = work_bytes
        self._bytes_per_example = model.response_bytes_per_example
        self._bytes_per_id = model.response_bytes_per_id
        self._ids_max = limits.batch_ids_max
        self._output_bytes_max = limits.batch_output_bytes_max

    def check_open(self) -> None:
        """Raises OverloadedError while the lane is full."""
        if self.full:
            raise OverloadedError(self.full).of(self._model)

    def check_room(self, examples: int, ids: int, source: object) -> None:
        """Raises OverloadedError where so many more of ``source`` have no room; the lane may be
        full then. A lone request always has room: what one may hold is limited elsewhere."""
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
        """Has one that was full take requests where it may; whether it does."""
        if self._has_room():
            self.full = ""
        return not self.full

    def _has_room(self) -> bool:
        """Whether an eighth is free: what is refused then is refused for its size."""
        return (
            self.examples <= OPEN_SHARE * self._limits.queue_examples_max
            and self.ids <= OPEN_SHARE * self._limits.queue_ids_max
        )

    def withdraw(self, pending: PendingRequest) -> None:
        """``caller``, whose queue is None and who still has its request, waits no more."""
        self._uncount(pending.request)
        if self._backlog.withdraw(pending):
            return
        self._withdrawn += 1
        if self._withdrawn >= GONE_MIN and 2 * self._withdrawn >= len(self.callers):
            self.callers = deque([one for one in self.callers if one.queue is not None])
            self._withdrawn = 0

    @property
    def requests(self) -> int:
        """Callers that wait."""
        return len(self.callers) + len(self._backlog) - self._withdrawn

    def begin(self) -> None:
        """A batch is looked up in a thread, until ``end``."""
        self.under_way += 1
        self.is_working = self.under_way >= self._at_once

    def end(self) -> None:
        self.under_way -= 1
        self.is_working = False

    def is_ready(self) -> bool:
        """Whether a batch may be taken: one that all have left is empty."""
        return bool(self.callers or self._backlog) and not self.is_working

    def first_s(self) -> float:
        """Since when the next caller waits."""
        return (self._backlog.first() or self.callers[0]).queued_s

    def held_by(self, source: object) -> tuple[int, int]:
        """(examples, ids) of those that wait and are of ``source``."""
        self._queue_up()
        return self._backlog.held_by(source)

    def _queue_up(self) -> None:
        callers, self.callers = self.callers, deque()
        self._withdrawn = 0
        for caller in callers:
            if caller.queue is not None:
                self._backlog.put(caller)

    def fills_a_batch(self) -> bool:
        """Whether nothing is gained by waiting for more."""
        output_bytes = self._output_bytes(self.examples, self.ids)
        return self.ids >= self._ids_max or output_bytes >= self._output_bytes_max

    def take(self, now_s: float) -> list[PendingRequest]:
        """As many as a batch may hold, at least one, but for those whose deadline has passed: they
        are told so."""
        if self._backlog or self._withdrawn or self._is_too_much(self.examples, self.ids):
            return self._take_some(now_s)
        return self._take_all(now_s)

    def _take_all(self, now_s: float) -> list[PendingRequest]:
        """The lane is left empty first: to refuse one may put or withdraw others."""
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
        """For one batch of several requests."""
        return ids > self._ids_max or self._output_bytes(examples, ids) > self._output_bytes_max

    def _output_bytes(self, examples: int, ids: int) -> int:
        return examples * self._bytes_per_example + ids * self._bytes_per_id

    def _reject_expired(self, pending: PendingRequest, now_s: float) -> bool:
        """Answers one whose deadline passed as it waited; False: it is not looked up."""
        waited_ms = (now_s - pending.queued_s) * 1000
        error = DeadlineExceededError(f"the deadline passed after {waited_ms:.1f} ms in the queue")
        pending.reject(error.of(self._model))
        return False
