"""Status of a followed line, in memory that the applier writes and the workers read.

A status is written alternately into two records. A reader takes the last whole one, so that there
is one even after a writer was killed while it wrote.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any

import msgspec

from embedserve.deltas.live_rows import LiveRows
from embedserve.deltas.shared_goldens import SharedGoldens
from embedserve.deltas.version_memory import SharedFlag, SharedRecord, VersionMemory
from embedserve_store.format.delta_manifest import LinePosition

CATCHING_UP, FOLLOWING, STALLED = "catching up", "following", "stalled"
FULL, HELD = "full", "held"
REASON_BYTES_MAX = 500
BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Bucket bounds of the durations, in seconds."""

_NUMBER_BYTES = 8
"""Bytes of the number of a record, big-endian, so that the last record is the largest. The state
follows in MessagePack."""
_RECORD_BYTES = 2048


@dataclass(frozen=True)
class Applied:
    """Deltas up to a position, and how old their rows are."""

    seq: int
    as_of: float
    """Time at which training read the rows of the last delta, in seconds since the Unix epoch. 0 if
    no delta is applied."""
    checksum: str
    """sha256 of the last delta's manifest, as in LinePosition."""

    def position(self, line: int) -> LinePosition:
        return LinePosition(line, self.seq, self.checksum)


@dataclass(frozen=True)
class Durations:
    """Histogram of durations."""

    counts: tuple[int, ...] = (0,) * (len(BUCKETS_S) + 1)
    """Number of durations in each bucket of BUCKETS_S, and above all."""
    sum_s: float = 0.0

    def plus(self, seconds: float) -> Durations:
        counts = list(self.counts)
        counts[bisect_left(BUCKETS_S, seconds)] += 1
        return Durations(tuple(counts), self.sum_s + seconds)

    def samples(self) -> tuple[list[tuple[str, float]], float]:
        """Returns cumulative counts by bound and the sum, as HistogramSamples has them."""
        bounds = [*map(str, BUCKETS_S), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self.counts)), strict=True)), self.sum_s


@dataclass(frozen=True)
class DeltaState:
    """State of a followed line at one time."""

    applied: Applied
    """Position of the rows that are served."""
    applying: Applied
    """Position after the deltas that are being applied, or that were last, even if they failed."""
    state: str = CATCHING_UP
    reason: str = ""
    """Error that stops further deltas, for the states stalled and full. For the state held it would
    stop them without the hold."""
    is_ready: bool = False
    """Whether the deltas that were there at the start have been applied, as far as they can be."""
    wanted_seq: int = 0
    """Last delta that is known to exist."""
    waiting_since: float = 0.0
    """Time of the oldest delta that is not applied, in seconds since the Unix epoch; 0: none."""
    looked_at: float = 0.0
    """Time of the last poll of the store, in seconds since the Unix epoch."""
    rows: int = 0
    """Rows of applied deltas."""
    nbytes: int = 0
    """Bytes of the files of applied deltas."""
    refused: int = 0
    """Number of times that no further delta was applied, each reason counted once."""
    rows_changed: int = 0
    ids_changed: int = 0
    memory_bytes: int = 0
    undos: int = 0
    """Number of undos that were applied."""
    undo_from: int = 0
    """First seq whose rows are kept in memory for an undo."""
    at_seq: int | None = None
    """Last delta that may be applied, such as that of an alias; None: any."""
    apply_seconds: Durations = field(default_factory=Durations)
    """Seconds from the first byte of a step's rows to their being served."""
    freshness_seconds: Durations = field(default_factory=Durations)
    """Seconds from training's reading of a delta's rows to their being served."""

    @property
    def is_stopped(self) -> bool:
        """Whether a delta cannot be applied."""
        return self.state in (STALLED, FULL)

    def lag_s(self) -> float:
        """Returns the age in seconds of the oldest delta that is not applied; 0 if there is
        none."""
        return _age_s(self.waiting_since)

    def look_age_s(self) -> float:
        """Returns the seconds since the last poll of the store; 0 before the first."""
        return _age_s(self.looked_at)


class DeltaStatus:
    """Status of the line that one served model follows.

    Attributes:
        line: version at which the line begins.
    """

    def __init__(self, start: LinePosition, memory: VersionMemory | None = None) -> None:
        """
        Args:
            start: position of the version's rows.
            memory: as in LiveRows.
        """
        memory = memory or VersionMemory.create()
        self.line = start.line
        parts = memory.take(2 * _RECORD_BYTES).reshape(2, -1)
        self._records = [SharedRecord(part) for part in parts]
        if memory.is_new:
            applied = Applied(start.seq, 0.0, start.checksum)
            self.write(DeltaState(applied, applied, wanted_seq=start.seq, undo_from=start.seq))

    def write(self, state: DeltaState) -> None:
        """Replaces the status; only one process at a time writes."""
        number = int.from_bytes(self._last_record()[:_NUMBER_BYTES], "big") + 1
        if (reason := _cut(state.reason)) != state.reason:
            state = replace(state, reason=reason)
        record = number.to_bytes(_NUMBER_BYTES, "big") + msgspec.msgpack.encode(state)
        self._records[number % 2].write(record)

    def read(self) -> DeltaState:
        """Returns the status that was written last."""
        while not (record := self._last_record()):
            pass  # both records were written while they were read
        return msgspec.msgpack.decode(record[_NUMBER_BYTES:], type=DeltaState)

    def stall(self, reason: str) -> None:
        """Writes that no delta is applied, and why. Called by the applier after an unexpected
        error, and by the supervisor while no applier runs."""
        now = self.read()
        since = now.waiting_since or time.time()
        self.write(replace(now, state=STALLED, reason=reason, waiting_since=since))

    def describe(self, now: DeltaState | None = None) -> dict[str, Any]:
        """Returns the status, or the state ``now`` of its line, as JSON values of /models."""
        now = now or self.read()
        return {
            "line": self.line,
            "seq": now.applied.seq,
            "wanted_seq": max(now.wanted_seq, now.applied.seq),
            "as_of": _iso(now.applied.as_of) if now.applied.as_of else None,
            "looked_at": _iso(now.looked_at) if now.looked_at else None,
            "lag_s": round(now.lag_s(), 3),
            "state": now.state,
            "reason": now.reason,
            "rows_changed": now.rows_changed,
            "ids_changed": now.ids_changed,
            "memory_bytes": now.memory_bytes,
            "undo_from": now.undo_from,
        } | ({} if now.at_seq is None else {"at_seq": now.at_seq})

    def _last_record(self) -> bytes:
        """Returns the last whole record; b"" if neither is whole."""
        return max(record.read() for record in self._records)


class SharedDeltaState:
    """Changed rows, status and goldens of a version, in memory that its processes share.

    Attributes:
        live: the changed rows. The other parts follow them in their memory.
        hold: request of an administrator that no further delta is applied. Any worker sets it, and
            the applier reads it at each poll.
        caught_up: whether a version that is prepared beside the served one may serve. Set by the
            applier.
        broker_connected: whether the broker that notifies the applier is connected. Set by the
            applier; None without a broker.
    """

    def __init__(
        self, live: LiveRows, *, has_broker: bool = False, are_signed: bool = False
    ) -> None:
        """
        Args:
            are_signed: whether deltas need a signature.
        """
        memory = live.memory
        self.live = live
        self.status = DeltaStatus(live.start, memory)
        self.hold, self.caught_up = SharedFlag(memory), SharedFlag(memory)
        self.goldens = SharedGoldens(memory)
        self.broker_connected = SharedFlag(memory) if has_broker else None
        self._are_signed = are_signed

    def read(self) -> DeltaState:
        """Returns the status, with the last delta that lookups of this process read. On a GPU that
        is an earlier one until the rows of the applied deltas are uploaded."""
        now, live = self.status.read(), self.live
        if live.uploaded is None or live.uploaded.seq == live.committed.seq:
            return now
        state, reason = CATCHING_UP if now.state == FOLLOWING else now.state, now.reason
        if live.upload_error:
            state = HELD if state == HELD else STALLED
            reason = f"changed rows do not reach the GPU: {live.upload_error}"
        since = [one for one in (now.waiting_since, live.upload_since) if one]
        return replace(
            now,
            applied=Applied(live.uploaded.seq, 0.0, ""),
            wanted_seq=max(now.wanted_seq, now.applied.seq),
            state=state,
            reason=reason,
            waiting_since=min(since, default=0.0),
        )

    def describe(self) -> dict[str, Any]:
        """Returns status, connection and need of signatures as JSON values, as /models has them."""
        described = self.status.describe(self.read())
        if self._are_signed:
            described["signatures"] = "required"
        if self.broker_connected is not None:
            described["notify"] = "connected" if self.broker_connected.is_set else "disconnected"
        return described


def _age_s(since: float) -> float:
    """Returns the seconds since a time; 0 for the time 0, which stands for none."""
    return max(0.0, time.time() - since) if since else 0.0


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _cut(reason: str) -> str:
    """Returns the first REASON_BYTES_MAX bytes of ``reason``, without half of a character."""
    return reason.encode("utf-8", "replace")[:REASON_BYTES_MAX].decode("utf-8", "ignore")
