"""Location of a tensor in a region of shared memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from embedserve.shared_memory.region import Region


@dataclass(slots=True)
class MemorySlice:
    """Range of bytes in a region.

    Attributes:
        region: region that contains the range.
        offset: offset of the range in the region, in bytes.
        nbytes: exact size of an input, or maximum size of an output, in bytes.
    """

    region: Region
    offset: int
    nbytes: int

    def write(self, chunks: Iterable[memoryview]) -> None:
        """Writes ``chunks`` one after the other. Callers pass at most ``nbytes`` in total. Raises
        InvalidRequestError, like Region.write."""
        offset = self.offset
        for chunk in chunks:
            self.region.write(offset, chunk)
            offset += chunk.nbytes
