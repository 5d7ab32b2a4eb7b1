"""Tests of pruning: it removes the deltas that every stored version contains, and no others."""

import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from errno import EACCES
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from store.deltas import conftest
from store.deltas.conftest import failing_writes, line_of

from embedserve_store import (
    DeltaWriter,
    ModelStore,
    StoreError,
    compact_deltas,
    prune,
    prune_deltas,
    publish,
    undo_deltas,
)
from embedserve_store.deltas import append as append_module
from embedserve_store.deltas import delta_writer
from embedserve_store.deltas import prune as prune_module
from embedserve_store.deltas.delta_line import stored_seqs
from embedserve_store.deltas.prune import PrunedDeltas
from embedserve_store.errors import UnreachableError
from embedserve_store.format.delta_manifest import delta_file_name, manifest_name


def push(writer: DeltaWriter, count: int) -> None:
    for _ in range(count):
        conftest.push(writer)


def push_unneeded(store: Path, writer: DeltaWriter, count: int) -> None:
    """Pushes ``count`` deltas, which the only version then has in its rows."""
    push(writer, count)
    compact_deltas(store, "m")
    prune(store, "m", keep=1)


def seqs(store: Path, line: int = 1) -> list[int]:
    """Returns the seqs of a line that have a file."""
    return sorted({int(path.name[:20]) for path in (store / f"m/deltas/{line}").glob("0*")})


def test_deltas_needed_by_a_version_are_kept(store: Path, writer: DeltaWriter) -> None:
    push(writer, 5)
    for path in (store / "m/deltas/1").iterdir():
        os.utime(path, (0, 0))  # older than what killed writers left
    compact_deltas(store, "m", seq=3)
    assert prune_deltas(store, "m", keep_s=0) == []  # version 1 needs them
    prune(store, "m", keep=1)
    assert prune_deltas(store, "m", keep_s=0, is_trial=True) == [PrunedDeltas(1, 1, 3, 3)]
    assert seqs(store) == [1, 2, 3, 4, 5]
    assert prune_deltas(store, "m", keep_s=0) == [PrunedDeltas(1, 1, 3, 3)]
    assert seqs(store) == [4, 5]
    assert prune_deltas(store, "m", keep_s=0) == []
    (event,) = [one for one in ModelStore(store).history("m") if "deltas" in one.detail]
    assert (event.what, event.detail) == ("prune", "deltas 1 to 3 of line 1")
    assert [delta.seq for delta, _ in line_of(store, version=2).deltas()] == [4, 5]
    push(writer, 1)  # a writer continues
    undo_deltas(store, "m", to=3, why="")
    with DeltaWriter(store, model="m") as other:
        assert other.seq == 7


def test_writer_continues_after_all_deltas_were_pruned(store: Path, writer: DeltaWriter) -> None:
    push_unneeded(store, writer, 2)
    prune_deltas(store, "m", keep_s=0)
    assert not (store / "m/deltas/1").exists()
    push(writer, 1)
    with DeltaWriter(store, model="m") as other:
        assert other.seq == 3


def test_files_of_a_failed_push_are_pruned_with_their_seq(store: Path, writer: DeltaWriter) -> None:
    with failing_writes(writer, ".json"), pytest.raises(StoreError, match="away"):
        push(writer, 1)
    push(writer, 2)
    compact_deltas(store, "m", seq=1)
    prune(store, "m", keep=1)
    assert len([*(store / "m/deltas/1").glob(f"{1:020d}*")]) == 3
    prune_deltas(store, "m", keep_s=0)
    assert seqs(store) == [2]


def write_leftover_file(store: Path, seq: int, hours: float, line: int = 1) -> Path:
    """Writes a file without a manifest, as a killed writer leaves behind."""
    path = store / f"m/deltas/{line}" / delta_file_name(seq, "0123456789abcdef", 0, 0)
    path.write_bytes(b"rows")
    written_s = time.time() - 3600 * hours
    os.utime(path, (written_s, written_s))
    return path


def test_old_files_without_a_manifest_are_removed(store: Path, writer: DeltaWriter) -> None:
    push(writer, 4)
    compact_deltas(store, "m", seq=2)
    prune(store, "m", keep=1)
    for seq in (2, 4):
        (store / "m/deltas/1" / manifest_name(seq)).unlink()
    young, old = write_leftover_file(store, 5, hours=20), write_leftover_file(store, 6, hours=30)
    assert prune_deltas(store, "m", is_trial=True) == []
    assert old.exists()
    assert prune_deltas(store, "m") == []  # no delta is old enough
    assert (young.exists(), old.exists()) == (True, False)
    assert seqs(store) == [1, 2, 3, 4, 5]  # the files of 2 and 4 are as young as their deltas
    push_in_flight = write_leftover_file(store, 5, hours=0.9)
    prune_deltas(store, "m", keep_s=0)
    assert push_in_flight.exists()
    assert seqs(store) == [3, 4, 5]


def test_leftover_files_of_a_line_without_a_version_are_removed(
    store: Path, writer: DeltaWriter, make_ebc: Callable[..., Any]
) -> None:
    push(writer, 1)
    publish(make_ebc(), store, model="m")
    prune(store, "m", keep=1)
    (store / "m/deltas/1" / manifest_name(1)).unlink()  # as a killed prune leaves it
    for path in (store / "m/deltas/1").iterdir():
        os.utime(path, (0, 0))
    prune_deltas(store, "m", keep_s=0)
    assert not (store / "m/deltas/1").exists()


def test_pruning_holds_a_bounded_number_of_file_names(
    store: Path, writer: DeltaWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line is listed again after each NAMES_MAX names, and files are still removed in order."""
    push(writer, 7)
    compact_deltas(store, "m", seq=6)
    prune(store, "m", keep=1)
    removed: list[str] = []
    unlink = Path.unlink

    def record(path: Path, missing_ok: bool = False) -> None:
        removed.append(path.name)
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(prune_module, "NAMES_MAX", 3)
    monkeypatch.setattr(Path, "unlink", record)
    monkeypatch.setattr(ModelStore, "files_beside", None)  # must not run: it returns all names
    assert prune_deltas(store, "m", keep_s=0) == [PrunedDeltas(1, 1, 6, 6)]
    removed = [name for name in removed if name.startswith("0")]
    assert [int(name[:20]) for name in removed] == [seq for seq in range(1, 7) for _ in range(2)]
    assert [name.endswith(".json") for name in removed] == [True, False] * 6
    assert seqs(store) == [7]


def test_deltas_younger_than_keep_s_are_kept(
    store: Path, writer: DeltaWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    for hours in (50, 30, 20, 10, 1):
        old = datetime.now(UTC) - timedelta(hours=hours)
        monkeypatch.setattr(delta_writer, "as_of_now", lambda old=old: old.isoformat())
        push(writer, 1)
    monkeypatch.setattr(delta_writer, "as_of_now", append_module.as_of_now)
    compact_deltas(store, "m")
    prune(store, "m", keep=1)
    assert [(one.first, one.last) for one in prune_deltas(store, "m", is_trial=True)] == [(1, 2)]
    assert [one.last for one in prune_deltas(store, "m", keep_s=15 * 3600)] == [3]
    with pytest.raises(ValueError, match="keep_s is -1"):
        prune_deltas(store, "m", keep_s=-1)


def test_line_without_a_version_is_removed(
    store: Path, writer: DeltaWriter, make_ebc: Callable[..., Any]
) -> None:
    push(writer, 2)
    publish(make_ebc(), store, model="m")
    with DeltaWriter(store, model="m") as other:
        push(other, 1)
    prune(store, "m", keep=1)
    assert prune_deltas(store, "m", keep_s=0) == [PrunedDeltas(1, 1, 2, 2)]
    assert seqs(store, 2) == [1]


def test_unrelated_files_are_not_pruned(store: Path, writer: DeltaWriter) -> None:
    push(writer, 1)
    other = store / "m/deltas/1/readme.txt"
    other.write_text("mine")
    (store / "m/deltas/notes").mkdir()
    (store / "m/deltas/notes/a.json").write_text("{}")
    compact_deltas(store, "m")
    prune(store, "m", keep=1)
    prune_deltas(store, "m", keep_s=0)
    assert other.read_text() == "mine"
    assert (store / "m/deltas/notes/a.json").exists()


@pytest.mark.parametrize("unlinked", [2, 3, 5])
def test_interrupted_prune_is_recorded_and_can_be_repeated(
    store: Path, writer: DeltaWriter, monkeypatch: pytest.MonkeyPatch, unlinked: int
) -> None:
    """Deltas are removed in order, each manifest before its rows, so the remaining deltas are whole
    and consecutive."""
    push_unneeded(store, writer, 3)
    unlink, left = Path.unlink, unlinked

    def unlink_some(path: Path, missing_ok: bool = False) -> None:
        nonlocal left
        left -= 1
        if left == -1:
            raise KeyboardInterrupt
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink_some)
        with pytest.raises(KeyboardInterrupt):
            prune_deltas(store, "m", keep_s=0)
    manifests = sorted(path.name for path in (store / "m/deltas/1").glob("*.json"))
    assert [int(name[:20]) for name in manifests] == [*range(1, 4)][(unlinked + 1) // 2 :]
    assert set(seqs(store)) <= {*range(1 + unlinked // 2, 4)}
    removed = (unlinked + 1) // 2
    details = [one.detail for one in ModelStore(store).history("m") if "deltas" in one.detail]
    assert details == [f"deltas 1 to {removed} of line 1"]
    prune_deltas(store, "m", keep_s=0)
    assert not (store / "m/deltas/1").exists()


def test_delta_that_cannot_be_removed_is_not_reported_as_removed(
    store: Path, writer: DeltaWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    push_unneeded(store, writer, 1)
    monkeypatch.setattr(Path, "unlink", Mock(side_effect=PermissionError(EACCES, "not allowed")))
    with pytest.raises(UnreachableError, match=r"0+1\.json: cannot be removed: not allowed"):
        prune_deltas(store, "m", keep_s=0)
    assert not any("deltas" in one.detail for one in ModelStore(store).history("m"))


def test_deltas_that_another_prune_has_just_removed_are_passed_over(
    store: Path, writer: DeltaWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    push_unneeded(store, writer, 3)

    def removed_once_listed(*line: Any) -> Any:
        found = stored_seqs(*line)
        monkeypatch.undo()
        assert prune_deltas(store, "m", keep_s=0) == [PrunedDeltas(1, 1, 3, 3)]
        return found

    monkeypatch.setattr(prune_module, "stored_seqs", removed_once_listed)
    assert prune_deltas(store, "m", keep_s=0) == []


def test_damaged_manifest_is_named_in_the_error(store: Path, writer: DeltaWriter) -> None:
    push_unneeded(store, writer, 1)
    path = store / "m/deltas/1" / f"{1:020d}.json"
    path.chmod(0o644)
    path.write_text(json.dumps({}))
    with pytest.raises(StoreError, match=r"0001.json: format_version is None"):
        prune_deltas(store, "m", keep_s=0)
