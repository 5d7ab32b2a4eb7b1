"""Where the time of one request went, from its first byte to its written answer."""

from __future__ import annotations

from dataclasses import dataclass

STAGES = ("read", "queue", "lookup", "encode", "write")
"""In their order. read: until the body had come and was decoded; queue: until a batch took it;
lookup: until the vectors of its batch were there; encode: until its answer's bytes were, with those
before it in the batch; write: until they were handed to the socket, or to what collects them."""


@dataclass(frozen=True, slots=True)
class StageTimings:
    """perf_counter seconds.

    Attributes:
        begins: when each of STAGES began, as far as the request came.
        end_s: when its last stage ended.
    """

    begins: tuple[float, ...]
    end_s: float

    @property
    def total_s(self) -> float:
        return self.end_s - self.begins[0]

    def stages(self) -> list[tuple[str, float, float]]:
        """(name, when it began, when it ended) of those that there were."""
        ends = (*self.begins[1:], self.end_s)
        return list(zip(STAGES, self.begins, ends, strict=False))

    def milliseconds(self) -> dict[str, float]:
        """The length of each stage that there was, and "total", with a thousandth."""
        lengths = {name: end_s - begin_s for name, begin_s, end_s in self.stages()}
        lengths["total"] = self.total_s
        return {name: round(seconds * 1000, 3) for name, seconds in lengths.items()}

    def server_timing(self) -> bytes:
        """As the header Server-Timing has it, in milliseconds."""
        parts = [f"{name};dur={ms:g}" for name, ms in self.milliseconds().items()]
        return ", ".join(parts).encode()
