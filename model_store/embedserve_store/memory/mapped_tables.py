"""Tables mapped from their file, brought into memory before anybody asks for them, and let go."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from embedserve_store.format.tables_file import TablesFile
from embedserve_store.model_version import ModelVersion

SHARE = 1 / 2
"""Of the memory that is available: what is larger is read as it is asked for."""
MADV_POPULATE_READ = 22  # of linux/mman.h, which mmap lacks
PIECE_BYTES = 32 << 20
"""Mapped or let go by one call, in which others wait that map memory."""
RESTS = 3
"""As long as a piece took of a core, so many times over, the core is left to those who answer."""


def populate(version: ModelVersion, available: int) -> None:
    """Has every page of the tables of ``version`` read and mapped, so that no lookup waits for
    one; nothing where they are resident, or would take too much of ``available`` bytes.

    The kernel does it, in large pages where it has them: to ask for a byte of each page took 20 s
    of a core for 10 GB that lay on a virtual machine's disk, this 0.2 s, and 0.8 s where they lie
    in memory in small pages. A thread of a lower priority would give way within such a call.
    """
    if version.tables.data.nbytes > SHARE * available:
        return
    for piece in _pieces(version.tables):
        if _madvise(piece, MADV_POPULATE_READ):  # before Linux 5.14, or the file was cut
            piece[:: mmap.PAGESIZE].max()


def let_go(version: ModelVersion) -> None:
    """Has no page of the tables of ``version`` mapped any more, so that little is left to do for
    who unmaps them: all at once, 10 GB in small pages stop who maps memory for 0.3 s. They may
    still be read.
    """
    for piece in _pieces(version.tables):
        _madvise(piece, mmap.MADV_DONTNEED)


def drop_pages(rows: NDArray[np.uint8]) -> None:
    """Has no page that lies whole in ``rows``, a range of a mapped file, mapped any more; they may
    still be read."""
    data = rows.reshape(-1)
    start = -data.ctypes.data % mmap.PAGESIZE
    end = data.nbytes - (data.ctypes.data + data.nbytes) % mmap.PAGESIZE
    if end > start:
        _madvise(data[start:end], mmap.MADV_DONTNEED)


def _pieces(tables: TablesFile) -> Iterator[NDArray[np.uint8]]:
    for start in range(0, tables.data.nbytes if tables.is_mapped else 0, PIECE_BYTES):
        began = time.thread_time()
        yield tables.data[start : start + PIECE_BYTES]
        time.sleep(RESTS * (time.thread_time() - began))


def _madvise(piece: NDArray[np.uint8], advice: int) -> int:
    """0 where the kernel did it."""
    madvise = ctypes.CDLL(None).madvise  # mmap's own would hold the interpreter's lock
    address, size = ctypes.c_void_p(piece.ctypes.data), ctypes.c_size_t(piece.nbytes)
    done: int = madvise(address, size, advice)
    return done
