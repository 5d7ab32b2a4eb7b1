"""Tests of mapped files: a file is mapped if its header and size are the expected ones, otherwise
rejected."""

import os
import resource
from pathlib import Path

import numpy as np
import pytest

from embedserve_store.errors import StoreError, UnopenedError
from embedserve_store.format.safetensors_file import (
    HEADER_BYTES_MAX,
    consecutive,
    content_of,
    encode_header,
    map_tensors,
)

TENSORS = {
    "half": {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12]},
    "bytes": {"dtype": "U8", "shape": [5], "data_offsets": [12, 17]},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "any.safetensors"
    path.write_bytes(encode_header(TENSORS) + bytes(range(17)))
    return path


def test_tensors_are_laid_out_consecutively() -> None:
    assert consecutive([("half", "F16", [2, 3]), ("bytes", "U8", [5])]) == TENSORS
    assert consecutive([]) == {}


def test_content_is_returned_only_if_header_and_size_match(path: Path) -> None:
    data = path.read_bytes()
    np.testing.assert_array_equal(content_of(data, TENSORS, "here"), np.arange(17, dtype=np.uint8))
    for wrong in (data[:-1], data + b"x", data.replace(b"F16", b"U16", 1), b""):
        with pytest.raises(StoreError, match="here: its tensors differ from"):
            content_of(wrong, TENSORS, "here")


def test_data_is_mapped_unchanged(path: Path) -> None:
    for few_reads in (False, True):
        data = map_tensors(path, TENSORS, few_reads=few_reads)
        np.testing.assert_array_equal(data, np.arange(17, dtype=np.uint8))


@pytest.mark.parametrize("size", [0, 7, 8, 100, 4095])
def test_file_truncated_within_its_header_is_rejected(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)
    with pytest.raises(StoreError, match="ends within its header"):
        map_tensors(path, TENSORS)


@pytest.mark.parametrize(("change", "why"), [(-1, "truncated"), (1, "bytes after the last tensor")])
def test_file_of_the_wrong_size_is_rejected(path: Path, change: int, why: str) -> None:
    size = path.stat().st_size + change
    with path.open("r+b") as file:
        file.truncate(size)
    with pytest.raises(StoreError, match=f"{size} bytes, expected {size - change}: {why}"):
        map_tensors(path, TENSORS)


def test_header_length_over_the_limit_is_rejected(path: Path) -> None:
    path.write_bytes((HEADER_BYTES_MAX + 1).to_bytes(8, "little") + path.read_bytes()[8:])
    with pytest.raises(StoreError, match=f"limit of {HEADER_BYTES_MAX}"):
        map_tensors(path, TENSORS)


def test_header_that_is_not_a_json_object_is_rejected(path: Path) -> None:
    path.write_bytes((4088).to_bytes(8, "little") + b"[1]".ljust(4088))
    with pytest.raises(StoreError, match="header is not a JSON object"):
        map_tensors(path, TENSORS)


def test_deeply_nested_header_is_rejected(path: Path) -> None:
    path.write_bytes((400_000).to_bytes(8, "little") + b"[" * 400_000)
    with pytest.raises(StoreError, match="header is not JSON"):
        map_tensors(path, TENSORS)


def test_data_not_aligned_to_a_page_is_rejected(path: Path) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes((length + 8).to_bytes(8, "little") + data[8 : 8 + length] + b" " * 8)
    with pytest.raises(StoreError, match="data starts at byte 4104, expected a whole page"):
        map_tensors(path, TENSORS)


def test_lack_of_memory_to_map_a_file_is_not_a_lack_of_access(path: Path) -> None:
    size = 4 << 30
    tensors = {"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    path.write_bytes(encode_header(tensors))
    os.truncate(path, path.stat().st_size + size)  # a sparse file
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + size // 2, limits[1]))
    try:
        with pytest.raises(UnopenedError, match="cannot be mapped: no memory is left"):
            map_tensors(path, tensors)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
