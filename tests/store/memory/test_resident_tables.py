"""Tests of resident tables: copies of the mapped tables in memory, byte for byte, at the same
offsets."""

import mmap
from pathlib import Path

import numpy as np
import pytest

from embedserve_store.errors import StoreError
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.format.tables_file import TablesFile
from embedserve_store.memory.resident_tables import (
    HUGE_PAGE_BYTES,
    READ_BYTES,
    check_room,
    huge_page_bytes,
    make_resident,
)
from embedserve_store.model_version import ModelVersion
from embedserve_store.publishing.tables_writer import write_tables
from embedserve_store.verification import verify


def test_resident_tables_equal_the_file_at_the_same_offsets(version: ModelVersion) -> None:
    resident = make_resident(version)
    assert np.array_equal(resident.tables.data, version.tables.data)
    assert resident.tables.offsets == version.tables.offsets
    for table in version.manifest.tables:
        assert np.array_equal(resident.tables.rows(table.name), version.tables.rows(table.name))
    assert resident.tables.data.ctypes.data % HUGE_PAGE_BYTES == 0


def test_resident_tables_are_independent_of_the_file(version: ModelVersion) -> None:
    resident = make_resident(version)
    before = resident.tables.data.copy()
    with open(version.tables.path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        mapping[-1] ^= 1
    assert not np.array_equal(version.tables.data, before)
    assert np.array_equal(resident.tables.data, before)
    verify(resident)  # verification reads the served copy
    with pytest.raises(StoreError, match="changed since it was published"):
        verify(version)


def test_resident_tables_are_read_only(version: ModelVersion) -> None:
    with pytest.raises(ValueError, match="read-only"):
        make_resident(version).tables.data[0] = 1


def test_make_resident_progress_ends_with_all_rows_and_bytes(version: ModelVersion) -> None:
    reports: list[tuple[str, int, int, int]] = []
    make_resident(version, lambda *report: reports.append(report))
    tables = version.tables
    assert [report[0] for report in reports] == list(tables.offsets)
    for name, rows_done, rows_total, _ in reports:
        assert rows_done == rows_total == tables.tables[name].num_embeddings
    assert reports[-1][-1] == tables.data.nbytes


def test_table_of_several_blocks_is_made_resident(tmp_path: Path, version: ModelVersion) -> None:
    rows = READ_BYTES // 256 + 5
    table = TableSpec("big", rows, 64, ("f",), "sum", "float32")
    blocks = np.random.default_rng(0).integers(0, 256, (rows, 256), np.uint8)
    path = tmp_path / "tables.safetensors"
    write_tables(path, (table,), lambda _: [blocks])
    tables = TablesFile.open(path, (table,))
    reports: list[int] = []
    mapped = ModelVersion(tmp_path, version.manifest, version.plan, tables, {})
    resident = make_resident(mapped, lambda _, done, total, nbytes: reports.append(done))
    assert np.array_equal(resident.tables.rows("big"), blocks)
    assert reports == [rows - 5, rows]


def test_truncated_tables_file_is_rejected(version: ModelVersion) -> None:
    with open(version.tables.path, "r+b") as file:
        file.truncate(version.tables.data.nbytes - 1)
    with pytest.raises(StoreError, match=r"tables\.safetensors: ends within"):
        make_resident(version)


def test_missing_tables_file_is_named(version: ModelVersion) -> None:
    version.tables.path.unlink()
    with pytest.raises(StoreError, match=r"tables\.safetensors: cannot be read: No such file"):
        make_resident(version)


def test_insufficient_memory_error_has_needed_and_available_bytes(version: ModelVersion) -> None:
    needed = 2 * version.tables.data.nbytes
    check_room([version, version], needed)
    with pytest.raises(StoreError, match=f"{needed} bytes of tables .* {needed - 1} bytes of mem"):
        check_room([version, version], needed - 1)


def test_huge_pages_of_resident_tables_are_counted(version: ModelVersion) -> None:
    resident = make_resident(version)
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists() or "[never]" in enabled.read_text():
        assert huge_page_bytes([resident]) == 0
    else:
        assert huge_page_bytes([resident]) % HUGE_PAGE_BYTES == 0
    assert huge_page_bytes([version]) == 0  # the mapping of a file has none
