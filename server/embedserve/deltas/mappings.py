"""Maps memory at addresses of this process's choice, which Python's mmap cannot.

A reservation is address space that is unmapped when nothing refers to it any more. Other mappings
replace parts of it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from functools import cache

import numpy as np
from numpy.typing import NDArray

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_PROT_NONE = 0
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


def reserve(nbytes: int) -> NDArray[np.uint8]:
    """Returns address space, uint8 [nbytes], without memory. It is unmapped, with what has replaced
    its parts, when the last array over it is freed.

    Raises:
        OSError: the address space is too small.
    """
    size = max(nbytes, 1)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    address = _mmap(0, size, _PROT_NONE, flags, -1, 0)
    owner = (ctypes.c_uint8 * nbytes).from_address(address)
    end = weakref.finalize(owner, _unmap, address, size)
    end.atexit = False  # threads may still read it while the process ends
    return np.ctypeslib.as_array(owner)


def map_file(address: int, nbytes: int, protection: int, fd: int, offset: int) -> None:
    """Maps a part of a file in place of reserved pages; other processes share what is written.

    Raises:
        OSError: the file cannot be mapped.
    """
    flags = mmap.MAP_SHARED | _MAP_NORESERVE | _MAP_FIXED
    _mmap(address, nbytes, protection, flags, fd, offset)


def map_private(part: NDArray[np.uint8]) -> None:
    """Maps zeros in private memory in place of the pages of a mapping that hold ``part``, which is
    writable from now on. The kernel may back them by huge pages.

    Raises:
        OSError: there is not enough memory.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    address, nbytes = _pages(part)
    _mmap(address, nbytes, READ_WRITE, flags, -1, 0)
    libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), mmap.MADV_HUGEPAGE)


def protect(part: NDArray[np.uint8]) -> None:
    """Makes each later write to the pages that hold ``part`` end the process. Raises OSError."""
    address, nbytes = _pages(part)
    if libc().mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), mmap.PROT_READ):
        raise _last_error()


def whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _pages(part: NDArray[np.uint8]) -> tuple[int, int]:
    """Returns address and size of the pages that hold ``part``."""
    before = part.ctypes.data % mmap.PAGESIZE
    return part.ctypes.data - before, whole_pages(before + part.nbytes)


def _mmap(address: int, nbytes: int, protection: int, flags: int, fd: int, offset: int) -> int:
    function = libc().mmap
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


def _unmap(address: int, nbytes: int) -> None:
    libc().munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))


@cache
def libc() -> ctypes.CDLL:
    """Returns the C library of this process; a failed call sets ``ctypes.get_errno``."""
    return ctypes.CDLL(None, use_errno=True)


def _last_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
