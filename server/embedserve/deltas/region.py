"""Maps tables so that each is followed by memory that processes share.

FBGEMM's kernels read a row at its number times the row's bytes after the start of its table. Row
numbers past the last row thus reach whatever is mapped behind the table.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import StoreError
from embedserve_store.memory.resident_tables import HUGE_PAGE_BYTES

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000


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
        return _whole_pages(self.before + self.nbytes)

    @property
    def size(self) -> int:
        """Returns the bytes of address space, so that the next range begins at a huge page."""
        return -(-(self.mapped + self.room) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def map_with_room(
    path: Path, ranges: Mapping[str, FileRange]
) -> tuple[NDArray[np.uint8], dict[str, int]]:
    """Maps ``ranges`` of a file one after the other, with shared memory behind each. Each begins in
    the first page of a huge page.

    Memory that is not written to takes no space. Processes that are forked later share it.

    Returns:
        The mapping, uint8 and writable only behind the ranges, and the offset of each range in it.

    Raises:
        StoreError: the file cannot be read, or the address space is too small.
    """
    total = sum(one.size for one in ranges.values())
    try:
        memory = shared_memory(total + HUGE_PAGE_BYTES)
        address = memory.ctypes.data
        offsets, position = {}, -address % HUGE_PAGE_BYTES
        with path.open("rb") as file:
            for name, one in ranges.items():
                start = one.start - one.before
                _map_file(address + position, one.mapped, file.fileno(), start)
                offsets[name] = position + one.before
                position += one.size
    except OSError as error:
        raise StoreError(f"{path}: cannot be mapped with room for changed rows: {error}") from error
    return memory, offsets


def replace_by_memory(rows: NDArray[np.uint8]) -> None:
    """Replaces a mapped range of a file by zeros in private memory at the same address, which the
    kernel may back by huge pages.

    Args:
        rows: range of a mapping of ``map_with_room``. It is writable from now on.

    Raises:
        OSError: there is not enough memory.
    """
    address, nbytes = _pages(rows)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    _mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), mmap.MADV_HUGEPAGE)


def make_read_only(rows: NDArray[np.uint8]) -> None:
    """Makes each later write to ``rows``, a range of ``replace_by_memory``, end the process."""
    address, nbytes = _pages(rows)
    if _libc().mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), mmap.PROT_READ):
        raise _last_error()


def _pages(rows: NDArray[np.uint8]) -> tuple[int, int]:
    """Returns address and size of the pages that hold ``rows``."""
    before = rows.ctypes.data % mmap.PAGESIZE
    return rows.ctypes.data - before, _whole_pages(before + rows.nbytes)


def shared_memory(nbytes: int) -> NDArray[np.uint8]:
    """Returns memory, uint8 [nbytes] of zeros, which processes that are forked later share.

    Pages are allocated when they are first accessed. The memory stays mapped until the process
    ends.

    Raises:
        OSError: the address space is too small.
    """
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    address = _mmap(0, max(nbytes, 1), mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _map_file(address: int, nbytes: int, fd: int, start: int) -> None:
    _mmap(address, nbytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd, start)


def _mmap(address: int, nbytes: int, protection: int, flags: int, fd: int, offset: int) -> int:
    function = _libc().mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    ]
    found: int | None = function(address, nbytes, protection, flags, fd, offset)
    if found is None or found == ctypes.c_void_p(-1).value:
        raise _last_error()
    return found


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _last_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
