"""Encodes headers of safetensors files, and maps such files after an exact check of the header.

A file is an 8-byte length, a JSON header and the tensors' bytes without gaps. The header is padded
with spaces so that the data starts on a page. This module does not interpret the tensors.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import NO_MEMORY, StoreError, UnopenedError, unreadable
from embedserve_store.format.regular_file import stat_regular

PAGE_BYTES = 4096
HEADER_BYTES_MAX = 100 << 20
"""Maximum bytes of a header; 100 MiB is a little above the safetensors library's 100 MB."""

LENGTH_BYTES = 8
"""Bytes of the header's length, which precedes the header."""

ITEM_BYTES = {"I64": 8, "U32": 4, "F32": 4, "F16": 2, "U8": 1}
"""Bytes of an element by dtype."""

Tensors = Mapping[str, Mapping[str, Any]]
"""Dtype, shape and data_offsets of each tensor by name, in the order of their bytes."""


def consecutive(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> dict[str, Any]:
    """Returns the header of tensors that lie one after the other.

    Args:
        tensors: name, dtype and shape of each.
    """
    header = {}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    return header


def data_bytes(tensors: Tensors) -> int:
    """Returns the bytes of the data of ``tensors``."""
    return max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)


def encode_header(tensors: Tensors) -> bytes:
    """Returns the bytes before the data: length and header, padded to a whole number of pages."""
    text = json.dumps(tensors, separators=(",", ":")).encode()
    padding = -(LENGTH_BYTES + len(text)) % PAGE_BYTES
    text += b" " * padding
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def content_of(data: bytes, tensors: Tensors, where: str) -> NDArray[np.uint8]:
    """Returns the bytes of ``tensors`` in a whole file, as a view of ``data``.

    Raises:
        StoreError: the file does not have exactly these tensors.
    """
    header = encode_header(tensors)
    if not data.startswith(header) or len(data) != len(header) + data_bytes(tensors):
        raise StoreError(f"{where}: its tensors differ from those in the manifest")
    return np.frombuffer(data, np.uint8, offset=len(header))


def map_tensors(path: Path, expected: Tensors, *, few_reads: bool = False) -> NDArray[np.uint8]:
    """Maps the data of ``path`` read-only, starting at a page, without reading the data.

    Args:
        few_reads: turns read-ahead off (MADV_RANDOM), so that a page that is not in memory is read
            alone.

    Raises:
        UnreachableError: the file cannot be read now.
        UnopenedError: there is no memory to map it.
        StoreError: the file is missing or truncated, or its header differs from ``expected``.
    """
    try:
        stat_regular(path)
        with open(path, "rb") as file:
            return _map(file, path, expected, few_reads)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise UnopenedError(f"{path}: cannot be mapped: {NO_MEMORY}") from error
        raise unreadable(path, "cannot be read", error, StoreError) from error


def _map(file: IO[bytes], path: Path, expected: Tensors, few_reads: bool) -> NDArray[np.uint8]:
    header = _read_header(file, path)
    _check_tensors(_parse_header(header, path), expected, path)
    data_start = LENGTH_BYTES + len(header)
    if data_start % PAGE_BYTES:
        raise StoreError(f"{path}: data starts at byte {data_start}, expected a whole page")
    _check_size(file, path, data_start + data_bytes(expected))
    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if few_reads:
        mapping.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapping, np.uint8, offset=data_start)


def _read_header(file: IO[bytes], path: Path) -> bytes:
    length = int.from_bytes(_read_exactly(file, LENGTH_BYTES, path), "little")
    if length > HEADER_BYTES_MAX:
        raise StoreError(
            f"{path}: header length is {length} bytes, more than the limit of {HEADER_BYTES_MAX}: "
            "not a safetensors file"
        )
    return _read_exactly(file, length, path)


def _read_exactly(file: IO[bytes], count: int, path: Path) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise StoreError(f"{path}: ends within its header: truncated or half-written")
    return data


def _parse_header(header: bytes, path: Path) -> dict[str, Any]:
    try:
        tensors = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}: header is not JSON: {error}") from error
    if not isinstance(tensors, dict):
        raise StoreError(f"{path}: header is not a JSON object")
    return tensors


def _check_tensors(found: dict[str, Any], expected: Tensors, path: Path) -> None:
    for name in expected:
        if name not in found:
            raise StoreError(f"{path}: tensor {name!r} of the manifest is not in the file")
    for name, tensor in found.items():
        if name not in expected:
            raise StoreError(f"{path}: tensor {name!r} is not one of the manifest's")
        if tensor != expected[name]:
            raise StoreError(
                f"{path}: tensor {name!r} is {tensor} in the file, the manifest means "
                f"{expected[name]}"
            )


def _check_size(file: IO[bytes], path: Path, expected: int) -> None:
    size = os.fstat(file.fileno()).st_size
    if size != expected:
        problem = "truncated or half-written" if size < expected else "bytes after the last tensor"
        raise StoreError(f"{path}: {size} bytes, expected {expected}: {problem}")
