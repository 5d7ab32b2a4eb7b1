"""Writes tables.safetensors as a stream, with at most three blocks of a table in memory.

Returns the SHA-256 of each table for the manifest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedserve_store.format.table_spec import TableSpec
from embedserve_store.format.tables_file import Progress, file_order, header_bytes
from embedserve_store.publishing.part_digests import PartDigests
from embedserve_store.writing.direct_file import Writer, new_file


def write_tables(
    path: Path,
    tables: tuple[TableSpec, ...],
    encoded_blocks: Callable[[TableSpec], Iterable[NDArray[np.uint8]]],
    progress: Progress | None = None,
    parts: PartDigests | None = None,
) -> dict[str, str]:
    """Writes ``path``, syncs it to disk, and returns the SHA-256 of each table by name.

    Args:
        encoded_blocks: returns the stored bytes of a table from its first row to its last, in
            blocks [n, row_bytes].
        parts: receives the rows of tables that several parts have.

    Raises:
        OSError: an error of the file system, such as a full disk.
    """
    checksums = {}
    bytes_done = 0
    header = header_bytes(tables)
    with new_file(path, len(header) + sum(table.nbytes for table in tables)) as file:
        file.write(header)
        for table in file_order(tables):
            blocks = encoded_blocks(table)
            of_table = parts if parts is not None and parts.is_divided(table.name) else None
            checksums[table.name] = _write_table(
                file, table, blocks, bytes_done, progress, of_table
            )
            bytes_done += table.nbytes
    return checksums


def _write_table(
    file: Writer,
    table: TableSpec,
    blocks: Iterable[NDArray[np.uint8]],
    bytes_before: int,
    progress: Progress | None,
    parts: PartDigests | None,
) -> str:
    """Writes the blocks of one table and returns its SHA-256.

    A block is written and hashed in threads while the next block is read and encoded. All threads
    finish a block before the block after the next is requested, so at most three blocks exist.
    """
    digest = hashlib.sha256()
    rows_done = 0
    before: tuple[Future[Any], ...] = ()
    with (
        ThreadPoolExecutor(1) as writer,
        ThreadPoolExecutor(1) as hasher,
        ThreadPoolExecutor(1) as part_hasher,
    ):
        for block in blocks:
            for future in before:
                future.result()
            rows = np.ascontiguousarray(block)
            before = writer.submit(file.write, rows.data), hasher.submit(digest.update, rows.data)
            if parts is not None:
                before = *before, part_hasher.submit(parts.update, table.name, rows)
            rows_done += len(block)
            if progress:
                bytes_done = bytes_before + rows_done * table.row_bytes
                progress(table.name, rows_done, table.num_embeddings, bytes_done)
        for future in before:
            future.result()
    return digest.hexdigest()
