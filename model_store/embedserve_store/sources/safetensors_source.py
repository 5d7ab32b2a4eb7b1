"""Reads the rows of safetensors files: a single file, or a folder of files of a large model.

The headers are parsed here, for the byte offsets, and the values are read with preadv. A folder's
index file is not needed, because the headers hold the same information. The format holds no code to
run.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embedserve_store.errors import StoreError
from embedserve_store.sources.file_rows import FileRows, Rectangle, SourceFile

SUFFIX = ".safetensors"
_HEADER_BYTES_MAX = 100_000_000
"""Maximum size in bytes of a header, the limit of the safetensors library."""
_DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
}
_SHARDED = "DCP_SHARDING_INFO"
"""Metadata key of files that each hold the shards of one rank."""


def open_safetensors(path: Path) -> tuple[dict[str, FileRows], tuple[str, ...]]:
    """Returns the 2-D floating-point tensors of a file or folder, and all other keys.

    Raises:
        StoreError: a file cannot be read, is truncated or malformed, or two files have the same
            key.
    """
    paths = sorted(path.glob(f"*{SUFFIX}")) if os.path.isdir(path) else [path]
    tensors: dict[str, FileRows] = {}
    others: dict[str, None] = {}
    for one in paths:
        file = SourceFile.of(one)
        header, begin = _header(file)
        for key, entry in header.items():
            if key in tensors or key in others:
                raise StoreError(f"{path}: has two entries {key!r}")
            rows = _rows(file, begin, entry, f"{one}: {key}")
            if rows is None:
                others[key] = None
            else:
                tensors[key] = rows
        _check_offsets(header, begin, file)
    return tensors, tuple(others)


def _header(file: SourceFile) -> tuple[Mapping[str, Any], int]:
    """Returns the entries of the header, and the byte offset at which the values begin."""
    with file.path.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if not 2 <= size <= min(file.size - 8, _HEADER_BYTES_MAX):
            raise StoreError(f"{file.path}: truncated, or not a safetensors file")
        try:
            header = json.loads(opened.read(size), object_pairs_hook=_object)
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{file.path}: its header cannot be parsed: {error}") from error
    if not isinstance(header, dict):
        raise StoreError(f"{file.path}: its header is not a JSON object")
    metadata = header.pop("__metadata__", None)
    if isinstance(metadata, dict) and _SHARDED in metadata:
        raise StoreError(
            f"{file.path}: holds one rank's shards: give the consolidated file, or save again in "
            "the default format of torch.distributed.checkpoint"
        )
    return header, 8 + size


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the pairs of a JSON object. Raises ValueError if it has a key twice."""
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key is there twice")
    return result


def _check_offsets(header: Mapping[str, Any], begin: int, file: SourceFile) -> None:
    """Raises StoreError unless the bytes of all entries follow each other up to the end of the
    file, as the safetensors library requires.

    Each entry has been read.
    """
    end = 0
    for first, last in sorted(entry["data_offsets"] for entry in header.values()):
        if not end == first <= last:
            raise StoreError(f"{file.path}: its tensors overlap or have gaps, at byte {end}")
        end = last
    if begin + end != file.size:
        raise StoreError(f"{file.path}: has {file.size - begin} bytes of tensors, expected {end}")


def _rows(file: SourceFile, begin: int, entry: Any, where: str) -> FileRows | None:
    """Returns the rows of an entry; None if it is not a 2-D floating-point tensor."""
    try:
        kind, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, first, last]
    except (TypeError, KeyError, ValueError) as error:
        raise StoreError(f"{where}: not an entry of a safetensors header") from error
    if not isinstance(kind, str) or not all(type(n) is int and n >= 0 for n in numbers):
        raise StoreError(f"{where}: not an entry of a safetensors header")
    if kind not in _DTYPES or len(shape) != 2:
        return None
    dtype, itemsize = _DTYPES[kind]
    if last - first != math.prod(shape) * itemsize:
        raise StoreError(f"{where}: has {last - first} bytes for {dtype} {shape}")
    rows, dim = shape
    whole = Rectangle(file, begin + first, dim * itemsize, 0, rows, 0, dim)
    return FileRows((whole,), (rows, dim), dtype, where)
