"""A caller of whom the log and traces can tell: when what began, by which id, in which trace.

What is told is looked up only once it is told: a request that nobody asks about pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from embedserve.access.authenticator import CallerQuota
from embedserve.batching.pending_request import PendingRequest
from embedserve.metrics.metrics import ProtocolMetrics
from embedserve.model_info import ModelInfo
from embedserve.tracing.record import RequestRecord
from embedserve.tracing.request_id import REQUEST_ID, request_id_of
from embedserve.tracing.stage_timings import StageTimings
from embedserve.tracing.trace_context import TRACEPARENT, read_traceparent


class TracedOptions(Protocol):
    """What the head of a request says."""

    @property
    def model(self) -> str:
        """Of its URL; "" for none."""

    @property
    def metrics(self) -> ProtocolMetrics:
        """Of its protocol."""


class TracedRequest(PendingRequest):
    """One request and whoever waits for it.

    Attributes:
        options: what its head says.
        start_s: perf_counter when its first byte came.
        client: who asks, from when it is admitted until it ends; None where nobody needs to say.
    """

    __slots__ = ("_request_id", "quota", "start_s")

    _request_id: bytes
    options: TracedOptions
    quota: CallerQuota | None
    start_s: float

    def header(self, name: bytes) -> bytes | None:
        """A header of this request alone (``name`` in lower case): who asks, and in which trace."""
        return None

    @property
    def address(self) -> str:
        """The address of its client; "" where it is not known."""
        return ""

    @property
    def request_id(self) -> bytes:
        """Its caller's, or else one that is made when it is first asked for."""
        try:
            return self._request_id
        except AttributeError:
            self._request_id = request_id_of(self.header(REQUEST_ID))
            return self._request_id

    def times(self, end_s: float, encoded_s: float | None = None) -> StageTimings:
        """Until ``end_s``.

        Args:
            encoded_s: when its answer was; None where it has none.
        """
        begins = [self.start_s]
        # A slot that was not set: it came to no queue, or no batch took it.
        begins += [self.queued_s] if hasattr(self, "queued_s") else []
        if hasattr(self, "ticket"):
            looked_up_s = self.ticket.looked_up_s
            begins += (
                [self.ticket.taken_s]
                if looked_up_s is None
                else [
                    self.ticket.taken_s,
                    looked_up_s,
                ]
            )
        begins += [] if encoded_s is None else [encoded_s]
        return StageTimings(tuple(begins), end_s)

    def leave(self, outcome: str) -> None:
        """Is no more among those of its client that are under way: it ended as ``outcome``."""
        if self.quota is not None:
            self.quota.leave(outcome)
            self.quota = None

    def seen(
        self, outcome: str, encoded_s: float | None = None
    ) -> Callable[[float], RequestRecord]:
        """What makes its record, given when it ended; its client is that of now."""
        client = self.quota
        return lambda end_s: self._record(outcome, client, self.times(end_s, encoded_s))

    @property
    def version(self) -> ModelInfo | None:
        """The version in whose batch or queue it is; None before."""
        if hasattr(self, "ticket"):
            return self.ticket.model
        return None if self.queue is None else self.queue.model

    def _record(
        self, outcome: str, quota: CallerQuota | None, timings: StageTimings
    ) -> RequestRecord:
        model = self.version
        request = getattr(self, "request", None)
        return RequestRecord(
            request_id=self.request_id.decode("ascii"),
            protocol=self.options.metrics.protocol,
            outcome=outcome,
            timings=timings,
            model=self.options.model if model is None else model.served_as,
            version=0 if model is None else model.version,
            examples=0 if request is None else request.batch_size,
            ids=0 if request is None else request.ids.size,
            caller="" if quota is None else quota.grant.name,
            address=self.address,
            trace=read_traceparent(self.header(TRACEPARENT)),
        )
