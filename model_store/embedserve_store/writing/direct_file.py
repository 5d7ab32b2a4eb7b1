"""New files that are written once from front to back, large ones past the page cache.

A file of tens of gigabytes would push out of memory what is in use, such as the tables that this
host serves, and copying it through the page cache takes the processor longer than the disk. The
file is then on disk, not in memory, until someone reads it. Where the file system knows no direct
writes, and for small files, writing is as usual.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

DIRECT_BYTES_MIN = 1 << 30
"""A smaller file is likely wanted again soon, and leaves room for others in memory."""
BUFFER_BYTES = 8 << 20
"""A multiple of every disk's block, as direct writes need it."""


class Writer(Protocol):
    def write(self, data: bytes | memoryview, /) -> object: ...


@contextmanager
def new_file(path: Path, nbytes: int) -> Iterator[Writer]:
    """The new file ``path``, which will have ``nbytes``; on disk when the block ends.

    Raises:
        OSError: as the file system says, for instance when the disk is full.
    """
    direct = _open_direct(path) if nbytes >= DIRECT_BYTES_MIN else None
    if direct is None:
        with open(path, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        return
    try:
        writer = _DirectWriter(direct)
        yield writer
        writer.finish()
    finally:
        os.close(direct)


def _open_direct(path: Path) -> int | None:
    """None where the file system refuses direct writes; there is no file then."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT
    try:
        return os.open(path, flags, 0o666)
    except FileExistsError:
        raise
    except OSError:
        path.unlink(missing_ok=True)
        return None


class _DirectWriter:
    """Gathers what is written in an aligned buffer, and writes that whenever it is full."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffer = memoryview(mmap.mmap(-1, BUFFER_BYTES))  # begins on a page
        self._filled = 0

    def write(self, data: bytes | memoryview, /) -> None:
        rest = memoryview(data).cast("B")
        while rest:
            count = min(len(rest), BUFFER_BYTES - self._filled)
            self._buffer[self._filled : self._filled + count] = rest[:count]
            self._filled += count
            rest = rest[count:]
            if self._filled == BUFFER_BYTES:
                self._flush()

    def finish(self) -> None:
        """Writes what is left, which need not be whole blocks, and syncs."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._flush()
        os.fsync(self._descriptor)

    def _flush(self) -> None:
        rest = self._buffer[: self._filled]
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        self._filled = 0
