"""Tests that the figures of a publish report follow their definition."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagCollection

from embedserve_store.errors import InvalidModelError
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.row_layout import encode_rows
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.format.tables_file import TablesFile
from embedserve_store.publishing.pooled_error import PooledError, pooled_error
from embedserve_store.publishing.publish import publish
from embedserve_store.publishing.tables_writer import write_tables
from embedserve_store.publishing.version_writer import check_errors
from embedserve_store.sources.rows import TensorRows


def error_of(
    table: TableSpec, trained: torch.Tensor, stored: torch.Tensor, path: Path
) -> PooledError:
    write_tables(path, (table,), lambda _: [encode_rows(stored, table.dtype)])
    return pooled_error(table, TensorRows(trained), TablesFile.open(path, (table,)))


def table_of(rows: torch.Tensor, pooling: str = "sum", dtype: str = "float32") -> TableSpec:
    return TableSpec("t", rows.shape[0], rows.shape[1], ("t",), pooling, dtype)


@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
def test_rows_scaled_by_1_1_have_relative_l2_error_of_0_1(tmp_path: Path, pooling: str) -> None:
    rows = torch.rand(50, 8)
    error = error_of(table_of(rows, pooling), rows, rows * 1.1, tmp_path / "t")
    assert error.relative_l2 == pytest.approx(0.1, rel=1e-4)
    assert error.cosine == pytest.approx(1.0)
    assert error.bytes_saved == 0


def test_cosine_min_is_the_cosine_of_the_worst_bag(tmp_path: Path) -> None:
    rows = torch.rand(3, 4) + 0.1
    turned = rows.clone()
    turned[1] = -turned[1]
    error = error_of(table_of(rows, "none"), rows, turned, tmp_path / "t")
    assert error.cosine_min == pytest.approx(-1.0)
    assert -1 < error.cosine < 1
    assert error.max_abs == pytest.approx(2 * rows[1].max().item())


@pytest.mark.parametrize("names", [("t", "u"), ("u", "t")])
def test_nan_error_exceeds_the_limit(tmp_path: Path, names: tuple[str, str]) -> None:
    """Sums of rows overflow float32, though each row is finite."""
    large = torch.full((50, 8), 3e38)
    with np.errstate(over="ignore", invalid="ignore"):
        error = error_of(table_of(large), large, large, tmp_path / "t")
    assert np.isnan(error.relative_l2)
    rows = torch.rand(50, 8)
    exact = error_of(table_of(rows), rows, rows, tmp_path / "u")
    manifest = Manifest("m", 1, (replace(table_of(rows), name="t"),), False)
    with pytest.raises(InvalidModelError, match=r"table 't'.* error of nan"):
        check_errors({one: error if one == "t" else exact for one in names}, manifest, 0.5)


def test_zero_rows_have_no_error(tmp_path: Path) -> None:
    zeros = torch.zeros(9, 4)
    assert error_of(table_of(zeros), zeros, zeros, tmp_path / "t") == PooledError(
        0.0, 1.0, 1.0, 0.0, 0
    )


def test_bytes_saved_are_relative_to_float32(tmp_path: Path) -> None:
    rows = torch.rand(10, 64)
    assert error_of(table_of(rows, dtype="int8"), rows, rows, tmp_path / "a").bytes_saved == 1880
    assert error_of(table_of(rows, dtype="int4"), rows, rows, tmp_path / "b").bytes_saved == 2200


def test_error_above_max_error_is_not_published(
    ebc: EmbeddingBagCollection, tmp_path: Path
) -> None:
    message = r"table 'tag': stored as int4, its pooled answers have a relative L2 error of 0\.\d+"
    dtypes = {"user": "int8", "tag": "int4"}
    with pytest.raises(InvalidModelError, match=message + ", more than the 0.01 allowed"):
        publish(ebc, tmp_path, model="m", dtype=dtypes, max_error=0.01)
    assert list(tmp_path.iterdir()) == []
    assert publish(ebc, tmp_path, model="m", dtype=dtypes, max_error=0.2).version == 1
