"""Samples memory of the server's processes and the neighbour's latencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from hostile.canary_client import anonymous_kib
from load import quantile
from soak.faults import Servers
from soak.tally import Phases, Tally

EVERY_S = 2.0
QUIET_S = 1.0
"""Seconds after a fault in which the neighbour's latencies are not counted."""
SAMPLES_MIN = 24
"""Samples from which a trend can be computed."""


@dataclass
class Sample:
    """Measurements of EVERY_S seconds.

    Attributes:
        memory_mb: anonymous memory of each process of the server.
        waits_ms: latencies of the neighbour's answered requests, sorted at the end.
        answered, refused: requests of all clients.
    """

    memory_mb: dict[int, float] = field(default_factory=dict)
    waits_ms: list[float] = field(default_factory=list)
    answered: int = 0
    refused: int = 0

    @property
    def p99_ms(self) -> float:
        return quantile(self.waits_ms, 0.99) if self.waits_ms else float("nan")

    @property
    def slowest_ms(self) -> float:
        return self.waits_ms[-1] if self.waits_ms else float("nan")


class Watch:
    """Samples of every EVERY_S seconds since the start.

    Attributes:
        samples: samples in the order of time.
    """

    def __init__(self, servers: Servers, phases: Phases) -> None:
        self.samples: list[Sample] = []
        self._servers = servers
        self._phases = phases

    def look(self, at_s: float) -> None:
        """Records the present memory."""
        memory = self._at(at_s).memory_mb
        for pid in self._servers.pids():
            try:
                memory[pid] = anonymous_kib(pid) / 1024
            except (OSError, AssertionError):  # it has just ended
                continue

    def add(self, at_s: float, tally: Tally) -> None:
        sample = self._at(at_s)
        sample.answered += tally.answered.total()
        sample.refused += tally.refused.total()
        for asked_s, seconds in tally.latencies:
            self._at(asked_s).waits_ms.append(seconds * 1e3)
        tally.latencies.clear()

    def finish(self) -> None:
        for sample in self.samples:
            sample.waits_ms.sort()

    def _at(self, at_s: float) -> Sample:
        number = max(0, int((at_s - self._phases.start_s) / EVERY_S))
        while len(self.samples) <= number:
            self.samples.append(Sample())
        return self.samples[number]

    def of_phase(self, is_overload: bool, faults: Sequence[tuple[float, float]]) -> list[Sample]:
        """Returns the samples within phases of that kind that no fault (from, to) touches."""
        found = []
        for number, sample in enumerate(self.samples):
            start_s = self._phases.start_s + number * EVERY_S
            ends = (start_s, start_s + EVERY_S)
            is_alike = all(self._phases.is_overload(at_s) is is_overload for at_s in ends)
            is_quiet = all(ends[1] < a or ends[0] > b + QUIET_S for a, b in faults)
            if is_alike and is_quiet and sample.waits_ms:
                found.append(sample)
        return found


def drift(values: Sequence[float]) -> tuple[float, float] | None:
    """Returns the medians of the second and of the last quarter; None for too few values."""
    count = len(values)
    if count < SAMPLES_MIN:
        return None
    return median(values[count // 4 : count // 2]), median(values[-(count // 4) :])
