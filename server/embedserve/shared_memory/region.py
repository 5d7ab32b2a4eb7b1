"""Range of a file in /dev/shm that a caller registered.

The file is opened once, then read and written with system calls. It is never mapped: its owner may
truncate it at any time, and access to a mapping would then kill the process with SIGBUS, where a
system call reports an error. Reads copy the data, so that it cannot change after validation.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Lock

from embedserve.errors import InvalidRequestError

FOLDER = "/dev/shm"
KEY_BYTES_MAX = 255
"""Bytes of a file name in a key; the kernel's limit (NAME_MAX)."""
KEY_CHARACTERS_SHOWN = 64
"""Characters of a key shown in error messages."""
OPEN_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Flags for opening a region's file. They do not follow symbolic links, and do not wait for the
other end of a pipe or for the holder of a file lease."""
closer = ThreadPoolExecutor(1, thread_name_prefix="region")
"""Closes files off the event loop. The last descriptor of a removed file frees its memory, whatever
the size of the region: 0.1 s and more for each GiB."""


class Region:
    """Registered range of a file, which any thread may read and write. Its descriptor is closed
    once, after the last read or write has ended.

    Attributes:
        name: name of the region, chosen by its owner.
        key: key of the file, as its owner sent it.
        offset: offset of the range in the file, in bytes.
        byte_size: size of the range, in bytes.
        file: (device, inode) of the file.
    """

    def __init__(self, name: str, key: str, offset: int, byte_size: int, descriptor: int) -> None:
        """Takes ownership of ``descriptor``, whose file contains the range."""
        self.name, self.key = name, key
        self.offset, self.byte_size = offset, byte_size
        status = os.fstat(descriptor)
        self.file = status.st_dev, status.st_ino
        self._descriptor = descriptor
        self._lock = Lock()
        self._users = 0
        self._is_closed = False

    def read(self, offset: int, nbytes: int) -> bytes:
        """Returns a copy of the ``nbytes`` at ``offset`` in the range.

        Raises:
            InvalidRequestError: the region is no longer registered, its file was removed or
                truncated, or the system call failed.
        """
        with self.opened(offset + nbytes) as descriptor:
            data = os.pread(descriptor, nbytes, self.offset + offset)
        if len(data) < nbytes:
            raise self._wrong("its file is being cut short")
        return data

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fills the byte buffers one after the other with the data at ``offset`` in the range.

        Raises:
            InvalidRequestError: for the same reasons as in ``read``.
        """
        nbytes = sum(map(len, buffers))
        with self.opened(offset + nbytes) as descriptor:
            count = os.preadv(descriptor, buffers, self.offset + offset)
        if count < nbytes:
            raise self._wrong("its file is being cut short")

    def write(self, offset: int, values: memoryview) -> None:
        """Writes ``values`` (C-contiguous) at ``offset`` in the range.

        Raises:
            InvalidRequestError: for the same reasons as in ``read``, or no memory is left for pages
                that the file does not have yet.
        """
        if not values.nbytes:
            return
        left, position = values.cast("B"), self.offset + offset
        with self.opened(offset + left.nbytes) as descriptor:
            while left.nbytes:
                count = os.pwrite(descriptor, left, position)
                left, position = left[count:], position + count

    @property
    def is_unlinked(self) -> bool:
        """Whether the file was unlinked: it has no name, so no other process can open it."""
        return not os.fstat(self._descriptor).st_nlink

    def close(self) -> None:
        """Rejects further reads and writes. Reads and writes in progress finish first; then the
        descriptor is closed."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._is_closed and not self._users:
            with suppress(RuntimeError):  # no thread can be started: it closes with the next file
                closer.submit(os.close, self._descriptor)

    @contextmanager
    def opened(self, end: int) -> Iterator[int]:
        """Yields the descriptor of the file, after checking that the file contains the range up to
        ``end``. The descriptor stays open until the block ends, even if the region is closed in the
        meantime. Raises InvalidRequestError, like ``read`` and ``write``."""
        with self._lock:
            if self._is_closed:
                raise self._wrong("it is not registered any more")
            self._users += 1
        try:
            status = os.fstat(self._descriptor)
            if not status.st_nlink:
                raise self._wrong("its file was removed")
            if status.st_size < self.offset + end:
                raise self._wrong(
                    f"its file was cut to {status.st_size} bytes, and is asked for up to "
                    f"{self.offset + end}"
                )
            yield self._descriptor
        except OSError as error:
            raise self._wrong(str(error.strerror)) from error
        finally:
            with self._lock:
                self._users -= 1
                self._close_if_unused()

    def _wrong(self, problem: str) -> InvalidRequestError:
        return InvalidRequestError(f"shared memory region {self.name!r}: {problem}")


@dataclass(slots=True)
class MemorySlice:
    """Range of bytes in a region.

    Attributes:
        region: region that contains the range.
        offset: offset of the range in the region, in bytes.
        nbytes: exact size of an input, or maximum size of an output, in bytes.
    """

    region: Region
    offset: int
    nbytes: int

    def write(self, chunks: Iterable[memoryview]) -> None:
        """Writes ``chunks`` one after the other. Callers pass at most ``nbytes`` in total. Raises
        InvalidRequestError, like Region.write."""
        offset = self.offset
        for chunk in chunks:
            self.region.write(offset, chunk)
            offset += chunk.nbytes


Regions = Mapping[str, Region]
"""Regions of one caller, by name."""


def open_region(
    name: str, key: str, offset: int, byte_size: int, prefix: str = "/", folder: str = FOLDER
) -> Region:
    """Opens the region of the file that ``key`` names, without blocking.

    Args:
        prefix: a slash, followed by the prefix of the file names that may be opened.

    Raises:
        InvalidRequestError: the key is not a valid file name, the server cannot read and write a
            regular file of that name, the file has several names, or it is too short.
    """
    path = f"{folder}/{_file_name(key, prefix)}"
    try:
        descriptor = os.open(path, OPEN_FLAGS)
    except OSError as error:
        is_link = error.errno == errno.ELOOP
        raise wrong_key(key, "it is a link" if is_link else str(error.strerror)) from error
    try:
        _check_file(key, os.fstat(descriptor), offset + byte_size)
        return Region(name, key, offset, byte_size, descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def wrong_key(key: str, problem: str) -> InvalidRequestError:
    shown = key if len(key) <= KEY_CHARACTERS_SHOWN else key[:KEY_CHARACTERS_SHOWN] + "…"
    return InvalidRequestError(f"key is {shown!r}: {problem}", "key")


def _file_name(key: str, prefix: str) -> str:
    name = key.removeprefix("/")
    if not name or name in (".", "..") or "/" in name or "\0" in name or not name.isprintable():
        raise wrong_key(key, "it is no name of a file in /dev/shm, such as /ranker-0")
    if len(os.fsencode(name)) > KEY_BYTES_MAX:
        raise wrong_key(key, f"it has over {KEY_BYTES_MAX} bytes")
    if not name.startswith(prefix[1:]):
        raise wrong_key(key, f"it does not begin with {prefix!r} (--shared-memory)")
    return name


def _check_file(key: str, status: os.stat_result, end: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise wrong_key(key, "it is no regular file")
    if status.st_nlink != 1:  # a hard link could reach a file outside the prefix
        raise wrong_key(key, f"its file has {status.st_nlink} names, not 1")
    if status.st_size < end:
        raise InvalidRequestError(
            f"offset and byte_size end at {end}, but {key!r} has {status.st_size} bytes",
            "byte_size",
        )
