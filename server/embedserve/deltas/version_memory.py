"""Memory that processes share for one version whose deltas are served.

It is a file without a name (memfd_create). The kernel frees it when no process has it open or
mapped. A version never gets the memory of another, so that a process which still serves the former
version cannot read rows of the next one. A forked process inherits what is mapped. One that runs
already opens the file through /proc and maps the same parts, at other addresses.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import weakref
import zlib

import numpy as np
from numpy.typing import NDArray

from embedserve.deltas.mappings import READ_WRITE, map_file, reserve, whole_pages
from embedserve_store.errors import StoreError
from embedserve_store.memory.resident_tables import HUGE_PAGE_BYTES

NAME = "embedserve-deltas"
"""Name of the file in /proc/PID/maps."""
_MFD_NOEXEC_SEAL = 0x8  # of linux/memfd.h, which os lacks
_RECORD_HEAD = struct.Struct("<II")
"""Checksum and size of the record that follows."""


class VersionMemory:
    """Parts of a file in memory. Each process takes the same parts in the same order.

    Attributes:
        is_new: whether this process has made the file, whose parts are zeros; else they have what
            others have written.
        generation: number of the rollout of the version; 0 if the server has started with it.
    """

    def __init__(self, fd: int, generation: int, *, is_new: bool) -> None:
        self.is_new = is_new
        self.generation = generation
        self._fd = fd
        self._end = 0
        weakref.finalize(self, os.close, fd).atexit = False

    @classmethod
    def create(cls, generation: int = 0) -> VersionMemory:
        """Makes an empty file.

        Args:
            generation: number that ``open`` has to name.

        Raises:
            OSError: this host does not support it, or the process has too many open files.
        """
        made = cls(_file_in_memory(), generation, is_new=True)
        made.take(8).view(np.uint64)[0] = generation
        return made

    @classmethod
    def open(cls, path: str, generation: int) -> VersionMemory:
        """Opens the file that another process has made, by the ``path`` that it gave.

        Raises:
            StoreError: it cannot be opened, or is that of another version by now.
        """
        try:
            opened = cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), generation, is_new=False)
            found = os.pread(opened._fd, 8, 0)
        except OSError as error:
            raise StoreError(f"memory for changed rows cannot be opened: {error}") from error
        if int.from_bytes(found, "little") != generation:
            raise StoreError(f"{path}: is not the memory of rollout {generation} any more")
        opened.take(8)
        return opened

    @property
    def path(self) -> str:
        """Returns the path by which other processes open the file while this process has it."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """Maps the next part, uint8 [nbytes], until the last array over it is freed.

        Pages are allocated when they are first accessed.

        Raises:
            OSError: the address space is too small, or the file may not become as large.
            StoreError: the file ends before.
        """
        part = reserve(nbytes)
        self.map_at(part.ctypes.data, nbytes, mmap.PAGESIZE)
        return part

    def map_at(self, address: int, nbytes: int, alignment: int = HUGE_PAGE_BYTES) -> None:
        """Maps the next part at a reserved address.

        Args:
            alignment: the part begins at a multiple of these bytes in the file.

        Raises:
            OSError, StoreError: as ``take``.
        """
        start = -(-self._end // alignment) * alignment
        size = whole_pages(max(nbytes, 1))
        self._end = start + size
        if self.is_new:
            os.ftruncate(self._fd, self._end)
        elif (found := os.fstat(self._fd).st_size) < self._end:
            raise StoreError(f"memory for changed rows has {found} bytes, {self._end} are expected")
        map_file(address, size, READ_WRITE, self._fd, start)


class SharedRecord:
    """Bytes with a checksum in a part of the memory, without a lock: no reader takes half of them,
    not even after a writer was killed while it wrote."""

    def __init__(self, part: NDArray[np.uint8]) -> None:
        self._part = part.data

    def write(self, record: bytes) -> None:
        """Replaces the record; only one process at a time writes. Raises ValueError if it is larger
        than the part."""
        content = _RECORD_HEAD.pack(zlib.crc32(record), len(record)) + record
        self._part[: len(content)] = content

    def read(self) -> bytes:
        """Returns the record; b"" if there is none, or it is being replaced."""
        checksum, nbytes = _RECORD_HEAD.unpack_from(self._part)
        record = bytes(self._part[_RECORD_HEAD.size : _RECORD_HEAD.size + nbytes])
        return record if zlib.crc32(record) == checksum else b""


class SharedFlag:
    """Byte in a part of the memory, so that no lock is needed. It outlives each process but the
    supervisor."""

    def __init__(self, memory: VersionMemory) -> None:
        self._part = memory.take(1)

    @property
    def is_set(self) -> bool:
        return bool(self._part[0])

    def set(self, is_set: bool) -> None:
        self._part[0] = is_set


def _file_in_memory() -> int:
    """Returns the descriptor of an empty file, which nobody may execute where the kernel knows how
    to forbid it: some hosts allow no others."""
    try:
        return os.memfd_create(NAME, os.MFD_CLOEXEC | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # Linux before 6.3
            raise
        return os.memfd_create(NAME, os.MFD_CLOEXEC)
