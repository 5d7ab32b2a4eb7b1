"""Tables mapped from their file, brought into memory before anybody asks for them."""

from __future__ import annotations

import ctypes
import mmap

from embedserve_store.model_version import ModelVersion

SHARE = 1 / 2
"""Of the memory that is available: what is larger is read as it is asked for."""
MADV_POPULATE_READ = 22  # of linux/mman.h, which mmap lacks
PIECE_BYTES = 8 << 20
"""Read and mapped by one call, in which memory cannot be mapped or let go by others."""


def populate(version: ModelVersion, available: int) -> None:
    """Has every page of the tables of ``version`` read and mapped, so that no lookup waits for
    one; nothing where they would take too much of ``available`` bytes.

    The kernel does it, in large pages: to ask for a byte of each page took 20 s of a core for 10 GB
    that lay on a virtual machine's disk, this 0.2 s. A thread of a lower priority would give way
    within such a call, in which others wait for it that map memory.
    """
    data = version.tables.data
    if not 0 < data.nbytes <= SHARE * available:
        return
    madvise = ctypes.CDLL(None).madvise  # mmap's own would hold the interpreter's lock
    for start in range(0, data.nbytes, PIECE_BYTES):
        piece = data[start : start + PIECE_BYTES]
        address, size = ctypes.c_void_p(piece.ctypes.data), ctypes.c_size_t(piece.nbytes)
        if madvise(address, size, MADV_POPULATE_READ):  # before Linux 5.14, or the file was cut
            piece[:: mmap.PAGESIZE].max()
