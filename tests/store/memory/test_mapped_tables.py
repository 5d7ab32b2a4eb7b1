"""Tests of mapped tables: their pages are loaded into memory and released."""

import mmap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mapped import map_tables, mapped_kb
from server.python import run_warm_python

from embedserve_store.format.tables_file import TablesFile
from embedserve_store.memory.mapped_tables import (
    PIECE_BYTES,
    drop_pages,
    drop_version_pages,
    populate,
)

SIZE = 2 * PIECE_BYTES + 100 * mmap.PAGESIZE


def version_of(tables: TablesFile) -> Any:
    return SimpleNamespace(tables=tables)


@pytest.mark.parametrize("start", [0, 16], ids=["by the kernel", "as before Linux 5.14"])
def test_populate_maps_all_pages(tmp_path: Path, start: int) -> None:
    """The kernel rejects a start within a page, as kernels before Linux 5.14 reject every call."""
    tables = map_tables(tmp_path / "rows", SIZE, start)
    assert mapped_kb(tmp_path / "rows") == 0
    populate(version_of(tables), 2 * SIZE)
    assert mapped_kb(tmp_path / "rows") >= SIZE // 1024


@pytest.mark.parametrize("start", [0, 16], ids=["by the kernel", "as before Linux 5.14"])
def test_truncated_file_raises_store_error_instead_of_sigbus(tmp_path: Path, start: int) -> None:
    """Runs in another process, because a read beyond the end of the file would kill it."""
    code = f"""
import os
from types import SimpleNamespace
from mapped import map_tables
from pathlib import Path
from embedserve_store.errors import StoreError
from embedserve_store.memory.mapped_tables import populate

tables = map_tables(Path({str(tmp_path / "rows")!r}), {SIZE}, {start})
os.truncate(tables.path, {SIZE // 2})
try:
    populate(SimpleNamespace(tables=tables), {2 * SIZE})
except StoreError as error:
    print(error)
"""
    done = run_warm_python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    assert "changed in place since it was opened" in done.stdout


def test_tables_that_do_not_fit_in_memory_are_not_populated(tmp_path: Path) -> None:
    tables = map_tables(tmp_path / "rows", SIZE)
    populate(version_of(tables), 2 * SIZE - 1)
    assert mapped_kb(tmp_path / "rows") == 0


def test_dropped_pages_can_still_be_read(tmp_path: Path) -> None:
    tables = map_tables(tmp_path / "rows", SIZE)
    populate(version_of(tables), 2 * SIZE)
    drop_version_pages(version_of(tables))
    assert mapped_kb(tmp_path / "rows") == 0
    assert not tables.data.any()


def test_drop_pages_releases_only_pages_without_other_rows(tmp_path: Path) -> None:
    tables = map_tables(tmp_path / "rows", SIZE)
    populate(version_of(tables), 2 * SIZE)
    rows = tables.data[100 : 100 + PIECE_BYTES].reshape(-1, 64)
    before_kb = mapped_kb(tmp_path / "rows")
    drop_pages(rows)
    released_kb = before_kb - mapped_kb(tmp_path / "rows")
    assert 0 <= PIECE_BYTES // 1024 - released_kb <= 2 * mmap.PAGESIZE // 1024
    drop_pages(tables.data[100:200])
    assert not tables.data.any()


def test_drop_version_pages_keeps_tables_copied_to_memory(tmp_path: Path) -> None:
    """If its pages were released, it would become zeros."""
    memory = mmap.mmap(-1, SIZE)
    memory[:1] = b"1"
    data = np.frombuffer(memory, np.uint8)
    tables = replace(map_tables(tmp_path / "rows", SIZE), data=data, opened=None)
    drop_version_pages(version_of(tables))
    assert data[0] == ord("1")


def test_empty_tables_can_be_populated_and_dropped(tmp_path: Path) -> None:
    tables = replace(map_tables(tmp_path / "rows", SIZE), data=np.empty(0, np.uint8))
    populate(version_of(tables), 1 << 30)
    drop_version_pages(version_of(tables))
