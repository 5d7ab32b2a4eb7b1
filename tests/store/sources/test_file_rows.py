"""Tests of rows of files: read unchanged, from any rectangles, or rejected."""

import os
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from embedserve_store.errors import StoreError
from embedserve_store.sources import file_rows
from embedserve_store.sources.file_rows import FileRows, Rectangle, SourceFile

ROWS, DIM = 23, 8
TABLE = torch.arange(ROWS * DIM, dtype=torch.float32).view(ROWS, DIM)


def write(path: Path, tensor: torch.Tensor, before: int = 3) -> SourceFile:
    """Writes the tensor's bytes after a few other bytes."""
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    path.write_bytes(b"x" * before + raw)
    return SourceFile.of(path)


def rectangle(path: Path, row: int, rows: int, column: int, columns: int) -> Rectangle:
    file = write(path, TABLE[row : row + rows, column : column + columns])
    return Rectangle(file, 3, columns * 4, row, rows, column, columns)


def split(folder: Path, rows: int, columns: int) -> list[Rectangle]:
    return [
        rectangle(folder / f"{r}_{c}", r, min(rows, ROWS - r), c, min(columns, DIM - c))
        for r in range(0, ROWS, rows)
        for c in range(0, DIM, columns)
    ]


@pytest.mark.parametrize("rows", [ROWS, 7, 1])
@pytest.mark.parametrize("columns", [DIM, 4, 3])
def test_rows_of_any_shard_grid_equal_the_table(tmp_path: Path, rows: int, columns: int) -> None:
    table = FileRows(split(tmp_path, rows, columns)[::-1], (ROWS, DIM), "float32", "t")
    assert (table.shape, table.dtype) == ((ROWS, DIM), "float32")
    for start, stop in [(0, ROWS), (5, 16), (6, 7), (22, 23), (9, 9), (0, 0)]:
        assert torch.equal(table.read(start, stop), TABLE[start:stop])
    numbers = np.array([22, 0, 7, 7, 6, 13])
    assert torch.equal(table.gather(numbers), TABLE[numbers])
    assert table.gather(np.array([], np.int64)).shape == (0, DIM)


def test_column_shards_are_read_through_a_small_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_rows, "_BUFFER_BYTES", 40)
    table = FileRows(split(tmp_path, ROWS, 3), (ROWS, DIM), "float32", "t")
    assert torch.equal(table.read(1, ROWS), TABLE[1:])


@pytest.mark.parametrize("name", ["float64", "float16", "bfloat16"])
def test_rows_keep_their_dtype_and_bits(tmp_path: Path, name: str) -> None:
    tensor = TABLE.to(getattr(torch, name)) / 3
    whole = Rectangle(write(tmp_path / "f", tensor), 3, DIM * tensor.itemsize, 0, ROWS, 0, DIM)
    table = FileRows([whole], (ROWS, DIM), name, "t")
    assert table.read(0, ROWS).dtype == tensor.dtype
    assert torch.equal(table.read(0, ROWS), tensor)


def test_row_stride_skips_rows_and_zero_stride_repeats_them(tmp_path: Path) -> None:
    file = write(tmp_path / "f", TABLE)
    skipping = Rectangle(file, 3 + 8, 2 * DIM * 4, 0, 12, 0, 4)
    assert torch.equal(FileRows([skipping], (12, 4), "float32", "t").read(3, 9), TABLE[6:18:2, 2:6])
    same = Rectangle(file, 3, 0, 0, 5, 0, DIM)
    assert torch.equal(
        FileRows([same], (5, DIM), "float32", "t").read(0, 5), TABLE[:1].expand(5, -1)
    )


def test_tables_without_rows_are_read_as_empty(tmp_path: Path) -> None:
    empty = Rectangle(write(tmp_path / "f", TABLE), 3, 32, 0, 0, 0, DIM)
    assert FileRows([empty], (0, DIM), "float32", "t").read(0, 0).shape == (0, DIM)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([(0, 10, 0, 8), (13, 10, 0, 8)], "rows 10 to 12: the values from column 0 on"),
        ([(0, 10, 0, 8)], "rows 10 to 22: the values from column 0 on are not there"),
        ([(0, 12, 0, 8), (10, 13, 0, 8)], "rows 10 to 11: columns 0 to 7 are there twice"),
        ([(0, 23, 0, 4), (0, 10, 4, 4)], "rows 10 to 22: the values from column 4 on"),
        ([(0, 23, 0, 5), (0, 23, 4, 4)], "rows 0 to 22: columns 4 to 4 are there twice"),
        ([(0, 23, 0, 3), (0, 23, 4, 4)], "rows 0 to 22: the values from column 3 on"),
        ([], "rows 0 to 22: the values from column 0 on"),
    ],
)
def test_gaps_and_overlaps_are_rejected(
    tmp_path: Path, places: list[tuple[int, int, int, int]], message: str
) -> None:
    parts = [rectangle(tmp_path / str(i), *place) for i, place in enumerate(places)]
    with pytest.raises(StoreError, match=f"^where: {message}"):
        FileRows(parts, (ROWS, DIM), "float32", "where")


def test_shard_outside_the_table_is_rejected(tmp_path: Path) -> None:
    part = rectangle(tmp_path / "f", 0, ROWS, 0, DIM)
    with pytest.raises(StoreError, match=r"rows 0 to 22 and columns 0 to 7, .* shape \[20, 8\]"):
        FileRows([part], (20, DIM), "float32", "where")


def test_gather_reads_a_repeated_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = FileRows([rectangle(tmp_path / "f", 0, ROWS, 0, DIM)], (ROWS, DIM), "float32", "t")
    preadv = Mock(wraps=os.preadv)
    monkeypatch.setattr(os, "preadv", preadv)
    assert torch.equal(table.gather(np.array([5, 2, 5, 5])), TABLE[[5, 2, 5, 5]])
    assert preadv.call_count == 2


def test_file_that_ends_early_is_rejected(tmp_path: Path) -> None:
    part = rectangle(tmp_path / "f", 0, ROWS, 0, DIM)
    longer = Rectangle(part.file, part.offset + 1, part.stride, 0, ROWS, 0, DIM)
    with pytest.raises(StoreError, match=r"^where: .*f is truncated"):
        FileRows([longer], (ROWS, DIM), "float32", "where")


def test_file_that_changes_between_reads_is_rejected(tmp_path: Path) -> None:
    table = FileRows([rectangle(tmp_path / "f", 0, ROWS, 0, DIM)], (ROWS, DIM), "float32", "t")
    table.read(0, 3)
    os.utime(tmp_path / "f", ns=(0, 0))
    with pytest.raises(StoreError, match="f: changed while it was read"):
        table.read(3, 6)
    (tmp_path / "f").unlink()
    with pytest.raises(StoreError, match="f: cannot be read: No such file"):
        table.gather(np.array([1]))


def test_file_truncated_within_a_read_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = FileRows([rectangle(tmp_path / "f", 0, ROWS, 0, DIM)], (ROWS, DIM), "float32", "t")
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: os.truncate(tmp_path / "f", 50))
    with pytest.raises(StoreError, match="f: is truncated"):
        table.read(0, ROWS)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (0, ROWS + 1)])
def test_missing_rows_are_never_filled_in(tmp_path: Path, start: int, stop: int) -> None:
    table = FileRows([rectangle(tmp_path / "f", 0, ROWS, 0, DIM)], (ROWS, DIM), "float32", "t")
    with pytest.raises(IndexError):
        table.read(start, stop)
    for number in (-1, ROWS):
        with pytest.raises(IndexError):
            table.gather(np.array([0, number]))
