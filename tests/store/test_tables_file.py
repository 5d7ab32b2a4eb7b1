"""tables.safetensors: on pages, readable by the safetensors library, and never half believed."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from embedserve_store.errors import StoreError
from embedserve_store.load import ModelStore
from embedserve_store.safetensors_file import HEADER_BYTES_MAX, PAGE_BYTES
from embedserve_store.table_spec import DTYPES, TableSpec
from embedserve_store.tables_file import TablesFile, file_order, header_bytes, write_tables


def spec(name: str, rows: int, dim: int, dtype: str) -> TableSpec:
    return TableSpec(name, rows, dim, (name,), "sum", dtype)


TABLES = (
    spec("odd", 3, 4, "int4"),
    spec("half", 5, 8, "float16"),
    spec("wide", 32, 64, "float32"),
    spec("bytes", 7, 12, "int8"),
)


def content(table: TableSpec) -> np.ndarray:
    seed = sum(table.name.encode())
    shape = (table.num_embeddings, table.row_bytes)
    return np.random.default_rng(seed).integers(0, 120, shape).astype(np.uint8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tables.safetensors"
    write_tables(path, TABLES, lambda table: np.array_split(content(table), 2))
    return path


def test_rows_come_back_as_written(path: Path) -> None:
    tables = TablesFile.open(path, TABLES)
    for table in TABLES:
        np.testing.assert_array_equal(tables.rows(table.name), content(table))
        start = tables.offsets[table.name]
        assert tables.data[start : start + table.nbytes].tobytes() == content(table).tobytes()
    assert tables.data.size == sum(table.nbytes for table in TABLES)


def test_the_mapping_begins_on_a_page_and_is_read_only(path: Path) -> None:
    data = TablesFile.open(path, TABLES).data
    assert data.ctypes.data % PAGE_BYTES == 0
    assert not data.flags.writeable
    with pytest.raises(ValueError, match="WRITEABLE"):
        data.flags.writeable = True


def test_the_safetensors_library_reads_the_same(path: Path) -> None:
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


def test_checksums_and_progress_are_of_the_written_bytes(tmp_path: Path) -> None:
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


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 5000), st.integers(1, 64), st.sampled_from(DTYPES)), min_size=1
    )
)
def test_a_table_of_whole_cache_lines_starts_on_one(shapes: list[tuple[int, int, str]]) -> None:
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


@settings(deadline=None)
@given(st.data())
def test_no_changed_header_byte_goes_unseen(
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


def rewrite_header(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="none: cannot be read: No such file"):
        TablesFile.open(tmp_path / "none", TABLES)


@pytest.mark.parametrize("size", [0, 7, 8, 100, 4095])
def test_a_file_that_ends_in_its_header(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)
    with pytest.raises(StoreError, match="ends within its header"):
        TablesFile.open(path, TABLES)


@pytest.mark.parametrize(("change", "why"), [(-1, "truncated"), (1, "bytes after the last tensor")])
def test_a_file_of_the_wrong_size(path: Path, change: int, why: str) -> None:
    size = path.stat().st_size + change
    with path.open("r+b") as file:
        file.truncate(size)
    with pytest.raises(StoreError, match=f"{size} bytes, expected {size - change}: {why}"):
        TablesFile.open(path, TABLES)


def test_a_header_length_beyond_all_sense(path: Path) -> None:
    path.write_bytes((HEADER_BYTES_MAX + 1).to_bytes(8, "little") + path.read_bytes()[8:])
    with pytest.raises(StoreError, match=f"limit of {HEADER_BYTES_MAX}"):
        TablesFile.open(path, TABLES)


def test_a_header_that_is_not_an_object(path: Path) -> None:
    path.write_bytes((4088).to_bytes(8, "little") + b"[1]".ljust(4088))
    with pytest.raises(StoreError, match="header is not a JSON object"):
        TablesFile.open(path, TABLES)


def test_a_header_nested_without_end(path: Path) -> None:
    path.write_bytes((400_000).to_bytes(8, "little") + b"[" * 400_000)
    with pytest.raises(StoreError, match="header is not JSON"):
        TablesFile.open(path, TABLES)


def test_a_table_that_the_manifest_lacks(path: Path) -> None:
    with pytest.raises(StoreError, match="tensor 'bytes' is not one of the manifest's"):
        TablesFile.open(path, TABLES[:3])


def test_a_table_that_the_file_lacks(path: Path) -> None:
    with pytest.raises(StoreError, match="tensor 'new' of the manifest is not in the file"):
        TablesFile.open(path, (*TABLES, spec("new", 1, 4, "int8")))


def test_a_shape_other_than_the_manifests(path: Path) -> None:
    rewrite_header(path, b"[32,64]", b"[64,32]")
    with pytest.raises(StoreError, match=r"tensor 'wide' is .*\[64, 32\].*the manifest means"):
        TablesFile.open(path, TABLES)


def test_data_that_does_not_start_on_a_page(path: Path) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes((length + 8).to_bytes(8, "little") + data[8 : 8 + length] + b" " * 8)
    with pytest.raises(StoreError, match="data starts at byte 4104, expected a whole page"):
        TablesFile.open(path, TABLES)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def test_loading_eight_gigabytes_reads_none_of_them(
    tmp_path: Path, write_version: Callable[[Path, Sequence[TableSpec]], Path]
) -> None:
    table = spec("huge", 1 << 23, 256, "float32")
    folder = write_version(tmp_path, [table])
    with (folder / "tables.safetensors").open("wb") as file:
        header = header_bytes((table,))
        file.write(header)
        file.truncate(len(header) + table.nbytes)
    before, started = resident_bytes(), time.perf_counter()
    version = ModelStore(tmp_path).load("m")
    assert time.perf_counter() - started < 1
    assert resident_bytes() - before < 64 << 20
    assert version.tables.data.size == 8 << 30
    assert not version.tables.rows("huge")[-1].any()
