"""Undo: a line goes back to an earlier delta, and its training job is told."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from store.deltas.conftest import rows

from embedserve_store import (
    DeltaLine,
    DeltaWriter,
    ModelStore,
    RevertedError,
    StoreError,
    WriterFencedError,
    compact_deltas,
    undo_deltas,
)
from embedserve_store.deltas import undo as undo_module
from embedserve_store.deltas.append import append
from embedserve_store.format.delta_manifest import DeltaManifest
from embedserve_store.publishing.added_file import Write


def push(writer: DeltaWriter, *numbers: int) -> int:
    return writer.push_rows({"tag": (list(numbers), rows("tag", len(numbers), seed=writer.seq))})


def line_of(store: Path) -> DeltaLine:
    models = ModelStore(store)
    return DeltaLine(models, models.manifest("m", 1))


def undo(store: Path, to: int, why: str = "CTR fell") -> int:
    return undo_deltas(store, "m", to=to, why=why, version=1).seq


def kept(store: Path, last: int) -> list[int]:
    return [delta.seq for delta in line_of(store).kept(last)]


def test_an_undo_is_a_delta_without_rows(store: Path, writer: DeltaWriter) -> None:
    for row in (1, 2, 3):
        push(writer, row)
    made = undo_deltas(store, "m", to=1, why="CTR fell")
    *_, (delta, position) = line_of(store).deltas()
    assert delta == made
    assert (delta.seq, delta.reverts_to, delta.why, delta.rows) == (4, 1, "CTR fell", {})
    assert position.seq == 4
    (event,) = (one for one in ModelStore(store).history("m") if one.what == "undo")
    assert event.detail == "line 1, delta 4 reverts to 1: CTR fell"


def test_undone_deltas_are_left_out(store: Path, writer: DeltaWriter) -> None:
    for row in (1, 2, 3):
        push(writer, row)
    undo(store, 1)  # 4
    writer.resume()
    push(writer, 5)
    undo(store, 2)  # 6: an undo of an undo
    undo(store, 0)  # 7
    undo(store, 5)  # 8
    states = {1: [1], 3: [3, 2, 1], 4: [1], 5: [5, 1], 6: [2, 1], 7: [], 8: [5, 1]}
    assert {last: kept(store, last) for last in states} == states
    line = line_of(store)
    for one in range(9):
        for other in range(9):
            expected = set(kept(store, one)) ^ set(kept(store, other))
            assert [delta.seq for delta in line.between(one, other)] == sorted(expected)[::-1]


def test_a_compacted_version_has_the_rows_after_the_undo(store: Path, writer: DeltaWriter) -> None:
    published = ModelStore(store).load("m", 1).tables.rows("tag").copy()
    push(writer, 1, 2)
    after = ModelStore(store).load("m", compact_deltas(store, "m").version).tables.rows("tag")
    push(writer, 2, 3)
    undo(store, 1)
    undone = compact_deltas(store, "m", version=1).version
    np.testing.assert_array_equal(ModelStore(store).load("m", undone).tables.rows("tag"), after)
    undo(store, 0)
    undone = compact_deltas(store, "m", version=1).version
    np.testing.assert_array_equal(ModelStore(store).load("m", undone).tables.rows("tag"), published)


def test_what_cannot_be_undone_is_refused(store: Path, writer: DeltaWriter) -> None:
    with pytest.raises(StoreError, match="line 1 has no delta after version 1: nothing to undo"):
        undo(store, 0)
    push(writer, 1)
    push(writer, 2)
    for to in (2, 3, -1):
        with pytest.raises(StoreError, match=f"delta {to}: expected 0 to 1; line 1 ends with 2"):
            undo(store, to)
    with pytest.raises(StoreError, match="why has 1001 characters"):
        undo(store, 0, "x" * 1001)
    compact_deltas(store, "m", seq=1)
    with pytest.raises(StoreError, match="ends with 2, and version 2 has the deltas up to 1"):
        undo_deltas(store, "m", to=0, why="")
    assert line_of(store).seqs() == [1, 2]
    assert undo_deltas(store, "m", to=1, why="").seq == 3


def test_a_delta_that_was_undone_is_not_compacted(store: Path, writer: DeltaWriter) -> None:
    """A version that has its rows could not follow the line."""
    for row in (1, 2, 3):
        push(writer, row)
    undo(store, 1)
    with pytest.raises(StoreError, match=r"delta 3 of line 1 was undone: delta 4 reverts to 1; "):
        compact_deltas(store, "m", seq=3)
    assert compact_deltas(store, "m", seq=1).version == 2
    writer.resume()
    push(writer, 5)
    path = store / "m/deltas/1" / f"{5:020d}.json"
    path.chmod(0o644)
    path.write_bytes(b"{}")
    assert compact_deltas(store, "m", version=1, seq=4).version == 3  # before a damaged delta


def test_an_undo_comes_after_what_is_pushed_meanwhile(
    store: Path, writer: DeltaWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(writer, 1)
    push(writer, 2)

    def append_later(write: Write, delta: DeltaManifest) -> object:
        monkeypatch.setattr(undo_module, "append", append)
        push(writer, 3)
        return append(write, delta)

    monkeypatch.setattr(undo_module, "append", append_later)
    assert undo(store, 1) == 4
    assert kept(store, 4) == [1]


def test_undos_at_once_each_have_their_seq(store: Path, writer: DeltaWriter) -> None:
    for row in range(1, 4):
        push(writer, row)
    seqs: list[int] = []
    threads = [threading.Thread(target=lambda: seqs.append(undo(store, 0))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seqs) == [4, 5, 6, 7]
    assert kept(store, 7) == []


def test_the_training_job_is_told_and_continues(store: Path, writer: DeltaWriter) -> None:
    for row in (1, 2, 3):
        push(writer, row)
    undo(store, 1)
    for _ in range(2):
        with pytest.raises(
            RevertedError, match=r"has reverted the line to delta 1 .*: CTR fell"
        ) as e:
            push(writer, 5)
        assert e.value.reverts_to == 1
    writer.resume()
    assert writer.seq == 4
    assert push(writer, 5) == 5
    assert kept(store, 5) == [5, 1]
    writer.resume()  # nothing was undone
    assert push(writer, 6) == 6


def test_a_job_that_goes_back_to_a_checkpoint_has_a_new_writer(
    store: Path, writer: DeltaWriter
) -> None:
    push(writer, 1)
    push(writer, 2)
    undo(store, 1)
    with DeltaWriter(store, model="m") as other:
        assert push(other, 3) == 4
        with pytest.raises(RevertedError):
            push(writer, 9)
        with pytest.raises(WriterFencedError, match=r"0004.json: .* wrote it"):
            writer.resume()
        with pytest.raises(WriterFencedError):
            push(writer, 9)
