"""Counts of a router's calls of one part, as plain attributes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from embedserve.metrics.histogram import SECONDS_BUCKETS
from embedserve.model_names import VersionKey

SHARD_OUTCOMES = ("ok", "deadline_exceeded", "overloaded", "unavailable", "error")
"""Outcomes of a call to a part, which may have taken calls to several replicas."""


class LatencyHistogram:
    """A histogram with the buckets SECONDS_BUCKETS.

    Attributes:
        counts: observations by bucket, not cumulated; the last bucket has no bound.
        total_s: sum of the observations.
    """

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS_BUCKETS) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS_BUCKETS, seconds)] += 1
        self.total_s += seconds


def _by_outcome() -> dict[str, LatencyHistogram]:
    return {outcome: LatencyHistogram() for outcome in SHARD_OUTCOMES}


@dataclass(slots=True)
class PartStats:
    """Counts of the lookups of one part since the start.

    Attributes:
        seconds: latency of lookups by outcome, from the call of ``look_up`` to its reply.
        in_flight: lookups in flight.
        attempts: calls of replicas, retries and hedges included.
        hedges: second calls of lookups that took long.
        retries: calls after one that failed.
        hung: calls elsewhere because a replica was silent.
        bytes_sent: bytes of request messages, of every attempt.
        bytes_received: bytes of response messages that were used.
        replicas: number of replicas that have joined, by version.
    """

    seconds: Mapping[str, LatencyHistogram] = field(default_factory=_by_outcome)
    in_flight: int = 0
    attempts: int = 0
    hedges: int = 0
    retries: int = 0
    hung: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    replicas: dict[VersionKey, int] = field(default_factory=dict)
