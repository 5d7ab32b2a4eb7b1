"""Tests of files of changed rows: encoded rows are read back, and rows that no table can have are
rejected."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store.example_tables import TABLES

from embedserve_store.errors import StoreError
from embedserve_store.format import delta_file
from embedserve_store.format.delta_file import ChangedRows, decode, encode, split
from embedserve_store.format.delta_manifest import DeltaFile
from embedserve_store.format.table_spec import TableSpec

BY_NAME = {table.name: table for table in TABLES}
NAME = "00000000000000000001.0123456789abcdef.0.0.safetensors"
WIDE = BY_NAME["wide"]


def changed_rows(table: TableSpec, numbers: list[int], seed: int = 0) -> ChangedRows:
    """Returns rows of finite values: small codes, and a zero scale and bias for quantized
    dtypes."""
    random = np.random.default_rng(seed)
    values = random.integers(0, 60, (len(numbers), table.row_bytes), np.uint8)
    return ChangedRows(table, np.array(numbers, np.int64), values)


def encoded(*changes: ChangedRows) -> tuple[DeltaFile, bytes]:
    return encode(list(changes), NAME)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_round_trip(data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(TABLES), unique_by=lambda one: one.name))
    changes = [
        changed_rows(
            table, sorted(data.draw(st.sets(st.integers(0, table.num_embeddings - 1), min_size=1)))
        )
        for table in chosen
    ]
    file, content = encoded(*changes)
    for before, after in zip(changes, decode(content, file, BY_NAME, "here"), strict=True):
        assert before.table == after.table
        np.testing.assert_array_equal(before.numbers, after.numbers)
        np.testing.assert_array_equal(before.values, after.values)


def test_large_push_is_split_into_several_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_file, "FILE_VALUES_BYTES", 4 * WIDE.row_bytes)
    changes = {
        "wide": changed_rows(WIDE, [*range(10)]),
        "odd": changed_rows(BY_NAME["odd"], [0, 2]),
    }
    parts = list(split(changes))
    assert [[len(one.numbers) for one in part] for part in parts] == [[4], [4], [2, 2]]
    joined = np.concatenate([one.numbers for part in parts for one in part[:1]])
    np.testing.assert_array_equal(joined, changes["wide"].numbers)
    assert list(split({})) == []


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([3, 32], r"rows\[1\] is 32, the table has 32 rows"),
        ([-1, 3], r"rows\[0\] is -1, the table has 32 rows"),
        ([3, 3], r"rows\[1\] is 3 after 3"),
        ([4, 3], r"rows\[1\] is 3 after 4: row numbers ascend"),
    ],
)
def test_invalid_row_numbers_are_rejected(numbers: list[int], message: str) -> None:
    file, content = encoded(changed_rows(WIDE, numbers))
    with pytest.raises(StoreError, match=rf"^here: table 'wide': {message}"):
        decode(content, file, BY_NAME, "here")


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_values_that_are_not_finite_are_rejected(table: TableSpec) -> None:
    change = changed_rows(table, [0, 2])
    number = np.array([np.nan], "<f4" if table.dtype == "float32" else "<f2").view(np.uint8)
    change.values[1, : len(number)] = number
    file, content = encoded(change)
    with pytest.raises(StoreError, match=rf"^here: table '{table.name}': row 2 holds a value"):
        decode(content, file, BY_NAME, "here")


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, 1 << 30), byte=st.integers(1, 255))
def test_any_changed_byte_is_detected(at: int, byte: int) -> None:
    file, content = encoded(changed_rows(WIDE, [1, 5]), changed_rows(BY_NAME["half"], [4]))
    damaged = bytearray(content)
    damaged[at % len(content)] ^= byte
    with pytest.raises(StoreError, match=r"^here: sha256 is"):
        decode(bytes(damaged), file, BY_NAME, "here")


def test_tensors_that_differ_from_the_manifest_are_rejected() -> None:
    file, content = encoded(changed_rows(WIDE, [1, 5]))
    with pytest.raises(StoreError, match=rf"^here: {len(content) - 1} bytes, the manifest has"):
        decode(content[:-1], file, BY_NAME, "here")
    for rows in ({"wide": 1}, {"wide": 3}, {"half": 2}, {}):
        with pytest.raises(StoreError, match=r"^here: its tensors differ from"):
            decode(content, replace(file, rows=rows), BY_NAME, "here")
