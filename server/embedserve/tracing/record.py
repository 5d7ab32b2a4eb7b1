"""Record of one finished request for the log and traces."""

from __future__ import annotations

from dataclasses import dataclass

from embedserve.call_trace import CallTrace
from embedserve.tracing.stage_timings import StageTimings
from embedserve.tracing.trace_context import TraceContext

NAME_CHARACTERS_MAX = 128
"""Characters of a model name shown in the log; clients can put names of any length into a URL."""


@dataclass(slots=True)
class RequestRecord:
    """Finished request.

    Attributes:
        request_id: id sent by the caller, or a generated id.
        protocol: rest or grpc.
        outcome: OK, CANCELLED, or the code of its error.
        timings: latency breakdown by stage.
        model: name under which the model is served. If the request was never enqueued: the name in
            its URL, "" for none.
        version: version of the model; 0 if the request was never enqueued.
        examples, ids: number of examples and ids in the decoded body; 0 if there is none.
        caller: name of the grant of its token or certificate; "" without authentication.
        address: address of the client, or of the nearest proxy that is not trusted; "" if unknown.
        trace: trace context; None if there is none.
        calls: calls of other servers for its batch; None if no request of the batch is traced.
    """

    request_id: str
    protocol: str
    outcome: str
    timings: StageTimings
    model: str = ""
    version: int = 0
    examples: int = 0
    ids: int = 0
    caller: str = ""
    address: str = ""
    trace: TraceContext | None = None
    calls: CallTrace | None = None

    def fields(self) -> dict[str, object]:
        """Returns the fields for a log line, without empty and zero values."""
        known: dict[str, object] = {
            "request_id": self.request_id,
            "trace_id": "" if self.trace is None else self.trace.trace_id,
            "caller": self.caller,
            "address": self.address,
            "protocol": self.protocol,
            "model": self.model[:NAME_CHARACTERS_MAX],
            "version": self.version,
            "examples": self.examples,
            "ids": self.ids,
            "outcome": self.outcome,
        }
        fields = {name: value for name, value in known.items() if value not in ("", 0)}
        return fields | {f"{name}_ms": ms for name, ms in self.timings.milliseconds().items()}
