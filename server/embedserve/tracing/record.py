"""Record of one finished request for the log and traces, with its latency breakdown by stage."""

from __future__ import annotations

from dataclasses import dataclass

from embedserve.call_trace import CallTrace
from embedserve.tracing.trace_context import TraceContext

NAME_CHARACTERS_MAX = 128
"""Characters of a model name shown in the log; clients can put names of any length into a URL."""


STAGES = ("read", "queue", "lookup", "encode", "write")
"""Stages of a request in order; each ends where the next begins.

- read: from the end of the headers until the body has arrived and is decoded.
- queue: until a batch takes the request.
- lookup: until the vectors of its batch are available.
- encode: until its response is encoded, after the earlier responses of the batch.
- write: until the response is handed to the socket or to the connection's write buffer.
"""


@dataclass(frozen=True, slots=True)
class StageTimings:
    """Stage timings of one request, in perf_counter seconds.

    Attributes:
        begins: start times of the stages that the request reached, in the order of STAGES.
        end_s: end time of its last stage.
    """

    begins: tuple[float, ...]
    end_s: float

    @property
    def total_s(self) -> float:
        return self.end_s - self.begins[0]

    def stages(self) -> list[tuple[str, float, float]]:
        """Returns (name, start time, end time) of each stage that the request reached."""
        ends = (*self.begins[1:], self.end_s)
        return list(zip(STAGES, self.begins, ends, strict=False))

    def milliseconds(self) -> dict[str, float]:
        """Returns the duration of each stage that the request reached, and of "total", in
        milliseconds with three decimals."""
        lengths = {name: end_s - begin_s for name, begin_s, end_s in self.stages()}
        lengths["total"] = self.total_s
        return {name: round(seconds * 1000, 3) for name, seconds in lengths.items()}

    def server_timing(self) -> bytes:
        """Returns the value of the Server-Timing header, with durations in milliseconds."""
        entries = [f"{name};dur={ms:g}" for name, ms in self.milliseconds().items()]
        return ", ".join(entries).encode()


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
