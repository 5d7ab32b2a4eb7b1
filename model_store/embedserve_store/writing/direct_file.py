"""Writes files once, from front to back, and large files past the page cache.

A file of tens of gigabytes would evict other pages from memory, such as the tables that this host
serves. Copying it through the page cache also takes more processor time than the disk needs. A file
written directly is on disk and not in memory until it is read. Small files, and files on file
systems without direct I/O, are written as usual.
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
"""Size in bytes from which a file is written directly. A smaller file is likely read again soon,
and leaves room for other files in memory."""
BUFFER_BYTES = 8 << 20
"""Bytes of the write buffer, a multiple of every disk's block size, as direct I/O requires."""


class Writer(Protocol):
    def write(self, data: bytes | memoryview, /) -> object: ...


@contextmanager
def new_file(path: Path, nbytes: int, kept_bytes: int = 0) -> Iterator[Writer]:
    """Opens the new file ``path`` of ``nbytes`` bytes. The file is on disk when the block ends.

    Args:
        kept_bytes: bytes of an existing file that stay; the rest is cut off, and written anew. A
            multiple of BUFFER_BYTES.

    Raises:
        OSError: an error of the file system, such as a full disk.
    """
    if kept_bytes:
        os.truncate(path, kept_bytes)
    direct = _open_direct(path, kept_bytes) if nbytes >= DIRECT_BYTES_MIN else None
    if direct is None:
        with open(path, "ab" if kept_bytes else "xb") as file:
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


def _open_direct(path: Path, kept_bytes: int) -> int | None:
    """Opens ``path`` for direct I/O behind its first ``kept_bytes``; a new file if they are 0.

    Returns None, and leaves no new file, if the file system rejects direct I/O.
    """
    flags = os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT
    flags |= os.O_APPEND if kept_bytes else os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags, 0o666)
    except FileExistsError:
        raise
    except OSError:
        if not kept_bytes:
            path.unlink(missing_ok=True)
        return None


class _DirectWriter:
    """Collects written bytes in an aligned buffer, and writes the buffer whenever it is full."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffer = memoryview(mmap.mmap(-1, BUFFER_BYTES))  # page-aligned
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
        """Writes the rest, which need not be whole blocks, and syncs the file."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._flush()
        os.fsync(self._descriptor)

    def _flush(self) -> None:
        rest = self._buffer[: self._filled]
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        self._filled = 0
