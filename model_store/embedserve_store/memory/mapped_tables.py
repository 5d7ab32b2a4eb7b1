"""Populates the pages of mapped tables before requests need them, and releases them."""

from __future__ import annotations

import ctypes
import errno
import mmap
import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from embedserve_store.format.tables_file import TablesFile
from embedserve_store.model_version import ModelVersion

SHARE = 1 / 2
"""Fraction of the available memory up to which tables are populated. Pages of larger tables are
read when a lookup needs them."""
MADV_POPULATE_READ = 22  # of linux/mman.h, which mmap lacks
PIECE_BYTES = 32 << 20
"""Bytes of a chunk that a single madvise call populates or releases; 32 MiB. Other threads cannot
map memory during the call."""
RESTS = 3
"""Duration of the sleep after each chunk, as a multiple of the chunk's CPU time; 3 leaves three
quarters of a core to requests."""


def populate(version: ModelVersion, available: int) -> None:
    """Reads and maps every page of the tables of ``version``, so that no lookup waits for a page.

    Does nothing if the tables are resident, or larger than SHARE of ``available`` bytes.

    The kernel populates the pages, with large pages if it has them. For 10 GB on a virtual
    machine's disk this took 0.2 s of CPU time, while reading a byte of each page took 20 s. It took
    0.8 s for tables in memory in small pages. The thread keeps its priority: at a lower priority it
    would be preempted within such a call.

    Raises:
        StoreError: the file was changed in place.
    """
    if sum(stop - start for start, stop in version.tables.spans) > SHARE * available:
        return
    for piece in _pieces(version.tables):
        error = _madvise(piece, MADV_POPULATE_READ)
        if error:
            version.tables.check_unchanged()  # to read a truncated range would end the process
        if error == errno.EINVAL:  # Linux before 5.14
            piece[:: mmap.PAGESIZE].max()


def drop_version_pages(version: ModelVersion) -> None:
    """Releases all pages of the tables of ``version``, so that unmapping them later is fast.

    Unmapping 10 GB in small pages in one step blocks other threads that map memory for 0.3 s. The
    tables can still be read.
    """
    for piece in _pieces(version.tables):
        _madvise(piece, mmap.MADV_DONTNEED)


def drop_pages(rows: NDArray[np.uint8]) -> None:
    """Releases the pages that lie entirely in ``rows``, a range of a mapped file.

    The rows can still be read.
    """
    data = rows.reshape(-1)
    start = -data.ctypes.data % mmap.PAGESIZE
    end = data.nbytes - (data.ctypes.data + data.nbytes) % mmap.PAGESIZE
    if end > start:
        _madvise(data[start:end], mmap.MADV_DONTNEED)


def _pieces(tables: TablesFile) -> Iterator[NDArray[np.uint8]]:
    """Yields the mapped rows of ``tables`` in chunks that begin on a page, with rests in between.

    The first and the last page of a part's rows may also have rows of another part.
    """
    for first, stop in tables.spans if tables.is_mapped else ():
        aligned = first - (tables.data.ctypes.data + first) % mmap.PAGESIZE
        for start in range(max(0, aligned), stop, PIECE_BYTES):
            began = time.thread_time()
            yield tables.data[start : min(start + PIECE_BYTES, stop)]
            time.sleep(RESTS * (time.thread_time() - began))


def _madvise(piece: NDArray[np.uint8], advice: int) -> int:
    """Calls madvise(2) on ``piece``; returns 0, or the number of the error."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise  # mmap.madvise would hold the GIL
    address, size = ctypes.c_void_p(piece.ctypes.data), ctypes.c_size_t(piece.nbytes)
    return ctypes.get_errno() if madvise(address, size, advice) else 0
