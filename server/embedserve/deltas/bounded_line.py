"""Line of deltas that shows none after the last one that a version may have now."""

from __future__ import annotations

from embedserve_store.deltas.delta_line import DeltaLine
from embedserve_store.format.delta_manifest import DeltaManifest, LinePosition


class BoundedLine(DeltaLine):
    """Line that shows no delta after the last one that a version may have.

    Attributes:
        last_seq: its seq, which may be lower than that of the version's own rows; None: no bound.
    """

    last_seq: int | None = None

    def seqs(self) -> list[int]:
        last = self.last_seq
        return [seq for seq in super().seqs() if last is None or seq <= last]

    def after(self, position: LinePosition) -> tuple[DeltaManifest, LinePosition] | None:
        if self.last_seq is not None and position.seq >= self.last_seq:
            return None
        return super().after(position)
