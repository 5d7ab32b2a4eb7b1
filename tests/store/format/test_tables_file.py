"""Tests of tables.safetensors: page-aligned, readable by the safetensors library, and rejected if
it is damaged."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from resident_memory import resident_bytes
from store.example_tables import TABLES, content, spec

from embedserve_store.errors import StoreError
from embedserve_store.format.safetensors_file import PAGE_BYTES
from embedserve_store.format.table_spec import DTYPES, TableSpec
from embedserve_store.format.tables_file import TablesFile, file_order, header_bytes
from embedserve_store.local_store import LocalStore
from embedserve_store.publishing.tables_writer import write_tables


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tables.safetensors"
    write_tables(path, TABLES, lambda table: np.array_split(content(table), 2))
    return path


def test_mapping_is_page_aligned_and_read_only(path: Path) -> None:
    data = TablesFile.open(path, TABLES).data
    assert data.ctypes.data % PAGE_BYTES == 0
    assert not data.flags.writeable
    with pytest.raises(ValueError, match="WRITEABLE"):
        data.flags.writeable = True


@given(
    st.lists(
        st.tuples(st.integers(1, 5000), st.integers(1, 64), st.sampled_from(DTYPES)), min_size=1
    )
)
def test_table_of_whole_cache_lines_starts_on_a_cache_line(
    shapes: list[tuple[int, int, str]],
) -> None:
    tables = tuple(
        spec(f"t{i}", rows, 4 * dim, dtype) for i, (rows, dim, dtype) in enumerate(shapes)
    )
    offset = 0
    for table in file_order(tables):
        for unit in (2, 4, 64, 4096):
            assert table.nbytes % unit or offset % unit == 0
        offset += table.nbytes
    header = header_bytes(tables)
    assert len(header) % PAGE_BYTES == 0
    assert json.loads(header[8:]).keys() == {table.name for table in tables}


@given(st.data())
def test_any_changed_header_byte_is_detected(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    header = bytearray(header_bytes(TABLES))
    position = data.draw(st.integers(0, len(header.rstrip()) - 1))
    header[position] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("damage") / "tables.safetensors"
    body = b"".join(content(table).tobytes() for table in file_order(TABLES))
    path.write_bytes(bytes(header) + body)
    with pytest.raises(StoreError, match=r"tables\.safetensors: "):
        TablesFile.open(path, TABLES)


def test_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="none: cannot be read: No such file"):
        TablesFile.open(tmp_path / "none", TABLES)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (TABLES[:3], "tensor 'bytes' is not one of the manifest's"),
        ((*TABLES, spec("new", 1, 4, "int8")), "tensor 'new' of the manifest is not in the file"),
        (
            (*TABLES[:2], spec("wide", 64, 32, "float32"), TABLES[3]),
            r"tensor 'wide' is .*\[32, 64\].*the manifest means .*\[64, 32\]",
        ),
    ],
)
def test_tables_that_differ_from_the_manifest_are_rejected(
    path: Path, tables: tuple[TableSpec, ...], message: str
) -> None:
    with pytest.raises(StoreError, match=message):
        TablesFile.open(path, tables)


def test_loading_eight_gigabytes_maps_without_reading(
    tmp_path: Path, write_version: Callable[[Path, Sequence[TableSpec]], Path]
) -> None:
    table = spec("huge", 1 << 23, 256, "float32")
    folder = write_version(tmp_path, [table])
    with (folder / "tables.safetensors").open("wb") as file:
        header = header_bytes((table,))
        file.write(header)
        file.truncate(len(header) + table.nbytes)
    before = resident_bytes()
    version = LocalStore(tmp_path).load("m")
    assert resident_bytes() - before < 64 << 20
    assert version.tables.data.size == 8 << 30
    assert not version.tables.rows("huge")[-1].any()
