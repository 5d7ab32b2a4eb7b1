"""Tests of id maps: they are built, written to one file, mapped without being read, and rejected if
damaged."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from resident_memory import resident_bytes
from safetensors.numpy import load_file

from embedserve_store.errors import InvalidModelError, StoreError
from embedserve_store.format.id_rule import IdRule
from embedserve_store.format.safetensors_file import PAGE_BYTES, encode_header
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.ids.id_map import (
    IdMap,
    check_id_maps,
    ids_file_bytes,
    open_id_maps,
    tensors_of,
    write_id_maps,
)

ENTRIES = {"movie": 500, "empty": 0, "user": 33}


def spec(name: str, rule: IdRule) -> TableSpec:
    return TableSpec(name, 10_000, 4, (name,), "sum", "float32", ids=rule)


@pytest.fixture
def maps() -> dict[str, IdMap]:
    random = np.random.default_rng(3)
    return {
        name: IdMap.build(
            random.choice(10**9, count, replace=False) - 10**8,
            random.integers(0, 10_000, count),
            name,
        )
        for name, count in ENTRIES.items()
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ids.safetensors"


@pytest.fixture
def tables(maps: dict[str, IdMap], path: Path) -> tuple[TableSpec, ...]:
    """Returns the tables of the file at ``path``, and one table without a map among them."""
    checksums = write_id_maps(path, maps)
    with_maps = [
        spec(name, IdRule("map", entries=len(one), sha256=checksums[name]))
        for name, one in maps.items()
    ]
    return (with_maps[0], spec("plain", IdRule()), *with_maps[1:])


def test_id_maps_round_trip_through_a_file(
    maps: dict[str, IdMap], path: Path, tables: tuple[TableSpec, ...]
) -> None:
    opened = open_id_maps(path, tables)
    assert list(opened) == list(ENTRIES)
    assert len(opened) == 3
    for name, built in maps.items():
        assert opened[name] == built
        assert opened[name].nbytes == built.nbytes
        assert opened[name].rows_of(built.ids).tolist() == built.rows.tolist()
        assert (opened[name].rows_of(built.ids + 10**12) == -1).all()
    assert (opened["user"].rows_of(maps["movie"].ids) == -1).all()
    check_id_maps(opened, tables, path)


def test_ids_file_is_page_aligned_safetensors_mapped_read_only(
    maps: dict[str, IdMap], path: Path, tables: tuple[TableSpec, ...]
) -> None:
    tensors = load_file(path)
    for name, built in maps.items():
        for part, values in built.parts().items():
            np.testing.assert_array_equal(tensors[f"{name}.{part}"], values)
    opened = open_id_maps(path, tables)
    index = opened["user"].index
    assert index.ids.ctypes.data % PAGE_BYTES == 0
    assert not index.ids.flags.writeable
    assert all(one.index is index for one in opened.values())


def test_id_maps_with_equal_entries_are_equal() -> None:
    ids, rows = np.array([5, 6, -7]), np.array([0, 2, 2])
    one = IdMap.build(ids, rows, "t")
    assert one == IdMap.build(ids[::-1], rows[::-1], "other")
    assert one != IdMap.build(ids, rows[::-1], "t")
    assert one != IdMap.build(ids[:2], rows[:2], "t")
    assert one != "a map"


def test_duplicate_id_is_rejected_with_the_table_name_and_both_rows() -> None:
    message = r"^table 'movie': id -9 is there twice, for rows 1 and 5"
    with pytest.raises(InvalidModelError, match=message):
        IdMap.build(np.array([3, -9, 4, -9]), np.array([0, 1, 2, 5]), "movie")


def test_sample_returns_reproducible_existing_entries(maps: dict[str, IdMap]) -> None:
    ids, rows = maps["movie"].sample(np.random.default_rng(0), 5000)
    assert ids.dtype == rows.dtype == np.int64
    assert ids.shape == rows.shape == (5000,)
    assert maps["movie"].rows_of(ids).tolist() == rows.tolist()
    assert len(set(ids.tolist())) > 490
    again, _ = maps["movie"].sample(np.random.default_rng(0), 5000)
    assert again.tolist() == ids.tolist()
    assert maps["empty"].sample(np.random.default_rng(0), 0)[0].tolist() == []


def test_verify_detects_a_flipped_bit_in_any_tensor(
    path: Path, tables: tuple[TableSpec, ...]
) -> None:
    data = path.read_bytes()
    header_bytes = int.from_bytes(data[:8], "little") + 8
    header = json.loads(data[8:header_bytes])
    for tensor, entry in header.items():
        for at in (entry["data_offsets"][0], entry["data_offsets"][1] - 1):
            changed = bytearray(data)
            changed[header_bytes + at] ^= 0x10
            path.write_bytes(changed)
            name = tensor.rpartition(".")[0]
            with pytest.raises(StoreError, match=f"ids.safetensors: table '{name}': sha256 is"):
                check_id_maps(open_id_maps(path, tables), tables, path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "cannot be read: No such file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-4]), "truncated or half-written"),
        (lambda path: path.write_bytes(path.read_bytes() + b"more"), "bytes after the last tensor"),
        (lambda path: path.write_bytes(path.read_bytes()[:100]), "ends within its header"),
        (lambda path: path.write_bytes(b"\xff" * 5000), "not a safetensors file"),
        (lambda path: path.write_bytes((3).to_bytes(8, "little") + b"[1]"), "not a JSON object"),
        (lambda path: path.write_bytes((3).to_bytes(8, "little") + b"{1]"), "not JSON"),
        (
            lambda path: path.write_bytes((2).to_bytes(8, "little") + b"{}"),
            "tensor 'movie.ids' of the manifest is not in the file",
        ),
    ],
)
def test_damaged_ids_file_is_rejected(
    path: Path, tables: tuple[TableSpec, ...], damage: Callable[[Path], None], message: str
) -> None:
    damage(path)
    with pytest.raises(StoreError, match=f"ids.safetensors: .*{message}"):
        open_id_maps(path, tables)


def test_ids_file_that_differs_from_the_manifest_is_rejected(
    path: Path, tables: tuple[TableSpec, ...]
) -> None:
    fewer = (replace(tables[0], ids=replace(tables[0].ids, entries=499)), *tables[1:])
    with pytest.raises(
        StoreError, match=r"'movie\.ids' is .*\[504\].* the manifest means .*\[503\]"
    ):
        open_id_maps(path, fewer)
    with pytest.raises(StoreError, match=r"'movie\.ids' is not one of the manifest's"):
        open_id_maps(path, tables[1:])
    with pytest.raises(StoreError, match=r"'new\.ids' of the manifest is not in the file"):
        open_id_maps(path, (*tables, spec("new", IdRule("map", entries=1))))


def test_existing_ids_file_is_not_overwritten(maps: dict[str, IdMap], path: Path) -> None:
    path.write_bytes(b"there")
    with pytest.raises(FileExistsError):
        write_id_maps(path, maps)
    assert path.read_bytes() == b"there"


def test_opening_id_maps_does_not_read_the_entries(path: Path) -> None:
    # The file has 16 GiB that were never written. They take memory and disk only if they are read
    # or copied.
    tables = (spec("huge", IdRule("map", entries=2**30)),)
    tensors = tensors_of({"huge": 2**30})
    header = encode_header(tensors)
    path.write_bytes(header)
    os.truncate(path, len(header) + tensors["huge.starts"]["data_offsets"][1])
    before = resident_bytes()
    huge = open_id_maps(path, tables)["huge"]
    assert len(huge) == 2**30
    assert huge.rows_of(np.array([5, -1])).tolist() == [-1, -1]
    assert resident_bytes() - before < 16 << 20


def test_ids_file_bytes_equals_the_written_file_size(tmp_path: Path) -> None:
    path = tmp_path / "ids.safetensors"
    entries = {"user": 1000, "item": 77}
    write_id_maps(
        path, {name: IdMap.build(np.arange(n), np.arange(n), name) for name, n in entries.items()}
    )
    assert ids_file_bytes(entries) == path.stat().st_size
    assert ids_file_bytes({}) == 0
