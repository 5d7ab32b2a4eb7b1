"""Tests of safetensors files and folders of them: read by their headers, or rejected."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from embedserve_store.errors import StoreError
from embedserve_store.sources.safetensors_source import open_safetensors

WEIGHT = torch.randn(11, 8, generator=torch.Generator().manual_seed(3))


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
)
def test_safetensors_file_is_read_as_saved(tmp_path: Path, dtype: torch.dtype) -> None:
    weight = WEIGHT.to(dtype)
    content = {"a.weight": weight, "bias": torch.ones(3), "n": torch.ones(2, 2, dtype=torch.int8)}
    save_file(content, tmp_path / "m.safetensors", metadata={"format": "pt"})
    tensors, others = open_safetensors(tmp_path / "m.safetensors")
    assert sorted(others) == ["bias", "n"]
    rows = tensors["a.weight"]
    assert (rows.shape, rows.dtype) == ((11, 8), str(dtype).removeprefix("torch."))
    assert torch.equal(rows.read(3, 11).view(torch.uint8), weight[3:].view(torch.uint8))
    last = rows.gather(np.array([10]))
    assert torch.equal(last.view(torch.uint8), weight[10:].view(torch.uint8))


def test_folder_combines_its_safetensors_files(tmp_path: Path) -> None:
    save_file({"a": WEIGHT}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": WEIGHT * 2}, tmp_path / "model-00002-of-00002.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    tensors, _ = open_safetensors(tmp_path)
    assert torch.equal(tensors["a"].read(0, 11), WEIGHT)
    assert torch.equal(tensors["b"].read(0, 11), WEIGHT * 2)


def test_entry_in_two_files_is_rejected(tmp_path: Path) -> None:
    for name in ("x", "y"):
        save_file({"a": WEIGHT}, tmp_path / f"{name}.safetensors")
    with pytest.raises(StoreError, match="has two entries 'a'"):
        open_safetensors(tmp_path)


def test_truncated_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": WEIGHT}, path)
    whole = path.read_bytes()
    for size in (0, 7, 20, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(StoreError, match=r"m\.safetensors.* truncated"):
            open_safetensors(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{" * 50, "its header cannot be parsed"),
        (b"\xff\xff", "its header cannot be parsed"),
        ([1, 2], "its header is not a JSON object"),
        ({"a": 3}, "a: not an entry of a safetensors header"),
        ({"a": {"dtype": "F32", "shape": [1, 2]}}, "a: not an entry"),
        ({"a": {"dtype": "F32", "shape": [1, -2], "data_offsets": [0, 8]}}, "a: not an entry"),
        ({"a": {"dtype": "F32", "shape": [1, 2], "data_offsets": [-8, 0]}}, "a: not an entry"),
        ({"a": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 4]}}, "a: has 4 bytes for"),
    ],
)
def test_malformed_header_is_rejected(tmp_path: Path, header: Any, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        open_safetensors(write(tmp_path / "m.safetensors", header, b"12345678"))


def entry(first: int, last: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [1, (last - first) // 4], "data_offsets": [first, last]}


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(0, 16), (8, 24)], "its tensors overlap or have gaps, at byte 16"),
        ([(0, 16), (0, 16)], "its tensors overlap or have gaps, at byte 16"),
        ([(0, 8), (16, 24)], "its tensors overlap or have gaps, at byte 8"),
        ([(8, 24)], "its tensors overlap or have gaps, at byte 0"),
        ([(0, 8), (8, 16)], "has 24 bytes of tensors, expected 16"),
    ],
)
def test_offsets_that_the_library_rejects_are_rejected(
    tmp_path: Path, spans: list[tuple[int, int]], message: str
) -> None:
    header = {f"t{i}": entry(*span) for i, span in enumerate(spans)}
    path = write(tmp_path / "m.safetensors", header, bytes(24))
    with pytest.raises(StoreError, match=message):
        open_safetensors(path)
    with pytest.raises(SafetensorError):
        load_file(path)


@pytest.mark.parametrize("name", ["t", "shape"])
def test_repeated_key_in_the_header_is_rejected(tmp_path: Path, name: str) -> None:
    text = json.dumps({"t": entry(0, 8), "u": entry(8, 16)})
    repeated = text.replace("u", "t") if name == "t" else text.replace("dtype", "shape")
    with pytest.raises(StoreError, match="its header cannot be parsed: a key is there twice"):
        open_safetensors(write(tmp_path / "m.safetensors", repeated.encode(), bytes(16)))


def test_tensors_in_any_order_and_empty_tensors_are_read(tmp_path: Path) -> None:
    header = {"b": entry(8, 16), "none": entry(8, 8), "a": entry(0, 8)}
    tensors, _ = open_safetensors(write(tmp_path / "m.safetensors", header, bytes(range(16))))
    assert tensors["b"].read(0, 1).numpy().tobytes() == bytes(range(8, 16))


def test_shards_of_one_rank_are_rejected_with_advice(tmp_path: Path) -> None:
    sharding = {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [0, 0]}})}
    save_file({"a": WEIGHT}, tmp_path / "m.safetensors", metadata=sharding)
    with pytest.raises(StoreError, match="holds one rank's shards: give the consolidated file"):
        open_safetensors(tmp_path)
