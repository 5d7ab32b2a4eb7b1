"""Tests of the writer of tables: our reader and the safetensors library read the written rows, and
the checksums match."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from store.example_tables import TABLES, content

from embedserve_store.format.tables_file import TablesFile
from embedserve_store.publishing.tables_writer import write_tables


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tables.safetensors"
    write_tables(path, TABLES, lambda table: np.array_split(content(table), 2))
    return path


def test_written_rows_round_trip(path: Path) -> None:
    tables = TablesFile.open(path, TABLES)
    for table in TABLES:
        np.testing.assert_array_equal(tables.rows(table.name), content(table))
        start = tables.offsets[table.name]
        assert tables.data[start : start + table.nbytes].tobytes() == content(table).tobytes()
    assert tables.data.size == sum(table.nbytes for table in TABLES)


def test_safetensors_library_reads_the_written_tables(path: Path) -> None:
    tensors = load_file(path)
    assert tensors.keys() == {table.name for table in TABLES}
    for table in TABLES:
        assert tensors[table.name].tobytes() == content(table).tobytes()
    assert tensors["wide"].dtype == np.float32
    assert tensors["wide"].shape == (32, 64)
    assert tensors["half"].dtype == np.float16
    assert tensors["half"].shape == (5, 8)
    assert tensors["bytes"].shape == (7, 16)
    assert tensors["odd"].dtype == np.uint8


def test_checksums_and_progress_match_the_written_bytes(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int, int]] = []
    checksums = write_tables(
        tmp_path / "t",
        TABLES,
        lambda table: np.array_split(content(table), 2),
        lambda *call: calls.append(call),
    )
    for table in TABLES:
        assert checksums[table.name] == hashlib.sha256(content(table).tobytes()).hexdigest()
    assert calls[:2] == [("wide", 16, 32, 4096), ("wide", 32, 32, 8192)]
    assert calls[-1][3] == sum(table.nbytes for table in TABLES)
