"""Tests of staged uploads of rows to devices, with the CPU as each device."""

import logging

import numpy as np
import pytest
import torch

from embedserve.engine.attach_weights import as_tensor
from embedserve.engine.device_upload import RowCopy, copy_all
from embedserve_store import StoreError
from embedserve_store.format.table_spec import TableSpec

DIM = 60
"""Dimension of int8 rows; with scale and bias a row has 64 bytes."""


def table(rows: int) -> TableSpec:
    return TableSpec("t", rows, DIM, ("f",), "sum", "int8")


def stored(rows: int, seed: int) -> np.ndarray:
    """Returns int8 rows whose scale and bias GPUs support."""
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (rows, DIM + 4), np.uint8)
    data[:, :4] = np.array([0.5, -1.0], "<f2").view(np.uint8)
    return data


def row_copy(data: np.ndarray, pitch: int, *columns: slice, first_row: int = 0) -> RowCopy:
    whole = as_tensor(data)
    return RowCopy(
        table=table(len(data)),
        first_row=first_row,
        stored=data,
        is_mapped=False,
        parts=tuple(whole[:, one] for one in columns),
        target=torch.full((len(data), pitch), 7, dtype=torch.uint8),
    )


@pytest.mark.parametrize("buffer_bytes", [64, 1000, 1 << 20])
def test_rows_are_copied_to_each_device_and_padded_with_zeros(buffer_bytes: int) -> None:
    """Checks buffers that hold one row, a part of the rows, and all rows."""
    rows = [stored(101, 1), stored(7, 2), stored(1, 3), stored(50, 4)]
    whole, column = slice(0, 64), (slice(0, 4), slice(14, 30))
    copies = [
        row_copy(rows[0], 64, whole),
        row_copy(rows[1], 80, whole),
        row_copy(rows[2], 64, whole),
        row_copy(rows[3], 32, *column),
    ]
    copy_all([copies[:2], copies[2:3], copies[3:]], "all of it", buffer_bytes)
    for data, copy in zip(rows[:3], copies, strict=False):
        np.testing.assert_array_equal(copy.target[:, :64], data)
        assert not copy.target[:, 64:].any()
    parts = np.concatenate([rows[3][:, one] for one in column], axis=1)
    np.testing.assert_array_equal(copies[3].target[:, :20], parts)
    assert not copies[3].target[:, 20:].any()


def test_copied_bytes_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    data = stored(100, 1)
    with caplog.at_level(logging.INFO, "embedserve"):
        copy_all([[row_copy(data, 80, slice(0, 64))]], "store/m/1")
    assert "store/m/1: copied 0.00 of 0.00 GB to its devices in" in caplog.text
    assert len(caplog.records) == 1


def test_row_that_overflows_float16_raises_and_stops_the_copy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = stored(100, 1)
    data[60, :4] = np.array([200.0, 0.0], "<f2").view(np.uint8)
    first = row_copy(data, 64, slice(0, 64), first_row=1000)
    with (
        caplog.at_level(logging.INFO, "embedserve"),
        pytest.raises(StoreError, match=r"table 't': row 1060 has the scale 200"),
    ):
        copy_all([[first], [row_copy(stored(5, 2), 64, slice(0, 64))]], "m", 1000)
    np.testing.assert_array_equal(first.target[:60], data[:60])
    assert (first.target[60:] == 7).all()
    assert not caplog.records
