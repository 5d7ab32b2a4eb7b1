"""Pool of shared-memory files in /dev/shm, for a server on the same host.

The client writes ids to these files, and the server writes vectors to them. `Regions` creates the
files, reuses them between requests, and removes them on close. `lookups` makes the requests.
"""

import errno
import fcntl
import mmap
import os
import re
import secrets
from collections import deque
from contextlib import suppress
from itertools import count
from threading import Lock
from typing import Any
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from embedserve_client.errors import InvalidRequest

FOLDER = "/dev/shm"
REGION_BYTES_MIN = 1 << 20
"""Bytes of the smallest file, so that requests of different sizes can share one."""
LENT_MAX = 16
"""Files whose vectors callers may hold at the same time, as views. The vectors of further results
are copied, which bounds the memory that results can pin in /dev/shm."""
FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
NO_ROOM = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EMFILE, errno.ENFILE})


class Region:
    """A mapped file in /dev/shm, used by one request at a time.

    Attributes:
        name: name under which the server registers the region.
        key: key of the file in shared memory, as sent to the server; begins with a slash.
        nbytes: size of the file in bytes.
        since: turn (logical time of `SharedMemory`) of the registration at the server; 0 before it.
    """

    __slots__ = ("_mapped", "key", "name", "nbytes", "path", "since")

    def __init__(self, key: str, nbytes: int) -> None:
        """Creates the file and reserves memory for all of it. Raises OSError if there is no room.

        Without the reservation, the first write to exhausted memory would kill the process. The
        file is locked for as long as it is mapped. The lock of a killed process disappears, so that
        others can recognize its files.
        """
        self.key, self.name, self.nbytes, self.since = key, key.removeprefix("/"), nbytes, 0
        self.path = f"{FOLDER}/{self.name}"
        descriptor = os.open(f"{self.path}.new", FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            os.rename(f"{self.path}.new", self.path)  # invisible without its lock
            os.posix_fallocate(descriptor, 0, nbytes)
            self._mapped = mmap.mmap(descriptor, nbytes)
        except BaseException:
            self.unlink()
            raise
        finally:
            os.close(descriptor)

    def write(self, offset: int, values: NDArray[Any]) -> int:
        """Writes contiguous ``values`` at ``offset`` and returns the offset of their end."""
        end = offset + values.nbytes
        self._mapped[offset:end] = values.view(np.uint8).data
        return end

    def array(self, offset: int, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns the values at ``offset`` as a read-only array [count], without a copy."""
        array: NDArray[Any] = np.frombuffer(self._mapped, dtype, count, offset)
        array.flags.writeable = False
        return array

    def unlink(self) -> None:
        """Deletes the name of the file, after which the server forgets the region. Mappings stay
        valid."""
        with suppress(OSError):
            os.unlink(self.path)


class Regions:
    """Pool of the regions of one client; safe to use from any thread."""

    def __init__(self, prefix: str) -> None:
        """Checks the prefix; raises ValueError unless it is a slash and the beginning of a name.

        Args:
            prefix: value of the server's --shared-memory.
        """
        if not isinstance(prefix, str) or not prefix.startswith("/") or "/" in prefix[1:]:
            raise ValueError(
                f"shared_memory: {prefix!r} is no slash and what names begin with, such as "
                "'/ranker-'"
            )
        self._prefix = prefix
        self._begin()

    def _begin_after_fork(self) -> None:
        """Resets the pool in a forked process, whose copy of the lock may be held for ever."""
        if os.getpid() != self._pid:
            self._begin()

    def _begin(self) -> None:
        """Resets the pool to an empty state for this process. After a fork the regions of the
        parent process are left alone."""
        self._pid = os.getpid()
        self._lock = Lock()
        self._is_closed = False
        self._is_swept = False
        self._numbers = count()
        self._every: dict[str, Region] = {}
        self._free: deque[Region] = deque()
        self._lent: set[str] = set()
        self._finalizer = finalize(self, _unlink_all, self._every, self._pid)

    def take(self, nbytes: int) -> Region | None:
        """Returns a region of at least ``nbytes`` for exclusive use, until `give_back`, `lend` or
        `drop`.

        Returns None if there is no room for a region, or if the pool is closed. Raises
        InvalidRequest if files cannot be created in the folder.
        """
        self._begin_after_fork()
        with self._lock:
            if self._is_closed:
                return None
            for _ in range(len(self._free)):
                region = self._free.pop()
                if region.nbytes >= nbytes:
                    return region
                self._free.appendleft(region)
            if self._free:  # a larger region replaces a small one
                self._remove(self._free.pop())
            return self._make(nbytes)

    def give_back(self, region: Region) -> None:
        """Returns a region to the pool for the next request. Nothing may write to it any more."""
        if region.key in self._every:
            self._free.append(region)

    def drop(self, region: Region) -> None:
        """Removes a region that the server may have forgotten, or may still write to."""
        with self._lock:
            self._remove(region)

    def lend(
        self, region: Region, offset: int, shape: tuple[int, int], dtype: np.dtype[Any]
    ) -> NDArray[Any]:
        """Returns the vectors in ``region`` at ``offset`` as a read-only array of ``shape``.

        No request uses the region while the array or a view of it exists. If LENT_MAX regions are
        lent, the array is a copy and the region returns to the pool immediately.
        """
        values = region.array(offset, shape[0] * shape[1], dtype)
        if len(self._lent) >= LENT_MAX:
            values = values.copy()
            values.flags.writeable = False
            self.give_back(region)
        else:
            # Views have this array as their base, and numpy keeps the base alive for them.
            self._lent.add(region.key)
            finalize(values, self._return, region).atexit = False
        return values.reshape(shape)

    def close(self) -> None:
        """Removes all regions. Vectors that callers hold stay valid."""
        self._begin_after_fork()
        with self._lock:
            self._is_closed = True
            self._free.clear()
            self._finalizer()

    def _make(self, nbytes: int) -> Region | None:
        """Creates a region whose size is the next power of two, at least REGION_BYTES_MIN. Returns
        None if there is no room."""
        if not self._is_swept:
            self._is_swept = True
            _sweep(self._prefix)
        size = max(REGION_BYTES_MIN, 1 << (nbytes - 1).bit_length())
        number = next(self._numbers)
        key = f"{self._prefix}{self._pid}-{secrets.token_hex(4)}-{number}"
        try:
            region = Region(key, size)
        except OSError as error:
            if error.errno in NO_ROOM:
                return None
            raise InvalidRequest(
                f"shared_memory is {self._prefix!r}: {FOLDER}{key} cannot be made: "
                f"{error.strerror}",
                field="shared_memory",
            ) from error
        self._every[key] = region
        return region

    def _remove(self, region: Region) -> None:
        if self._every.pop(region.key, None) is not None:
            region.unlink()

    def _return(self, region: Region) -> None:
        """Returns a lent region to the pool when the last view of its vectors is collected. Takes
        no lock, because the collection may happen inside any other call."""
        self._lent.discard(region.key)
        self.give_back(region)


def _sweep(prefix: str) -> None:
    """Removes files of clients that were killed. Their locks are gone, so that they can be locked
    here."""
    ours = re.compile(re.escape(prefix[1:]) + r"\d+-[0-9a-f]{8}-\d+")
    for name in filter(ours.fullmatch, os.listdir(FOLDER)):
        with suppress(OSError):
            descriptor = os.open(f"{FOLDER}/{name}", FLAGS)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(f"{FOLDER}/{name}")
            finally:
                os.close(descriptor)


def _unlink_all(every: dict[str, Region], pid: int) -> None:
    """Unlinks all regions, unless this process was forked from the process that created them."""
    if os.getpid() == pid:
        for region in every.values():
            region.unlink()
        every.clear()
