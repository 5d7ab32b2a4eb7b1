"""Maps tables so that each is followed by memory that processes share.

FBGEMM's kernels read a row at its number times the row's bytes after the start of its table. Row
numbers past the last row thus reach whatever is mapped behind the table.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embedserve.deltas.mappings import map_file, reserve, whole_pages
from embedserve.deltas.version_memory import VersionMemory
from embedserve_store.errors import StoreError
from embedserve_store.memory.resident_tables import HUGE_PAGE_BYTES


@dataclass(frozen=True)
class FileRange:
    """Range of a file that holds a table.

    Attributes:
        start: offset of the first byte in the file.
        nbytes: size of the table.
        room: bytes of memory behind it.
    """

    start: int
    nbytes: int
    room: int = 0

    @property
    def before(self) -> int:
        """Returns the bytes of the first page that lie before the table."""
        return self.start % mmap.PAGESIZE

    @property
    def mapped(self) -> int:
        """Returns the bytes of the file's pages that hold the table."""
        return whole_pages(self.before + self.nbytes)

    @property
    def size(self) -> int:
        """Returns the bytes of address space, so that the next range begins at a huge page."""
        return -(-(self.mapped + self.room) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def map_with_room(
    memory: VersionMemory, path: Path, ranges: Mapping[str, FileRange]
) -> tuple[NDArray[np.uint8], dict[str, int]]:
    """Maps ``ranges`` of a file one after the other, with a part of ``memory`` behind each. Each
    begins in the first page of a huge page.

    Memory that is not written to takes no space.

    Returns:
        The mapping, uint8 and writable only behind the ranges, and the offset of each range in it.

    Raises:
        StoreError: the file cannot be read, or the address space is too small.
    """
    total = sum(one.size for one in ranges.values())
    try:
        reserved = reserve(total + HUGE_PAGE_BYTES)
        first = -reserved.ctypes.data % HUGE_PAGE_BYTES
        mapping = reserved[first : first + total]
        address = mapping.ctypes.data
        memory.map_at(address, total)
        offsets, position = {}, 0
        with path.open("rb") as file:
            for name, one in ranges.items():
                start = one.start - one.before
                map_file(address + position, one.mapped, mmap.PROT_READ, file.fileno(), start)
                offsets[name] = position + one.before
                position += one.size
    except OSError as error:
        raise StoreError(f"{path}: cannot be mapped with room for changed rows: {error}") from error
    return mapping, offsets
