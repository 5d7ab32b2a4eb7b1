"""Latency breakdown of one request by stage, from its headers to its written response."""

from __future__ import annotations

from dataclasses import dataclass

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
