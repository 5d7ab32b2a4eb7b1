"""Where a tensor lies in a region of shared memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from embedserve.shared_memory.region import Region


@dataclass(slots=True)
class MemorySlice:
    """
    Attributes:
        offset: in the region.
        nbytes: that an input has there, and an output at most.
    """

    region: Region
    offset: int
    nbytes: int

    def write(self, pieces: Iterable[memoryview]) -> None:
        """One after the other, not more than ``nbytes``. Raises InvalidRequestError, as
        Region.write."""
        offset = self.offset
        for piece in pieces:
            self.region.write(offset, piece)
            offset += piece.nbytes
