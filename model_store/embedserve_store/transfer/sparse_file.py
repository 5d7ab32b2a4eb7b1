"""Receives ranges of tables.safetensors into a sparse file, each at its offset of the whole file.

The rest of the file takes no disk space. Never imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from embedserve_store.format.tables_file import header_bytes
from embedserve_store.transfer.file_check import TABLES, FileCheck
from embedserve_store.transfer.stored_version import StoredVersion
from embedserve_store.writing.direct_file import DIRECT_BYTES_MIN

SYNC_BYTES = 64 << 20
"""Bytes after which a large part is written to disk and leaves the page cache; 64 MiB."""


def receive_ranges(version: StoredVersion, path: Path, report: Callable[[int], None]) -> str | None:
    """Writes the ranges of ``version`` and the header into the new file ``path``, synced to disk.

    Returns the problem of the first range that differs from the published rows, else None.

    Args:
        report: called with the number of bytes of each block that was written.

    Raises:
        StoreError, UnreachableError: a range cannot be read.
        OSError: ``path`` cannot be written.
    """
    header = header_bytes(version.manifest.tables)
    is_large = sum(one.layout.nbytes for one in version.ranges) >= DIRECT_BYTES_MIN
    path.unlink(missing_ok=True)
    with open(path, "xb", buffering=0) as file, ThreadPoolExecutor(1) as hasher:
        descriptor = file.fileno()
        _write_at(descriptor, header, 0)
        os.truncate(descriptor, len(header) + version.manifest.nbytes)
        unsynced = 0
        for one in version.ranges:
            check = FileCheck(one.layout, f"{version.where}/{TABLES}")
            at = one.start
            for block in version.blocks(TABLES, one.start, one.stop):
                checked = hasher.submit(check.update, block)
                _write_at(descriptor, block, at)
                checked.result()
                report(len(block))
                at += len(block)
                unsynced += len(block)
                if is_large and unsynced >= SYNC_BYTES:
                    _drop_pages(descriptor)
                    unsynced = 0
            if problem := check.problem():
                return problem
        os.fsync(descriptor)
        if is_large:
            _drop_pages(descriptor)
    return None


def _write_at(descriptor: int, data: bytes, at: int) -> None:
    rest = memoryview(data)
    while rest:
        count = os.pwrite(descriptor, rest, at)
        rest, at = rest[count:], at + count


def _drop_pages(descriptor: int) -> None:
    """Writes the file's pages to disk and drops them from the page cache.

    A large part would otherwise evict the rows that the same host serves.
    """
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
