"""Tables mapped from their file, brought into memory before anybody asks for them."""

from __future__ import annotations

import ctypes
import mmap
import os
from threading import Thread, get_native_id

import numpy as np
from numpy.typing import NDArray

from embedserve_store.model_version import ModelVersion

SHARE = 1 / 2
"""Of the memory that is available: what is larger is read as it is asked for."""
NICE = 10
"""A tenth of a core that others want all of."""
MADV_POPULATE_READ = 22  # of linux/mman.h, which mmap lacks
PIECE_BYTES = 8 << 20
"""Read and mapped by one call, in which memory cannot be mapped or let go by others."""


def populate(version: ModelVersion, available: int) -> None:
    """Has every page of the tables of ``version`` read and mapped, so that no lookup waits for
    one; nothing where they would take too much of ``available`` bytes.

    The kernel does it, in large pages, and in a thread that gives way to others: to ask for a byte
    of each page took 20 s of a core for 10 GB that lay on a virtual machine's disk, this 0.2 s.
    """
    data = version.tables.data
    if 0 < data.nbytes <= SHARE * available:
        thread = Thread(target=_populate, args=(data,), name="populate", daemon=True)
        thread.start()
        thread.join()


def _populate(data: NDArray[np.uint8]) -> None:
    os.setpriority(os.PRIO_PROCESS, get_native_id(), NICE)  # on Linux of this thread alone
    madvise = ctypes.CDLL(None).madvise  # mmap's own would hold the interpreter's lock
    for start in range(0, data.nbytes, PIECE_BYTES):
        piece = data[start : start + PIECE_BYTES]
        address, size = ctypes.c_void_p(piece.ctypes.data), ctypes.c_size_t(piece.nbytes)
        if madvise(address, size, MADV_POPULATE_READ):  # before Linux 5.14, or the file was cut
            piece[:: mmap.PAGESIZE].max()
