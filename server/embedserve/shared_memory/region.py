"""A range of a file in /dev/shm that a caller registered: opened once, read and written by calls.

It is never mapped: its owner may cut the file short at any time, and a mapping would then end the
process (SIGBUS) where a call tells of it. What is read is a copy, so that nothing changes that was
checked.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock

from embedserve.errors import InvalidRequestError

FOLDER = "/dev/shm"
KEY_BYTES_MAX = 255
"""What the kernel has room for in the name of a file."""
KEY_CHARACTERS_SHOWN = 64
OPEN_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Neither through a link nor waiting, for a pipe's other end or whoever has a lease of the file."""


class Region:
    """Read and written by any thread; closed once, when nobody does so any more.

    Attributes:
        name: as its owner calls it.
        key: of the file, as its owner gave it.
        offset: of the range in the file.
        byte_size: of the range.
        file: (device, inode).
    """

    __slots__ = (
        "_descriptor",
        "_is_closed",
        "_lock",
        "_users",
        "byte_size",
        "file",
        "key",
        "name",
        "offset",
    )

    def __init__(self, name: str, key: str, offset: int, byte_size: int, descriptor: int) -> None:
        """Takes the ``descriptor``, of a file that has such a range."""
        self.name, self.key = name, key
        self.offset, self.byte_size = offset, byte_size
        status = os.fstat(descriptor)
        self.file = status.st_dev, status.st_ino
        self._descriptor = descriptor
        self._lock = Lock()
        self._users = 0
        self._is_closed = False

    def read(self, offset: int, nbytes: int) -> bytes:
        """A copy of what lies at ``offset`` of the range.

        Raises:
            InvalidRequestError: it is not registered any more, or its file was removed or cut.
        """
        with self.opened(offset + nbytes) as descriptor:
            data = os.pread(descriptor, nbytes, self.offset + offset)
        if len(data) < nbytes:
            raise self._wrong("its file is being cut short")
        return data

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fills ``buffers``, of bytes, one after the other, with what lies at ``offset``.

        Raises:
            InvalidRequestError: as read.
        """
        nbytes = sum(map(len, buffers))
        with self.opened(offset + nbytes) as descriptor:
            count = os.preadv(descriptor, buffers, self.offset + offset)
        if count < nbytes:
            raise self._wrong("its file is being cut short")

    def write(self, offset: int, values: memoryview) -> None:
        """Puts ``values`` (C-contiguous) at ``offset`` of the range.

        Raises:
            InvalidRequestError: as read; or there is no memory for what the file has not yet.
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
        """Whether its file has no name any more: nobody else can open it."""
        return not os.fstat(self._descriptor).st_nlink

    def close(self) -> None:
        """Has nobody use it any more; what is being read or written is to its end."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._is_closed and not self._users:
            os.close(self._descriptor)

    @contextmanager
    def opened(self, end: int) -> Iterator[int]:
        """The descriptor of the file, which has the range up to ``end``; open until the block ends,
        whoever closes it meanwhile. Raises InvalidRequestError, as read and write."""
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


Regions = Mapping[str, Region]
"""Of one caller, by name."""


def open_region(
    name: str, key: str, offset: int, byte_size: int, prefix: str = "/", folder: str = FOLDER
) -> Region:
    """The region of the file that ``key`` names; never waits.

    Args:
        prefix: what names begin with that may be opened, after a slash.

    Raises:
        InvalidRequestError: that is no name of one, there is no regular file of that name that this
            server may read and write, or it is too short.
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
    if status.st_nlink != 1:  # a link could be to a file of another name
        raise wrong_key(key, f"its file has {status.st_nlink} names, not 1")
    if status.st_size < end:
        raise InvalidRequestError(
            f"offset and byte_size end at {end}, but {key!r} has {status.st_size} bytes",
            "byte_size",
        )
