"""Requests that wait for a batch of one model, first come, first served.

A batch takes all of them, or where they are more than a batch may hold the first ones. Those that
nobody waits for any more cost no lookup.
"""

from __future__ import annotations

from collections import deque

from embedserve.batching.caller import Caller
from embedserve.config import Limits
from embedserve.errors import DeadlineExceededError
from embedserve.types import LookupRequest, ModelInfo

WITHDRAWN_MIN = 1024
"""Callers that went away are taken from the middle once they are so many, and half of all."""


class Lane:
    """Callers that wait, and whether a batch of them is being looked up. Times are perf_counter
    seconds.

    Attributes:
        examples, ids: of the callers that wait.
        is_working: a batch of this lane is looked up in a thread: the next one waits.
    """

    __slots__ = (
        "_bytes_per_example",
        "_bytes_per_id",
        "_callers",
        "_ids_max",
        "_output_bytes_max",
        "_withdrawn",
        "examples",
        "ids",
        "is_working",
    )

    def __init__(self, model: ModelInfo, limits: Limits) -> None:
        self.examples = self.ids = 0
        self.is_working = False
        self._callers: deque[Caller] = deque()
        self._withdrawn = 0  # still among them
        self._bytes_per_example = model.answer_bytes_per_example
        self._bytes_per_id = model.answer_bytes_per_id
        self._ids_max = limits.batch_ids_max
        self._output_bytes_max = limits.batch_output_bytes_max

    def put(self, caller: Caller) -> None:
        """``caller`` waits with its request, until taken or withdrawn: its queue is None then."""
        self._callers.append(caller)
        request = caller.request
        self.examples += request.batch_size
        self.ids += request.ids.size

    def withdraw(self, request: LookupRequest) -> None:
        """The caller of ``request``, whose queue is None, waits no more."""
        self._uncount(request)
        self._withdrawn += 1
        if self._withdrawn >= WITHDRAWN_MIN and 2 * self._withdrawn >= len(self._callers):
            self._callers = deque([one for one in self._callers if one.queue is not None])
            self._withdrawn = 0

    @property
    def requests(self) -> int:
        """Callers that wait."""
        return len(self._callers) - self._withdrawn

    def is_ready(self) -> bool:
        """Whether a batch may be taken: one that all have left is empty."""
        return bool(self._callers) and not self.is_working

    def first_s(self) -> float:
        """Since when the first caller waits."""
        return self._callers[0].queued_s

    def fills_a_batch(self) -> bool:
        """Whether nothing is gained by waiting for more."""
        output_bytes = self._output_bytes(self.examples, self.ids)
        return self.ids >= self._ids_max or output_bytes >= self._output_bytes_max

    def take(self, now_s: float) -> list[Caller]:
        """As many as a batch may hold, at least one, but for those whose deadline has passed: they
        are told so."""
        if self._withdrawn or self._is_too_much(self.examples, self.ids):
            return self._take_some(now_s)
        return self._take_all(now_s)

    def _take_all(self, now_s: float) -> list[Caller]:
        """The lane is left empty first: to refuse one may put or withdraw others."""
        callers, self._callers = self._callers, deque()
        self.examples = self.ids = 0
        for caller in callers:
            caller.queue = None
        return [one for one in callers if now_s < one.deadline_s or _refuse_late(one, now_s)]

    def _take_some(self, now_s: float) -> list[Caller]:
        callers: list[Caller] = []
        ids = examples = 0
        while self._callers:
            caller = self._callers[0]
            if caller.queue is None:  # withdrawn
                self._callers.popleft()
                self._withdrawn -= 1
                continue
            ids += caller.request.ids.size
            examples += caller.request.batch_size
            if callers and self._is_too_much(examples, ids):
                break
            self._callers.popleft()
            self._uncount(caller.request)
            caller.queue = None
            if now_s < caller.deadline_s or _refuse_late(caller, now_s):
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
