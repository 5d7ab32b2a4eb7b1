"""Tests of the memory of a part: only its own rows are populated, released and made resident."""

import mmap
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pooled import collection
from torchrec import PoolingType

from embedserve_store import ModelStore, ModelVersion, StoreError, publish
from embedserve_store.memory import mapped_tables
from embedserve_store.memory.mapped_tables import drop_version_pages, populate
from embedserve_store.memory.resident_tables import check_room, make_resident
from embedserve_store.parts.part import NO_ROWS, Part

ROWS = {"a": 40_000, "b": 10_000}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("large")
    torch.manual_seed(0)
    tables = [(name, rows, 64, [name], PoolingType.SUM) for name, rows in ROWS.items()]
    publish(collection(tables), store, model="m", hosts=4)
    return store


def part(store: Path) -> ModelVersion:
    return ModelStore(store, selection=Part(1, 4)).load("m")


def test_only_pages_of_the_part_are_populated_and_dropped(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = part(store)
    first = version.tables.data.ctypes.data
    advised: list[tuple[int, int]] = []

    def advise(piece: NDArray[np.uint8], advice: int) -> int:
        start = piece.ctypes.data - first
        assert not start % mmap.PAGESIZE
        advised.append((start, start + piece.nbytes))
        return 0

    monkeypatch.setattr(mapped_tables, "_madvise", advise)
    monkeypatch.setattr(mapped_tables, "PIECE_BYTES", 1 << 20)
    populate(version, 2 * version.tables.nbytes - 1)
    assert advised == []
    for is_populated in (True, False):
        advised.clear()
        if is_populated:
            populate(version, 2 * version.tables.nbytes)
        else:
            drop_version_pages(version)
        for start, stop in version.tables.spans:
            own = [piece for piece in advised if start - mmap.PAGESIZE < piece[0] < stop]
            assert own[0][0] <= start
            assert own[-1][1] == stop
            assert all(one[1] == other[0] for one, other in pairwise(own))
        assert sum(stop - start for start, stop in advised) < version.tables.nbytes + 8192


def test_only_the_rows_of_the_part_are_made_resident(store: Path) -> None:
    version = part(store)
    reports: list[tuple[str, int, int, int]] = []
    resident = make_resident(version, lambda *report: reports.append(report))
    assert resident.tables.data.nbytes == version.tables.nbytes
    assert reports[-1][3] == version.tables.nbytes
    assert not resident.tables.is_mapped
    for name in ("a", "b"):
        np.testing.assert_array_equal(resident.tables.rows(name), version.tables.rows(name))
    assert sorted(resident.tables.spans) == [(0, version.tables.nbytes)]


def test_check_room_counts_only_the_rows_of_the_part(store: Path) -> None:
    version = part(store)
    check_room([version], version.tables.nbytes)
    with pytest.raises(StoreError, match="cannot be resident"):
        check_room([version], version.tables.nbytes - 1)
    check_room([ModelStore(store, selection=NO_ROWS).load("m")], 0)
