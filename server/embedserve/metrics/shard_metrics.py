"""Calls of a router to the parts of its tables, and their replicas, in cells of shared memory.

The number of parts is fixed at the start, as the cells are. Parts beyond it, which a later version
may have, are not counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np

from embedserve.metrics.families import Sample
from embedserve.metrics.histogram import SECONDS_BUCKETS, histogram_cells, histogram_samples
from embedserve.metrics.shared_counters import Cells, WorkerCounters, key_of
from embedserve.model_names import VersionKey
from embedserve_store.plans.plan import Plan

SHARD_OUTCOMES = ("ok", "deadline_exceeded", "overloaded", "unavailable", "error")
"""Outcomes of a call to a part, which may have taken calls to several replicas."""
COUNTS = (
    ("embedserve_shard_hedges", ()),
    ("embedserve_shard_retries", ()),
    ("embedserve_shard_hung", ()),
    ("embedserve_shard_bytes", ("sent",)),
    ("embedserve_shard_bytes", ("received",)),
)
"""Family and further labels of each counter of a part, in the order of the cells."""
_WIDTHS = (len(SHARD_OUTCOMES), histogram_cells(SECONDS_BUCKETS), len(COUNTS))
_OUTCOMES, _SECONDS, _COUNTS = (
    slice(start, end) for start, end in pairwise(np.cumsum([0, *_WIDTHS]).tolist())
)
PART_CELLS = sum(_WIDTHS)
SERVED, NEXT = "served", "next"
"""States of a version: it serves a name, or the store names it to be the next."""
VERSIONS_PER_NAME = 2
RoutedVersions = Mapping[tuple[str, int], str]
"""State of each version that a router serves or is to serve, by (model, version)."""


def shard_cells(parts: int, names: int) -> int:
    """Returns the number of cells of a router with ``parts`` parts and ``names`` served names."""
    return parts * PART_CELLS + _slots(parts, names) * (1 + parts)


def _slots(parts: int, names: int) -> int:
    """Returns the number of versions whose replicas are counted; 0 in a server that is no
    router."""
    return VERSIONS_PER_NAME * names if parts else 0


@dataclass(slots=True)
class PartStats:
    """Counts of the lookups of one part since the start.

    The metrics name such a lookup a call of the part. It takes one call of a replica, or several
    if it is retried or hedged; these are its attempts.

    Attributes:
        calls: lookups that have ended, by outcome.
        seconds: those lookups by bucket of SECONDS_BUCKETS, not cumulated, by their latency from
            the call of ``look_up`` to its reply; the last bucket has no bound.
        total_s: sum of their latencies.
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


class PartSource(Protocol):
    """Source of the counts; fanout/shards.py has the implementation."""

    def part_counts(self) -> Iterable[tuple[int, PartStats]]:
        """Returns (number of the part, counts); versions with other numbers of parts have counts of
        their own."""

    def replicas(self, model: str, version: int) -> Sequence[int]:
        """Returns the number of joined replicas of each part of a version; empty if the version is
        not expected."""


def parts_max_of(plans: Iterable[Plan]) -> int:
    """Returns the largest number of parts among ``plans``."""
    return max((0 if plan.hosts is None else plan.hosts.parts for plan in plans), default=0)


class ShardMetrics:
    """Counters of each part and replicas of each version, of this process.

    Replicas are in slots, one for each version: a key, and for each part the number of replicas
    plus one, as 0 is a part that the version does not have. Workers may use different slots for
    the same version.

    Attributes:
        source: source of the counts; None in a server that is no router.
    """

    def __init__(self, counters: WorkerCounters, parts: int, names: int) -> None:
        """
        Args:
            parts: number of parts that are counted; 0 in a server that is no router.
            names: most names that are served.
        """
        self.source: PartSource | None = None
        self._parts = parts
        self._cells = counters.allocate(parts * PART_CELLS)
        self._before = self._own().copy()
        self._slots = _slots(parts, names)
        self._replicas = counters.allocate(self._slots * (1 + parts))

    def _own(self) -> Cells:
        return self._cells.own.reshape(self._parts, PART_CELLS)

    def flush(self, versions: Iterable[tuple[str, int]]) -> None:
        """Writes the counts to the shared cells.

        Args:
            versions: (model, version) of the versions whose replicas are counted.
        """
        source = self.source
        if source is None:
            return
        counted = np.zeros_like(self._before)
        for part, counts in source.part_counts():
            if part < self._parts:
                counted[part] += _cells_of(counts)
        self._own()[:] = self._before + counted
        self._flush_replicas(source, versions)

    def _flush_replicas(self, source: PartSource, versions: Iterable[tuple[str, int]]) -> None:
        own = self._replicas.own.reshape(self._slots, 1 + self._parts)
        slots = np.zeros_like(own)
        for slot, (model, version) in zip(slots, versions, strict=False):
            if replicas := source.replicas(model, version)[: self._parts]:
                slot[0] = _version_key(model, version)
                slot[1 : 1 + len(replicas)] = 1 + np.array(replicas)
        if not np.array_equal(own, slots):
            own[:, 0] = 0  # no version has the slots while they change
            own[:, 1:] = slots[:, 1:]
            own[:, 0] = slots[:, 0]

    def samples(self, versions: RoutedVersions) -> Iterator[Sample]:
        """Yields the samples of all workers. Outcomes without calls are left out, except "ok".

        Args:
            versions: versions whose replicas are exported.
        """
        totals = self._cells.total().reshape(self._parts, PART_CELLS)
        for part, total in enumerate(totals):
            labels = [str(part)]
            for outcome, count in zip(SHARD_OUTCOMES, total[_OUTCOMES].tolist(), strict=True):
                if count or outcome == SHARD_OUTCOMES[0]:
                    yield "embedserve_shard_calls", [*labels, outcome], count
            seconds = histogram_samples(SECONDS_BUCKETS, total[_SECONDS])
            yield "embedserve_shard_seconds", labels, seconds
            for (family, further), count in zip(COUNTS, total[_COUNTS].tolist(), strict=True):
                yield family, [*labels, *further], count
        yield from self._replica_samples(versions)

    def _replica_samples(self, versions: RoutedVersions) -> Iterator[Sample]:
        """Yields for each part of each version the smallest number of replicas over the ready
        workers that expect the version."""
        ready = self._replicas.ready_rows()
        slots = ready.reshape(len(ready) * self._slots, 1 + self._parts)
        for (model, version), state in versions.items():
            found = slots[slots[:, 0] == _version_key(model, version)][:, 1:]
            for part, counts in enumerate(found.T):
                if counts.any():
                    labels = [str(part), model, str(version), state]
                    fewest = float(counts[counts > 0].min()) - 1
                    yield "embedserve_shard_replicas", labels, fewest


def _version_key(model: str, version: int) -> float:
    return key_of(f"{model}@{version}")


def _cells_of(counts: PartStats) -> Cells:
    """Returns the cells of a part."""
    messages = (counts.bytes_sent, counts.bytes_received)
    extra = (counts.hedges, counts.retries, counts.hung, *messages)
    latencies = (*counts.seconds, counts.total_s)
    return np.array([*counts.calls.values(), *latencies, *extra], np.float64)
