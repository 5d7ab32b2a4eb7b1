"""Copies tables from their file into huge pages of memory, which forked processes share.

Rows keep their offsets, so a resident version is used like a mapped version. Nothing else writes to
the copy. Never imports torch.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import StoreError, reading
from embedserve_store.format.safetensors_file import LENGTH_BYTES
from embedserve_store.format.tables_file import Progress, TablesFile, file_order
from embedserve_store.model_version import ModelVersion

logger = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 2 << 20
READ_BYTES = 32 << 20
"""Bytes of a block that is read, then dropped from the page cache; 32 MiB."""


def check_room(versions: Iterable[ModelVersion], available: int) -> None:
    """Raises StoreError if the tables of ``versions`` do not fit into ``available`` bytes."""
    versions = [*versions]
    needed = sum(version.tables.nbytes for version in versions)
    if needed > available:
        paths = ", ".join(str(version.tables.path) for version in versions)
        raise StoreError(
            f"{paths}: {needed} bytes of tables cannot be resident where {available} bytes of "
            "memory are available; they can be mapped"
        )


def make_resident(version: ModelVersion, progress: Progress | None = None) -> ModelVersion:
    """Returns ``version`` with its tables copied into memory of this process.

    Processes that are forked later share the memory. Of a part only its rows are copied.

    Raises:
        StoreError: the tables can no longer be read.
    """
    tables, data = version.tables, _huge_memory(version.tables.nbytes)
    if tables.file_offsets is not None:
        tables = replace(tables, offsets=_dense_offsets(tables))
    read_tables(tables, data, progress)
    data.flags.writeable = False
    return replace(version, tables=replace(tables, data=data, opened=None))


def _dense_offsets(tables: TablesFile) -> dict[str, int]:
    """Returns offsets of the tables without gaps, in the order that aligns them best."""
    ordered = file_order(tables.tables.values())
    starts = accumulate((table.nbytes for table in ordered), initial=0)
    return {table.name: start for table, start in zip(ordered, starts, strict=False)}


def read_tables(tables: TablesFile, data: NDArray[np.uint8], progress: Progress | None) -> None:
    """Reads each table from the file to its offset in ``data``.

    Raises:
        StoreError: the tables can no longer be read.
    """
    with reading(tables.path), open(tables.path, "rb", buffering=0) as file:
        data_start = LENGTH_BYTES + int.from_bytes(file.read(LENGTH_BYTES), "little")
        bytes_before = 0
        for table in file_order(tables.tables.values()):
            offset, in_file = tables.offsets[table.name], data_start + bytes_before
            if tables.file_offsets is not None:
                in_file = tables.file_offsets[table.name]
            rows = data[offset : offset + table.nbytes]
            for done in _read_rows(file, in_file, rows, tables.path):
                if progress:
                    rows_done = done // table.row_bytes
                    progress(table.name, rows_done, table.num_embeddings, bytes_before + done)
            bytes_before += table.nbytes


def _huge_memory(nbytes: int) -> NDArray[np.uint8]:
    """Returns private memory, uint8 [nbytes] of zeros, which the kernel may back by huge pages.

    No page is allocated yet.
    """
    whole_pages = -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, whole_pages + HUGE_PAGE_BYTES, flags=flags)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        logger.warning("huge pages are refused by this host: %s", error.strerror)
    every = np.frombuffer(memory, np.uint8)
    start = -every.ctypes.data % HUGE_PAGE_BYTES
    return every[start : start + nbytes]


def _read_rows(file: BinaryIO, offset: int, rows: NDArray[np.uint8], path: Path) -> Iterator[int]:
    """Fills ``rows`` (uint8 [bytes]) with the file's bytes from ``offset``; yields the number of
    bytes that are read, after each block."""
    for start in range(0, rows.size, READ_BYTES):
        block = rows[start : start + READ_BYTES]
        _read_block(file, offset + start, block, path)
        yield start + block.size


def _read_block(file: BinaryIO, offset: int, block: NDArray[np.uint8], path: Path) -> None:
    """Reads ``block`` and drops it from the page cache, so that it is not in memory twice."""
    rest = block.data
    while rest:
        count = os.preadv(file.fileno(), [rest], offset + block.size - len(rest))
        if not count:
            raise StoreError(f"{path}: ends within its tables: truncated since it was opened")
        rest = rest[count:]
    os.posix_fadvise(file.fileno(), offset, block.size, os.POSIX_FADV_DONTNEED)


def huge_page_bytes(versions: Iterable[ModelVersion]) -> int:
    """Returns the bytes in huge pages of the memory of the tables of resident ``versions``.

    The values come from the mappings of this process in /proc/self/smaps. They count each mapping
    that holds such a table as a whole.
    """
    addresses = [
        version.tables.rows(name).ctypes.data
        for version in versions
        for name in version.tables.tables
    ]
    total = 0
    is_ours = False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            first, *rest = line.split()
            if not first.endswith(":"):
                start, end = (int(part, 16) for part in first.split("-"))
                is_ours = any(start <= address < end for address in addresses)
            elif is_ours and first == "AnonHugePages:":
                total += int(rest[0]) << 10
    return total
