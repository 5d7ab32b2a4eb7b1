"""Files in /dev/shm where ids are put and vectors found, for a server on the same host.

`Regions` makes them, keeps those that nobody uses for the next request, and removes all of them in
the end. Requests and answers are `shared_memory`'s.
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
LENT_MAX = 16
"""Files that hold vectors of results; those of further results are copied."""
FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
NO_ROOM = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EMFILE, errno.ENFILE})


class Region:
    """A file, mapped, that one request uses at a time.

    Attributes:
        name: as the server is to call it.
        key: of the file, as the server is told it.
        nbytes: that it has.
        since: the turn in which the server was told of it; 0: it was not yet.
    """

    __slots__ = ("_mapped", "key", "name", "nbytes", "path", "since")

    def __init__(self, key: str, nbytes: int) -> None:
        """Makes the file, and has the system keep memory for all of it: where there was none left,
        the first write would end the process. It is locked as long as it is mapped, be it by a
        process that is killed. OSError where there is no room for it."""
        self.key, self.name, self.nbytes, self.since = key, key.removeprefix("/"), nbytes, 0
        self.path = f"{FOLDER}/{self.name}"
        descriptor = os.open(f"{self.path}.new", FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            os.rename(f"{self.path}.new", self.path)  # nobody sees it without its lock
            os.posix_fallocate(descriptor, 0, nbytes)
            self._mapped = mmap.mmap(descriptor, nbytes)
        except BaseException:
            self.unlink()
            raise
        finally:
            os.close(descriptor)

    def write(self, offset: int, values: NDArray[Any]) -> int:
        """Puts contiguous ``values`` there; gives where they end."""
        end = offset + values.nbytes
        self._mapped[offset:end] = values.view(np.uint8).data
        return end

    def array(self, offset: int, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """[count], of what lies there: not a copy, and not to be written."""
        array: NDArray[Any] = np.frombuffer(self._mapped, dtype, count, offset)
        array.flags.writeable = False
        return array

    def unlink(self) -> None:
        """Takes its name away, after which the server forgets it; what is mapped stays."""
        with suppress(OSError):
            os.unlink(self.path)


class Regions:
    """Those of a client; used by any thread."""

    def __init__(self, prefix: str) -> None:
        """prefix: what the server's --shared-memory says. ValueError where it can be none."""
        if not isinstance(prefix, str) or not prefix.startswith("/") or "/" in prefix[1:]:
            raise ValueError(
                f"shared_memory: {prefix!r} is no slash and what names begin with, such as "
                "'/ranker-'"
            )
        self._prefix = prefix
        self._begin()

    def _begin(self) -> None:
        """Without any, in the process that this is: its parent's are left alone."""
        self._pid = os.getpid()
        self._lock = Lock()
        self._is_closed = False
        self._is_swept = False
        self._numbers = count()
        self._every: dict[str, Region] = {}
        self._free: deque[Region] = deque()
        self._lent: set[str] = set()
        self._in_the_end = finalize(self, _unlink_all, self._every, self._pid)

    def take(self, nbytes: int) -> Region | None:
        """One of at least so many bytes, nobody else's until it is given back, lent or dropped;
        None where there is no room for one. InvalidRequest where files cannot be made there."""
        if os.getpid() != self._pid:
            self._begin()
        with self._lock:
            if self._is_closed:
                return None
            for _ in range(len(self._free)):
                region = self._free.pop()
                if region.nbytes >= nbytes:
                    return region
                self._free.appendleft(region)
            if self._free:  # one that has grown takes the place of a small one
                self._remove(self._free.pop())
            return self._make(nbytes)

    def give(self, region: Region) -> None:
        """Has the next request use it: nothing writes to it any more."""
        if region.key in self._every:
            self._free.append(region)

    def drop(self, region: Region) -> None:
        """Removes it: the server may not know it any more, or may yet write to it."""
        with self._lock:
            self._remove(region)

    def lend(
        self, region: Region, offset: int, shape: tuple[int, int], dtype: np.dtype[Any]
    ) -> NDArray[Any]:
        """What lies there, read-only, as long as anybody holds it or a view of it; no request uses
        the region until then. A copy where as many are lent as may be."""
        values = region.array(offset, shape[0] * shape[1], dtype)
        if len(self._lent) >= LENT_MAX:
            values = values.copy()
            values.flags.writeable = False
            self.give(region)
        else:
            # Views have this array as their base, which numpy keeps for them.
            self._lent.add(region.key)
            finalize(values, self._return, region).atexit = False
        return values.reshape(shape)

    def close(self) -> None:
        """Removes all; vectors that somebody holds stay."""
        with self._lock:
            self._is_closed = True
            self._free.clear()
            self._in_the_end()

    def _make(self, nbytes: int) -> Region | None:
        """Of the next power of two."""
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
        """Called wherever the last view of its vectors goes, be it inside of any other call: it
        takes no lock."""
        self._lent.discard(region.key)
        self.give(region)


def _sweep(prefix: str) -> None:
    """Removes the files that clients left which were killed: nobody has locked them."""
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
    """But not in a process that was forked from the one that made them."""
    if os.getpid() == pid:
        for region in every.values():
            region.unlink()
        every.clear()
