"""Reads the rows of a torch.distributed.checkpoint folder, directly from its shards.

Needs no process group and reads no values at first. Each shard's position is found in its file's
header, and the rows are read from there. A tensor's shards are checked only when the tensor is
requested. Damaged or missing shards of unpublished tensors therefore do no harm.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from embedserve_store.errors import StoreError
from embedserve_store.sources.dcp_metadata import METADATA, Chunk, StoredTensor, read_metadata
from embedserve_store.sources.file_rows import FileRows, LazyTensors, Rectangle, SourceFile
from embedserve_store.sources.state_dict import is_table_like
from embedserve_store.sources.torch_file import Archive, dtype_name


def _find_rows(folder: Path, key: str, stored: StoredTensor) -> FileRows:
    """Raises StoreError if a shard is missing, truncated or inconsistent with the metadata, or if
    the shards do not cover the tensor."""
    where = f"{folder}: {key}"
    files: dict[str, SourceFile] = {}
    rectangles = (
        rectangle
        for chunk in stored.chunks
        if all(chunk.sizes)
        for rectangle in _located(folder, chunk, stored.dtype, files, where)
    )
    rows, dim = stored.shape
    return FileRows(rectangles, (rows, dim), stored.dtype, where)


def _located(
    folder: Path, chunk: Chunk, dtype: str, files: dict[str, SourceFile], where: str
) -> Iterator[Rectangle]:
    place = chunk.place
    shard = f"{where}: its shard at {list(chunk.offsets)}"
    if place is None:
        raise StoreError(f"{shard} is missing: {METADATA} names no file for it")
    if place.file not in files:
        if not (folder / place.file).is_file():
            raise StoreError(f"{shard} is missing: there is no file {place.file}")
        files[place.file] = SourceFile.of(folder / place.file)
    shard += f" in {place.file}"
    archive = Archive(files[place.file], place.offset, place.length, shard)
    tensor = archive.content
    if not is_table_like(tensor):
        raise StoreError(f"{shard} is not a plain 2-D floating-point tensor")
    found = (dtype_name(tensor), tuple(tensor.shape))
    if found != (dtype, chunk.sizes):
        raise StoreError(
            f"{shard} is {found[0]} {list(found[1])}, expected {dtype} {list(chunk.sizes)}"
        )
    row, column = chunk.offsets
    return archive.rectangles(tensor, row, column)


def is_dcp(folder: Path) -> bool:
    """Returns whether ``folder`` was written by torch.distributed.checkpoint, complete or not."""
    return (folder / METADATA).exists() or any(folder.glob("*.distcp"))


def open_dcp(folder: Path) -> tuple[LazyTensors, tuple[str, ...]]:
    """Returns the 2-D floating-point tensors of a DCP folder, and the keys of all other entries.

    Raises:
        StoreError: the metadata is missing, damaged, or holds code.
    """
    if not (folder / METADATA).exists():
        parts = any(folder.glob(f"__*{METADATA}"))
        raise StoreError(
            f"{folder}: has no {METADATA}: "
            + ("each rank saved for itself (use_collectives=False); " if parts else "")
            + "save again and wait for the save to end"
        )
    entries = read_metadata(folder)
    finders = {
        key: partial(_find_rows, folder, key, stored)
        for key, stored in entries.items()
        if stored and _is_table_like(stored)
    }
    return LazyTensors(finders), tuple(key for key in entries if key not in finders)


def _is_table_like(stored: StoredTensor) -> bool:
    is_float = stored.dtype.startswith(("float", "bfloat"))
    are_flat = all(len(c.sizes) == len(c.offsets) == 2 for c in stored.chunks)
    return is_float and len(stored.shape) == 2 and are_flat
