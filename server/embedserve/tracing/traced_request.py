"""A request with telemetry: request id, stage timings and trace context.

All of them are computed only when they are reported. A request that is not reported pays nothing.
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
    """Options from the request headers that telemetry needs."""

    @property
    def model(self) -> str:
        """Model name in the URL; "" for none."""

    @property
    def metrics(self) -> ProtocolMetrics:
        """Metrics of the request's protocol."""


class TracedRequest(PendingRequest):
    """Request that can report its id, stage timings and trace context.

    Attributes:
        options: options parsed from the request headers.
        start_s: perf_counter when the first byte of the request arrived.
        quota: caller of the request from its admission until its end; None without authentication.
    """

    __slots__ = ("_request_id", "quota", "start_s")

    _request_id: bytes
    options: TracedOptions
    quota: CallerQuota | None
    start_s: float

    def header(self, name: bytes) -> bytes | None:
        """Returns a header that differs from request to request, such as the request id or the
        trace context; None if absent. ``name`` is in lower case."""
        return None

    @property
    def address(self) -> str:
        """Address of the client; "" if unknown."""
        return ""

    @property
    def request_id(self) -> bytes:
        """Request id sent by the caller, or else an id generated on first use."""
        try:
            return self._request_id
        except AttributeError:
            self._request_id = request_id_of(self.header(REQUEST_ID))
            return self._request_id

    def times(self, end_s: float, encoded_s: float | None = None) -> StageTimings:
        """Returns the stage timings of the request up to ``end_s`` (perf_counter).

        Args:
            encoded_s: perf_counter when the response was encoded; None if there is no response.
        """
        begins = [self.start_s]
        # Unset slots: the request was never enqueued, or no batch took it.
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
        """Ends the request with ``outcome``: its caller no longer counts it as in flight."""
        if self.quota is not None:
            self.quota.leave(outcome)
            self.quota = None

    def seen(
        self, outcome: str, encoded_s: float | None = None
    ) -> Callable[[float], RequestRecord]:
        """Returns a function from the end time (perf_counter) to the record of the request. The
        record names the current caller, since ``leave`` clears ``quota``."""
        client = self.quota
        return lambda end_s: self._record(outcome, client, self.times(end_s, encoded_s))

    @property
    def version(self) -> ModelInfo | None:
        """Version that serves the request: that of its batch or else of its queue. None before it
        is enqueued."""
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
