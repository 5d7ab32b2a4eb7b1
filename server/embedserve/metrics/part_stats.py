"""Counts of a router's calls of one part, as plain attributes."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from embedserve.metrics.histogram import SECONDS_BUCKETS
from embedserve.model_names import VersionKey

SHARD_OUTCOMES = ("ok", "deadline_exceeded", "overloaded", "unavailable", "error")
"""Outcomes of a call to a part, which may have taken calls to several replicas."""


@dataclass(slots=True)
class PartStats:
    """Counts of the lookups of one part since the start.

    Attributes:
        calls: lookups that have ended, by outcome.
        seconds: those lookups by bucket of SECONDS_BUCKETS, not cumulated, by their latency from
            the call of ``look_up`` to its reply; the last bucket has no bound.
        total_s: sum of their latencies.
        in_flight: lookups in flight.
        attempts: calls of replicas, retries and hedges included.
        hedges: second calls of lookups that took long.
        retries: calls after one that failed.
        hung: calls elsewhere because a replica was silent.
        bytes_sent: bytes of request messages, of every attempt.
        bytes_received: bytes of response messages that were used.
        replicas: number of replicas that have joined, by version.
    """

    calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SHARD_OUTCOMES, 0))
    seconds: list[int] = field(default_factory=lambda: [0] * (len(SECONDS_BUCKETS) + 1))
    total_s: float = 0.0
    in_flight: int = 0
    attempts: int = 0
    hedges: int = 0
    retries: int = 0
    hung: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    replicas: dict[VersionKey, int] = field(default_factory=dict)

    def count_call(self, outcome: str, seconds: float) -> None:
        """Counts a lookup that has ended with one of SHARD_OUTCOMES."""
        self.calls[outcome] += 1
        self.seconds[bisect_left(SECONDS_BUCKETS, seconds)] += 1
        self.total_s += seconds
