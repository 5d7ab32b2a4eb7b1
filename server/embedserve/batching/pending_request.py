"""Interface of a pending request, as the batcher sees it.

The batcher completes or rejects a request once, on the event loop's thread. Implementations must
not raise: a failure in one request must not affect other requests of its batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from embedserve.call_trace import CallTrace, SampledTrace
from embedserve.errors import EmbedServeError
from embedserve.lookup_types import LookupRequest, LookupResult
from embedserve.model_info import ModelInfo

if TYPE_CHECKING:
    from embedserve.batching.request_queue import RequestQueue

NO_REQUEST = LookupRequest("", (), np.empty(0, np.int64), np.empty(0, np.int32), None, 0)
"""Request of a pending request that is not queued: no examples, no ids."""


class BatchTicket(msgspec.Struct, eq=False):
    """The batch that a request joined, shared by its requests. Times are perf_counter seconds.

    Attributes:
        calls: record of the calls of other servers for the batch; None if no request of it is
            traced.
        model: model that the batch is looked up in.
        observe_latency: callback that records the seconds of each answered request.
        taken_s: time when the batch was taken from the queue.
        looked_up_s: time when its vectors were available; None until then.
    """

    model: ModelInfo
    taken_s: float
    observe_latency: Callable[[float], None]
    looked_up_s: float | None = None
    calls: CallTrace | None = None

    def trace_calls(self, requests: Iterable[PendingRequest]) -> CallTrace | None:
        """Begins the record of calls if one of ``requests``, those of the batch, is traced."""
        for pending in requests:
            if (trace := pending.trace) is not None:
                self.calls = CallTrace(trace)
                return self.calls
        return None


class PendingRequest(ABC):
    """One request, and the client that waits for it. Times are perf_counter seconds.

    Attributes:
        deadline_s: time after which the client no longer needs the response. There is no timer:
            steps compare it as they begin, from decoding to the lookup of a large batch.
        is_waiting: whether the client still waits. False once the response is written, the request
            is rejected, or it is abandoned.
        queue: queue that has the request; None before, and once its batch is taken.
        queued_s: time when the request was queued; 0 before.
        request: decoded request, in the model's order; a large one is in its caller's order until
            its batch is joined. NO_REQUEST before it is queued, and once withdrawn.
        ticket: ticket of its batch; None until the batch is taken.
    """

    __slots__ = ("deadline_s", "is_waiting", "queue", "queued_s", "request", "ticket")

    deadline_s: float
    is_waiting: bool
    queue: RequestQueue | None
    queued_s: float
    request: LookupRequest
    ticket: BatchTicket | None

    @property
    def source(self) -> object:
        """Source of the request for fair sharing: requests of one source share its part of a queue.

        By default each request is its own source.
        """
        return self

    @property
    def routing_key(self) -> bytes:
        """Key that pins requests to one version where several versions share a model.

        With b"" any version may serve the request.
        """
        return b""

    @property
    def trace(self) -> SampledTrace | None:
        """Trace that the request is recorded in; None if it is not sampled."""
        return None

    @abstractmethod
    def complete(self, result: LookupResult) -> None:
        """Receives the vectors, a slice of the batch: a reference keeps the whole batch alive."""

    @abstractmethod
    def reject(self, error: EmbedServeError) -> None:
        """Receives the error instead of vectors."""

    def abandon(self) -> None:
        """Abandons the request: it is not notified, and if still queued leaves without a lookup."""
        self.is_waiting = False
        if self.queue is not None:
            self.queue.withdraw(self)
