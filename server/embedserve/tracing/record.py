"""What the log and traces tell of one request that has ended."""

from __future__ import annotations

from dataclasses import dataclass

from embedserve.tracing.stage_timings import StageTimings
from embedserve.tracing.trace_context import TraceContext

NAME_CHARACTERS_MAX = 128
"""Shown of a model's name, which may be whatever a URL says."""


@dataclass(slots=True)
class RequestRecord:
    """A request that has ended.

    Attributes:
        request_id: the caller's, or made.
        protocol: rest or grpc.
        outcome: OK, CANCELLED, or the code of its error.
        times: where its time went.
        model: as served; of a request that came to no queue as its URL says, "" for nothing.
        version: 0 where it came to no queue.
        examples, ids: of its body, once that was decoded.
        caller: the name of its token or certificate, "" where none was asked for.
        address: of its client, or of the nearest proxy that is not trusted.
        trace: None where there is none.
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

    def fields(self) -> dict[str, object]:
        """For a line of the log; what is not known is left out."""
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
