"""Requests to a batcher that complete a future; cancelling the future withdraws the request."""

import asyncio

from embedserve.batching.batcher import Batcher
from embedserve.batching.pending_request import NO_REQUEST, PendingRequest
from embedserve.errors import EmbedServeError
from embedserve.lookup_types import LookupRequest, LookupResult
from embedserve.models.model_registry import ModelRegistry

NEVER = float("inf")


class FutureRequest(PendingRequest):
    """Completes a future. A second result or error raises InvalidStateError in the batcher."""

    __slots__ = ("_routing_key", "_source", "future")

    def __init__(
        self,
        future: asyncio.Future[LookupResult],
        deadline_s: float = NEVER,
        source: object | None = None,
        routing_key: bytes = b"",
    ) -> None:
        """``source`` identifies the caller; None stands for a source of the request's own."""
        self.future = future
        self._routing_key = routing_key
        self._source = source
        self.deadline_s = deadline_s
        self.is_waiting = True
        self.queue = None
        self.queued_s = 0.0
        self.request = NO_REQUEST
        self.ticket = None

    @property
    def source(self) -> object:
        return self if self._source is None else self._source

    @property
    def routing_key(self) -> bytes:
        return self._routing_key

    def complete(self, result: LookupResult) -> None:
        self.future.set_result(result)

    def reject(self, error: EmbedServeError) -> None:
        self.future.set_exception(error)


class Waiting(asyncio.Future[LookupResult]):
    """Future of a FutureRequest's result.

    Attributes:
        pending: the request, which is abandoned when this future is cancelled.
    """

    def __init__(
        self, deadline_s: float = NEVER, source: object | None = None, routing_key: bytes = b""
    ) -> None:
        super().__init__()
        self.pending = FutureRequest(self, deadline_s, source, routing_key)

    def cancel(self, msg: object = None) -> bool:
        self.pending.abandon()
        return super().cancel(msg)


def submit(
    batcher: Batcher,
    request: LookupRequest,
    deadline_s: float = NEVER,
    source: object | None = None,
) -> Waiting:
    """Queues ``request`` (in the model's order). Raises OverloadedError if the queue is full."""
    waiting = Waiting(deadline_s, source)
    batcher.enqueue(request, waiting.pending)
    return waiting


def submit_to(models: ModelRegistry, request: LookupRequest, routing_key: bytes = b"") -> Waiting:
    """Queues ``request`` at its model. Raises EmbedServeError if it is rejected immediately."""
    waiting = Waiting(routing_key=routing_key)
    models.enqueue(request, waiting.pending)
    return waiting
