"""Receives ranges of tables.safetensors into a sparse file, each at its offset of the whole file.

The rest of the file takes no disk space. The holes of a file that an interrupted transfer has left
show how far each range has arrived. Never imports torch.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from embedserve_store.format.tables_file import header_bytes
from embedserve_store.transfer.file_check import TABLES, FileCheck
from embedserve_store.transfer.stored_version import FileRange, StoredVersion, file_blocks
from embedserve_store.writing.direct_file import DIRECT_BYTES_MIN

logger = logging.getLogger(__name__)

SYNC_BYTES = 64 << 20
"""Bytes after which a large part is written to disk and leaves the page cache; 64 MiB."""
MARGIN_BYTES = 1 << 20
"""Bytes before the end of what has arrived of a range that are transferred again; 1 MiB. The block
of the file system in which they end may not be whole, and another range may have begun it."""


def receive_ranges(version: StoredVersion, path: Path, report: Callable[[int], None]) -> str | None:
    """Writes the ranges of ``version`` and the header into ``path``, synced to disk.

    What an interrupted transfer has left in ``path`` is used as far as its checksums are right.
    Returns the problem of the first range that differs from the published rows, else None.

    Args:
        report: called with the number of bytes of each block that was written or found. The number
            is negative if bytes that were reported have to be transferred again.

    Raises:
        StoreError, UnreachableError: a range cannot be read.
        OSError: ``path`` cannot be written.
    """
    header = header_bytes(version.manifest.tables)
    is_large = sum(one.layout.nbytes for one in version.ranges) >= DIRECT_BYTES_MIN
    is_new = not path.exists()
    with _opened(path) as descriptor, ThreadPoolExecutor(1) as hasher:
        os.truncate(descriptor, len(header) + version.manifest.nbytes)
        file = _SparseFile(descriptor, path, is_large)
        # All before the first write: ranges may share a block of the file system.
        kept = [0 if is_new else file.kept_bytes(one) for one in version.ranges]
        file.write(header, 0)
        for one, kept_bytes in zip(version.ranges, kept, strict=True):
            problem = _receive_range(version, one, file, kept_bytes, hasher, report)
            if problem and kept_bytes:
                logger.info("%s: what an earlier transfer left is damaged: transferred anew", path)
                report(-one.layout.nbytes)
                problem = _receive_range(version, one, file, 0, hasher, report)
            if problem:
                return problem
        file.sync()
    return None


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Opens ``path``, a new file or that of an earlier transfer, and yields its descriptor."""
    with suppress(OSError):  # no such file, or a file system without modes
        path.chmod(path.stat().st_mode | stat.S_IWUSR)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _receive_range(
    version: StoredVersion,
    one: FileRange,
    file: _SparseFile,
    kept_bytes: int,
    hasher: Executor,
    report: Callable[[int], None],
) -> str | None:
    """Writes a range behind its first ``kept_bytes``, and returns what is wrong with all of it."""
    check = FileCheck(one.layout, f"{version.where}/{TABLES}")
    at = one.start + kept_bytes
    for block in file_blocks(file.path, one.start, at) if kept_bytes else ():
        check.update(block)
        report(len(block))
    if at < one.stop:
        for block in version.blocks(TABLES, at, one.stop):
            checked = hasher.submit(check.update, block)
            file.write(block, at)
            checked.result()
            report(len(block))
            at += len(block)
    return check.problem()


class _SparseFile:
    """Writes ranges of a file whose other ranges are holes.

    Attributes:
        path: path of the file.
    """

    def __init__(self, descriptor: int, path: Path, is_large: bool) -> None:
        self.path = path
        self._descriptor = descriptor
        self._is_large = is_large
        self._unsynced = 0

    def kept_bytes(self, one: FileRange) -> int:
        """Returns how many bytes of a range have arrived before. A range is written from its first
        byte to its last, so they end at a hole."""
        hole = os.lseek(self._descriptor, one.start, os.SEEK_HOLE)
        if hole >= one.stop:
            return one.layout.nbytes
        return max(0, hole - one.start - MARGIN_BYTES)

    def write(self, data: bytes, at: int) -> None:
        rest = memoryview(data)
        while rest:
            count = os.pwrite(self._descriptor, rest, at)
            rest, at = rest[count:], at + count
        self._unsynced += len(data)
        if self._is_large and self._unsynced >= SYNC_BYTES:
            self._drop_pages()
            self._unsynced = 0

    def sync(self) -> None:
        """Writes the file to disk."""
        os.fsync(self._descriptor)
        if self._is_large:
            self._drop_pages()

    def _drop_pages(self) -> None:
        """Writes the file's pages to disk and drops them from the page cache.

        A large part would otherwise evict the rows that the same host serves.
        """
        os.fdatasync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
