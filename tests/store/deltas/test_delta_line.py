"""Tests of DeltaLine: deltas are read in order, and the error names a missing, damaged or foreign
delta."""

import hashlib
import json
import shutil
import tracemalloc
import weakref
from collections.abc import Callable
from dataclasses import replace
from io import DEFAULT_BUFFER_SIZE
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store.deltas.conftest import line_of, rows

from embedserve_store import DeltaWriter, StoreError
from embedserve_store.deltas import delta_line, row_numbers
from embedserve_store.format import delta_file
from embedserve_store.format.delta_manifest import DELTA_SEQ_MAX, manifest_name
from embedserve_store.format.manifest_checksum import sealed_json


@pytest.fixture
def folder(store: Path, writer: DeltaWriter) -> Path:
    """Returns the folder of a line with three deltas."""
    for seq in (1, 2, 3):
        writer.push_rows({"tag": ([seq, 9], rows("tag", 2, seq))}, step=seq)
    return store / "m/deltas/1"


def read_all(folder: Path) -> list[int]:
    """Reads every byte of the line; returns the seqs."""
    line = line_of(folder.parents[2])
    seqs = []
    for delta, position in line.deltas():
        for _ in line.rows(delta):
            pass
        assert position.seq == delta.seq
        seqs.append(delta.seq)
    return seqs


def rows_file(folder: Path, seq: int) -> Path:
    (path,) = folder.glob(f"{seq:020d}.*.safetensors")
    return path


def edit_manifest(path: Path, change: Callable[[Any], None]) -> None:
    data = json.loads(path.read_bytes())
    change(data)
    path.unlink()
    path.write_bytes(sealed_json(data))


def test_deltas_are_read_in_order(folder: Path) -> None:
    assert line_of(folder.parents[2]).seqs() == [1, 2, 3]
    assert read_all(folder) == [1, 2, 3]
    line = line_of(folder.parents[2])
    assert [delta.step for delta, _ in line.deltas(last=2)] == [1, 2]


def test_unrelated_files_are_ignored(folder: Path) -> None:
    (folder / ".new-0123").write_bytes(b"half")
    shutil.copy(rows_file(folder, 1), folder / rows_file(folder, 1).name.replace("1.", "4.", 1))
    shutil.copytree(folder, folder.parent / "2")
    assert read_all(folder) == [1, 2, 3]


def test_missing_delta_in_the_middle_is_an_error(folder: Path) -> None:
    (folder / manifest_name(2)).unlink()
    with pytest.raises(StoreError, match=r"delta 2 of line 1 does not exist; .* it has 1 to 3"):
        read_all(folder)


def test_delta_past_the_end_is_an_error(folder: Path) -> None:
    with pytest.raises(StoreError, match="delta 4 of line 1 does not exist"):
        [*line_of(folder.parents[2]).deltas(last=4)]


def test_fork_of_the_line_is_detected(folder: Path) -> None:
    """A replaced delta has the same seq but another hash, which the next delta does not
    continue."""
    edit_manifest(folder / manifest_name(2), lambda data: data.update(step=7))
    with pytest.raises(StoreError, match=r"0003\.json: does not continue delta 2: previous is"):
        read_all(folder)


def test_delta_of_another_base_version_is_detected(folder: Path) -> None:
    """The first delta has the hash of the version at which its line begins."""
    edit_manifest(folder / manifest_name(1), lambda data: data.update(previous="0" * 64))
    with pytest.raises(StoreError, match=r"0001\.json: does not continue version 1"):
        read_all(folder)


@pytest.mark.parametrize("at", [0, 9, 5000, -1])
def test_damaged_file_is_named_in_the_error(folder: Path, at: int) -> None:
    path = rows_file(folder, 2)
    data = bytearray(path.read_bytes())
    data[min(at, len(data) - 1)] ^= 1
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(StoreError, match=rf"{path.name}: sha256 is"):
        read_all(folder)


def test_missing_or_truncated_file_is_named_in_the_error(folder: Path) -> None:
    path = rows_file(folder, 3)
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-1])
    with pytest.raises(StoreError, match=rf"{path.name}: {len(data) - 1} bytes, the manifest has"):
        read_all(folder)
    path.unlink()
    with pytest.raises(StoreError, match=rf"{path.name}: cannot be read: No such file"):
        read_all(folder)


def test_row_in_two_files_of_a_delta_is_rejected(folder: Path) -> None:
    """The rows of a delta have no order, so a row that occurs twice has no defined value."""
    path = folder / manifest_name(3)
    first = json.loads(path.read_bytes())["files"][0]
    again = folder / first["name"].replace(".0.0.", ".1.0.")
    shutil.copy(rows_file(folder, 3), again)

    def repeat_first_file(data: Any) -> None:
        digest = hashlib.sha256(again.read_bytes()).hexdigest()
        data["files"].append(first | {"name": again.name, "sha256": digest})

    edit_manifest(path, repeat_first_file)
    with pytest.raises(StoreError, match=f"{path.name}: table 'tag': row 3 is in two of its files"):
        read_all(folder)


def test_repeated_rows_are_searched_once_per_table(
    store: Path, writer: DeltaWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_file, "FILE_VALUES_BYTES", 1)  # a file for each row
    writer.push_rows({"tag": (range(9), rows("tag", 9)), "user": ([1, 4], rows("user", 2))})
    searched: list[int] = []

    def counted(*numbers: np.ndarray) -> int | None:
        searched.append(len(numbers))
        return delta_file.repeated_row(*numbers)

    monkeypatch.setattr(delta_line, "repeated_row", counted)
    line = line_of(store)
    assert sum(len(changes) for changes in line.rows(line.manifest(1)[0])) == 11
    assert sorted(searched) == [2, 9]


def test_row_numbers_of_a_delta_match_the_push(folder: Path) -> None:
    line = line_of(folder.parents[2])
    delta, _ = line.manifest(2)
    ((tag,),) = line.rows(delta)
    np.testing.assert_array_equal(tag.numbers, [2, 9])


def test_rows_between_holds_only_row_numbers_in_memory(store: Path, writer: DeltaWriter) -> None:
    """The memory does not grow with the bytes of the files."""
    numbers, values = np.arange(300), rows("user", 300)
    for _ in range(20):
        writer.push_rows({"user": (numbers, values)})
    line = line_of(store)
    line.rows_between(0, 1)
    tracemalloc.start()
    try:
        found = line.rows_between(0, 20)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(found["user"], numbers)
    # All files together have more than 20 * values.nbytes. One is read at a time.
    assert most < 8 * values.nbytes + DEFAULT_BUFFER_SIZE


def test_rows_of_a_delta_are_held_in_memory_one_file_at_a_time(
    store: Path, writer: DeltaWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_file, "FILE_VALUES_BYTES", 1024)
    writer.push_rows({"user": (np.arange(300), rows("user", 300))})
    line = line_of(store)
    delta, _ = line.manifest(1)
    assert len(delta.files) > 10
    files = []
    for (user,) in line.rows(delta):
        files.append(weakref.ref(user.numbers.base))
        del user
        assert len([one for one in files if one() is not None]) <= 1


def test_collected_row_numbers_are_unique_and_ascending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_numbers, "MERGE_MIN", 4)
    collected = row_numbers.RowNumbers()
    assert collected.ascending().tolist() == []
    for numbers in ([5, 9], [1, 5, 7], [2], [9, 10], []):
        collected.add(np.array(numbers, np.int64))
    assert collected.ascending().tolist() == [1, 2, 5, 7, 9, 10]


def test_manifest_with_too_large_a_seq_is_ignored(folder: Path) -> None:
    (folder / manifest_name(DELTA_SEQ_MAX + 1)).write_bytes(b"{}")
    assert line_of(folder.parents[2]).seqs() == [1, 2, 3]


def test_next_delta_is_read_by_name_without_listing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that follows a line requests one manifest and never lists the folder."""
    line = line_of(folder.parents[2])
    monkeypatch.setattr(line, "seqs", None)
    found = line.after(line.start)
    seqs = []
    while found is not None:
        seqs.append(found[0].seq)
        found = line.after(found[1])
    assert seqs == [1, 2, 3]


def test_next_delta_is_none_at_the_end_of_the_line(store: Path, writer: DeltaWriter) -> None:
    line = line_of(store)
    assert line.after(line.start) is None
    writer.push_rows({})
    assert line.after(line.start) is not None


def test_next_delta_must_continue_the_previous_delta(folder: Path) -> None:
    line = line_of(folder.parents[2])
    with pytest.raises(StoreError, match=r"0002\.json: does not continue delta 1: previous is"):
        line.after(replace(line.start, seq=1))
