"""Requests that wait for a batch of one model.

A batch takes all of them, or where they are more than a batch may hold a fair share of each
source's. Those that nobody waits for any more cost no lookup.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from embedserve.batching.caller import Caller
from embedserve.batching.fair_queue import GONE_MIN, FairQueue
from embedserve.config import Limits
from embedserve.errors import DeadlineExceededError
from embedserve.types import LookupRequest, ModelInfo


class Lane:
    """Callers that wait, and whether a batch of them is being looked up. Times are perf_counter
    seconds.

    Attributes:
        callers: those that came since the last batch, in the order that they came; who is put here
            waits until taken or withdrawn: its queue is None then.
        examples, ids: of all that wait; who puts a caller adds its request's.
        full: why no more may wait, from when it was full until an eighth is free; "" otherwise.
        is_working: a batch of this lane is looked up in a thread: the next one waits.
    """

    __slots__ = (
        "_backlog",
        "_bytes_per_example",
        "_bytes_per_id",
        "_ids_max",
        "_output_bytes_max",
        "_withdrawn",
        "_work_bytes",
        "callers",
        "examples",
        "full",
        "ids",
        "is_working",
    )

    def __init__(
        self, model: ModelInfo, limits: Limits, work_bytes: Callable[[int, int], int]
    ) -> None:
        """``work_bytes`` of so many examples and ids is what sources share fairly."""
        self.examples = self.ids = 0
        self.full = ""
        self.is_working = False
        self.callers: deque[Caller] = deque()
        self._backlog = FairQueue()  # those that were before them, and too many for a batch
        self._withdrawn = 0  # still among the callers
        self._work_bytes = work_bytes
        self._bytes_per_example = model.answer_bytes_per_example
        self._bytes_per_id = model.answer_bytes_per_id
        self._ids_max = limits.batch_ids_max
        self._output_bytes_max = limits.batch_output_bytes_max

    def withdraw(self, caller: Caller) -> None:
        """``caller``, whose queue is None and who still has its request, waits no more."""
        self._uncount(caller.request)
        if self._backlog.withdraw(caller):
            return
        self._withdrawn += 1
        if self._withdrawn >= GONE_MIN and 2 * self._withdrawn >= len(self.callers):
            self.callers = deque([one for one in self.callers if one.queue is not None])
            self._withdrawn = 0

    @property
    def requests(self) -> int:
        """Callers that wait."""
        return len(self.callers) + len(self._backlog) - self._withdrawn

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

    def take(self, now_s: float) -> list[Caller]:
        """As many as a batch may hold, at least one, but for those whose deadline has passed: they
        are told so."""
        if self._backlog or self._withdrawn or self._is_too_much(self.examples, self.ids):
            return self._take_some(now_s)
        return self._take_all(now_s)

    def _take_all(self, now_s: float) -> list[Caller]:
        """The lane is left empty first: to refuse one may put or withdraw others."""
        callers, self.callers = self.callers, deque()
        self.examples = self.ids = 0
        for caller in callers:
            caller.queue = None
        return [one for one in callers if now_s < one.deadline_s or _refuse_late(one, now_s)]

    def _take_some(self, now_s: float) -> list[Caller]:
        callers: list[Caller] = []
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
                _refuse_late(caller, now_s)
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


def _refuse_late(caller: Caller, now_s: float) -> bool:
    """Answers one whose deadline passed as it waited; False: it is not looked up."""
    waited_ms = (now_s - caller.queued_s) * 1000
    caller.refuse(
        DeadlineExceededError(f"the deadline passed after {waited_ms:.1f} ms in the queue")
    )
    return False
