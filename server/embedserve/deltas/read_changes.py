"""Reads the rows and ids of the deltas that a follower is about to apply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from embedserve.deltas.live_rows import Change
from embedserve_store.deltas.delta_line import DeltaLine, deltas_in_state
from embedserve_store.errors import StoreError
from embedserve_store.format.delta_file import ChangedRows
from embedserve_store.format.delta_manifest import DeltaManifest, LinePosition

CheckRows = Callable[[ChangedRows], None]


@dataclass(frozen=True)
class WaitingDelta:
    """A delta that is not applied yet.

    Attributes:
        end: position after it.
    """

    delta: DeltaManifest
    end: LinePosition

    @property
    def as_of(self) -> float:
        """Returns when training read the rows, in seconds since the Unix epoch."""
        return datetime.fromisoformat(self.delta.as_of).timestamp()


ReadDeltas = tuple[list[WaitingDelta], list[Change]]
"""A delta and its changes; or consecutive deltas that are undone, their undos among them, and no
changes."""


def read_changes(
    line: DeltaLine,
    waiting: Sequence[WaitingDelta],
    applied_seq: int,
    check_on_device: CheckRows | None,
) -> tuple[list[ReadDeltas], StoreError | None]:
    """Reads the rows and ids of those ``waiting`` that are not undone by another of them.

    Args:
        applied_seq: last delta before them.
        check_on_device: as in DeltaFollower.

    Returns:
        The deltas before the first whose rows cannot be read, and the error.
    """
    manifests = {one.delta.seq: one.delta for one in waiting}
    read: dict[int, list[Change]] = {}
    error, last = None, waiting[-1].delta.seq
    while True:
        wanted = [*deltas_in_state(last, applied_seq, manifests.__getitem__)][::-1]
        try:
            for delta in wanted:
                if delta.seq not in read:
                    read[delta.seq] = _checked(line, delta, check_on_device)
            break
        except StoreError as caught:
            error, last = caught, delta.seq - 1
    seqs = {delta.seq for delta in wanted}
    found: list[ReadDeltas] = []
    undone: list[WaitingDelta] = []
    for one in waiting:
        if one.delta.seq > last:
            break
        if one.delta.seq in seqs:
            found += [(undone, []), ([one], read[one.delta.seq])]
            undone = []
        else:
            undone.append(one)
    return [one for one in (*found, (undone, [])) if one[0]], error


def _checked(
    line: DeltaLine, delta: DeltaManifest, check_on_device: CheckRows | None
) -> list[Change]:
    """Returns the changes of a delta. Raises StoreError if they cannot be read or served."""
    rows = [one for file in line.rows(delta) for one in file]
    if check_on_device is not None:
        for one in rows:
            check_on_device(one)
    return [*rows, *line.ids(delta).values()]
