"""Writes the files of a version into a hidden folder, each byte checked while it passes.

Files that an interrupted transfer has left in the folder are used as far as their checksums are
right. The caller makes the folder visible by a rename. Never imports torch.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from embedserve_store.errors import StoreError
from embedserve_store.transfer.file_check import MANIFEST, TABLES
from embedserve_store.transfer.sparse_file import receive_ranges
from embedserve_store.transfer.stored_version import StoredVersion, file_blocks
from embedserve_store.writing.direct_file import BUFFER_BYTES, new_file
from embedserve_store.writing.small_files import write_synced

logger = logging.getLogger(__name__)


class TransferProgress(Protocol):
    """Callback for the bytes of a version in transfer, file by file."""

    def __call__(self, file: str, bytes_done: int, bytes_total: int) -> None: ...


def receive(version: StoredVersion, staged: Path, progress: TransferProgress | None = None) -> None:
    """Writes the files of ``version`` into the folder ``staged``, synced to disk.

    Raises:
        StoreError: a file is damaged, or changed during the transfer. Its copy is removed.
        UnreachableError: the store of the version stopped responding.
        OSError: ``staged`` cannot be written.
    """
    for name, size in version.files.items():
        path = staged / name
        kept_bytes = _kept_bytes(path, size)
        problem = _receive_file(version, name, path, kept_bytes, progress)
        if problem and kept_bytes:
            logger.info("%s: what an earlier transfer left is damaged: transferred anew", path)
            problem = _receive_file(version, name, path, 0, progress)
        if problem:
            path.unlink()
            raise StoreError(problem)
    if version.ranges:
        _receive_part(version, staged / TABLES, progress)
    write_synced(staged / MANIFEST, version.manifest_json)


def _receive_part(version: StoredVersion, path: Path, progress: TransferProgress | None) -> None:
    """Writes the rows of a part, behind what an earlier transfer has left of them."""
    size = sum(one.layout.nbytes for one in version.ranges)
    bytes_done = 0

    def report(count: int) -> None:
        nonlocal bytes_done
        bytes_done += count
        if progress:
            progress(TABLES, bytes_done, size)

    if problem := receive_ranges(version, path, report):
        path.unlink()
        raise StoreError(problem)


def _kept_bytes(path: Path, size: int) -> int:
    """Returns how many bytes of an earlier transfer are kept: the file, or whole buffers of it."""
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        return 0
    return size if found == size else min(found, size) // BUFFER_BYTES * BUFFER_BYTES


def _receive_file(
    version: StoredVersion,
    name: str,
    path: Path,
    kept_bytes: int,
    progress: TransferProgress | None,
) -> str | None:
    """Writes a file behind its first ``kept_bytes``, and returns what is wrong with all of it."""
    size = version.files[name]
    check = version.check(name)
    bytes_done = 0

    def report(block: bytes) -> None:
        nonlocal bytes_done
        bytes_done += len(block)
        if progress:
            progress(name, bytes_done, size)

    if kept_bytes:
        for block in file_blocks(path, 0, kept_bytes):
            check.update(block)
            report(block)
    else:
        path.unlink(missing_ok=True)
    if kept_bytes < size:
        # The checksum of a block is computed while the disk writes the block.
        with new_file(path, size, kept_bytes) as file, ThreadPoolExecutor(1) as hasher:
            for block in version.blocks(name, kept_bytes, size):
                checked = hasher.submit(check.update, block)
                file.write(block)
                checked.result()
                report(block)
    return check.problem()
