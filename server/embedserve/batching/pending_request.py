"""Who waits for the answer to a request: what the batcher knows of its callers.

A caller is told once, on the event loop's thread, and must not raise: what goes wrong in telling
one must not reach the requests that shared its batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from embedserve.errors import EmbedServeError
from embedserve.lookup import LookupRequest, LookupResult
from embedserve.model_info import ModelInfo


class Queue(Protocol):
    """Where a caller waits, for the model that it asks."""

    model: ModelInfo

    def withdraw(self, pending: PendingRequest) -> None: ...


class BatchTicket:
    """A batch that requests were taken into. Times are perf_counter seconds.

    Attributes:
        model: that it is looked up in.
        answered: takes the seconds of each of its requests that was answered.
        taken_s: when it was taken out of the queue.
        looked_up_s: when its vectors were there; None until then.
    """

    __slots__ = ("answered", "looked_up_s", "model", "taken_s")

    def __init__(self, model: ModelInfo, taken_s: float, answered: Callable[[float], None]) -> None:
        self.model = model
        self.answered = answered
        self.taken_s = taken_s
        self.looked_up_s: float | None = None


class PendingRequest(ABC):
    """One request in a queue, and whoever waits for it. Times are perf_counter seconds.

    Attributes:
        is_waiting: False once it went away: its request leaves the queue before it costs a
            lookup, and it is told nothing.
        queue: where it waits; None before, and once its batch was taken.
        request: in the model's order; set as it is queued.
        queued_s: when that was.
        taken: the batch that it is in; set as that is taken.
        deadline_s: when nobody wants the answer any more.
    """

    __slots__ = ("deadline_s", "is_waiting", "queue", "queued_s", "request", "ticket")

    deadline_s: float
    is_waiting: bool
    queue: Queue | None
    queued_s: float
    request: LookupRequest
    ticket: BatchTicket

    @property
    def source(self) -> object:
        """Who asks: those of one source share what there is for one. By default each is one."""
        return self

    @property
    def routing_key(self) -> bytes:
        """Who is to be answered by the same version each time, where several share a model; b"" for
        anybody."""
        return b""

    @abstractmethod
    def complete(self, result: LookupResult) -> None:
        """Takes the vectors, which are a slice of the whole batch's: kept, they keep it."""

    @abstractmethod
    def reject(self, error: EmbedServeError) -> None:
        """Takes why there are none."""

    def abandon(self) -> None:
        """Nobody waits any more: its request leaves the queue before it costs a lookup."""
        self.is_waiting = False
        if self.queue is not None:
            self.queue.withdraw(self)
