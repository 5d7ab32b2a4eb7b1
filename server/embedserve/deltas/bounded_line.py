"""Line of deltas that shows none after the last one that a version may have now."""

from __future__ import annotations

from collections.abc import Callable

from embedserve_store.deltas.delta_line import DeltaLine
from embedserve_store.deltas.signing import TrustedKeys
from embedserve_store.format.delta_manifest import DeltaManifest, LinePosition
from embedserve_store.format.manifest import Manifest
from embedserve_store.model_store import ModelStore

LastSeq = Callable[[], int | None]
"""Returns the last seq that a version may have now; None: any."""


class BoundedLine(DeltaLine):
    """Line that shows no delta after the last one that a version may have.

    Attributes:
        last_seq: returns its seq, which may be lower than that of the version's own rows; None: no
            bound.
    """

    def __init__(
        self,
        models: ModelStore,
        base: Manifest,
        keys: TrustedKeys | None = None,
        last_seq: LastSeq = lambda: None,
    ) -> None:
        super().__init__(models, base, keys)
        self.last_seq = last_seq

    def seqs(self) -> list[int]:
        last = self.last_seq()
        return [seq for seq in super().seqs() if last is None or seq <= last]

    def after(self, position: LinePosition) -> tuple[DeltaManifest, LinePosition] | None:
        last = self.last_seq()
        if last is not None and position.seq >= last:
            return None
        return super().after(position)
