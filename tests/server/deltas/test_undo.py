"""Tests of undos of a line: former rows come back, from memory or from the store."""

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from server.deltas.followed import ROWS, Followed

from embedserve.deltas import rows_writer
from embedserve.deltas.changed_rows_memory import RowsFullError
from embedserve.deltas.rows_reader import RowsReader
from embedserve_store import compact_deltas, undo_deltas
from embedserve_store.errors import StoreError
from embedserve_store.format.delta_file import ChangedRows
from embedserve_store.format.delta_manifest import DeltaManifest
from embedserve_store.format.row_layout import dequantize_rows


def undo(followed: Followed, to: int) -> int:
    """Undoes deltas, and lets the training job continue."""
    seq = undo_deltas(followed.models.where, "m", to=to, why="CTR fell").seq
    followed.writer.resume()
    return seq


def test_undo_restores_rows_from_memory(
    followed: Followed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for seq in range(1, 5):
        followed.push(seq, 9, value=seq)
        followed.follower.poll_once()
    assert followed.changed() == {1: 1, 2: 2, 3: 3, 4: 4, 9: 4}
    assert followed.status.read().undo_from == 0
    assert undo(followed, 2) == 5
    monkeypatch.setattr(followed.line, "rows", None)  # no file is read
    with caplog.at_level(logging.WARNING):
        assert not followed.follower.poll_once()
    assert caplog.messages == ["m: delta 5 reverts to delta 2: CTR fell"]
    assert followed.changed() == {1: 1, 2: 2, 9: 2}
    now = followed.status.read()
    assert (now.state, now.applied.seq, now.undos, now.rows_changed) == ("following", 5, 1, 3)


def test_undo_beyond_rows_in_memory_reads_the_store(followed: Followed) -> None:
    for seq in range(1, 5):
        followed.push(seq, 9, value=seq)
        followed.follower.poll_once()
    followed.follower = followed.started()  # a new applier has the newest rows only
    followed.follower.poll_once()
    assert followed.status.read().undo_from == 4
    undo(followed, 2)
    followed.follower.poll_once()
    assert (followed.changed(), followed.live.seq) == ({1: 1, 2: 2, 9: 2}, 5)
    followed.push(3, value=7)
    undo(followed, 0)
    followed.follower.poll_once()
    assert (followed.changed(), followed.live.seq, followed.state) == ({}, 7, "following")


def test_line_is_stalled_while_a_lookup_of_undone_rows_hangs(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers a worker, a disk or a GPU that hangs: the applier still polls the other lines."""
    monkeypatch.setattr(rows_writer, "LOOKUP_S_MAX", 0.01)
    for seq in (1, 2):
        followed.push(seq, value=seq)
        followed.follower.poll_once()
    hanging = RowsReader(followed.live, 1, followed.live.version.plan)
    view, _ = hanging.begin()
    undo(followed, 1)
    for _ in range(2):
        assert not followed.follower.poll_once()
        now = followed.status.read()
        assert (now.state, now.applied.seq) == ("stalled", 3)
        assert now.reason == "lookups still read undone rows after 0.01 s"
        assert followed.changed() == {1: 1}
    followed.push(3, value=3)
    assert (*followed.poll(), now.refused) == ("stalled", 3, 1)
    hanging.end(view)
    assert followed.poll() == ("following", 4)
    assert followed.changed() == {1: 1, 3: 3}


def test_undo_can_be_undone(followed: Followed) -> None:
    for seq in range(1, 4):
        followed.push(seq, value=seq)
    followed.follower.poll_once()
    undo(followed, 1)
    followed.follower.poll_once()
    assert followed.changed() == {1: 1}
    undo(followed, 3)
    followed.follower.poll_once()
    assert (followed.changed(), followed.live.seq) == ({1: 1, 2: 2, 3: 3}, 5)


def test_deltas_undone_before_being_applied_are_never_visible(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers a server that starts, and one that is behind."""
    followed.push(1, value=1)
    followed.push(2, value=2)
    undo(followed, 1)
    followed.push(3, value=3)
    read: list[int] = []
    rows = followed.line.rows

    def read_rows(delta: DeltaManifest) -> Iterator[list[ChangedRows]]:
        read.append(delta.seq)
        return rows(delta)

    monkeypatch.setattr(followed.line, "rows", read_rows)
    followed.follower.poll_once()
    assert (followed.rows.steps, read) == ([4], [1, 4])
    assert followed.changed() == {1: 1, 3: 3}
    followed.push(4, value=4)
    undo(followed, 1)  # undoes delta 4, which is applied, and 5, which is not
    followed.follower.poll_once()
    assert (followed.rows.steps, followed.live.seq) == ([4, 6], 6)
    assert followed.changed() == {1: 1}
    assert 5 not in read


def test_undo_skips_a_damaged_delta(followed: Followed) -> None:
    """Checks that an undo is a way past a delta whose rows are lost."""
    followed.push(1, value=1)
    followed.push(2, value=2)
    followed.damage(2)
    assert followed.poll() == ("stalled", 1)
    undo(followed, 1)
    followed.push(3, value=3)
    repair = followed.damage(4)
    assert (*followed.poll(), followed.changed()) == ("stalled", 3, {1: 1})
    repair()
    followed.follower.poll_once()
    assert (followed.state, followed.changed()) == ("following", {1: 1, 3: 3})


def test_deltas_and_undos_are_applied_singly_if_merging_exceeds_memory(followed: Followed) -> None:
    followed.push(1, 2, value=1)
    followed.push(3, value=2)
    undo(followed, 1)
    followed.push(4, 5, value=4)
    followed.rows.room = 3
    assert followed.poll() == ("full", 3)
    assert followed.changed() == {1: 1, 2: 1}


def test_failed_undo_is_retried(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    followed.push(1, value=1)
    followed.push(1, value=2)
    followed.follower.poll_once()
    followed.follower = followed.started()
    undo(followed, 1)
    repair = followed.damage(1)
    followed.follower.poll_once()
    now = followed.status.read()
    assert (now.state, now.applied.seq, followed.changed()) == ("stalled", 2, {1: 2})
    assert "sha256 is" in now.reason
    repair()
    with monkeypatch.context() as patch:
        patch.setattr(followed.rows, "apply", Mock(side_effect=RowsFullError("no room")))
        followed.follower.poll_once()
    assert (followed.state, followed.changed()) == ("full", {1: 2})
    followed.follower.poll_once()
    assert (followed.state, followed.changed()) == ("following", {1: 1})


def test_compacted_version_rejects_undo_to_before_its_compaction(followed: Followed) -> None:
    for row in (1, 2, 3):
        followed.push(row)
    compact_deltas(followed.models.where, "m", seq=2)
    undo_deltas(followed.models.where, "m", to=1, why="", version=1)
    version = followed.models.load("m", 2)
    line = type(followed.line)(followed.models, version.manifest)
    with pytest.raises(
        StoreError, match="reverts to delta 1, but version 2 has the deltas up to 2"
    ):
        list(line.deltas())


class UndosAndRestarts(RuleBasedStateMachine):
    """Runs pushes, undos, polls and new appliers in any order; rows are those of the seq."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.followed = Followed(Path(self.folder.name) / "store")
        self.states: list[dict[int, float]] = [{}]

    def teardown(self) -> None:
        """Checks that a compacted version has the served rows."""
        followed, seq = self.followed, len(self.states) - 1
        if seq:
            store = followed.models.where
            version = followed.models.load("m", compact_deltas(store, "m").version)
            rows = dequantize_rows(version.tables.rows("t"), "float32", 4)[:, 0]
            expected = {row: float(followed.published[row]) for row in range(ROWS)}
            assert dict(enumerate(rows.tolist())) == expected | self.states[seq]
        followed.writer.close()
        self.folder.cleanup()

    @rule(rows=st.sets(st.integers(0, ROWS - 1), max_size=4))
    def push(self, rows: set[int]) -> None:
        seq = self.followed.push(*rows, value=float(len(self.states)))
        assert seq == len(self.states)
        self.states.append(self.states[-1] | dict.fromkeys(rows, float(seq)))

    @precondition(lambda self: len(self.states) > 1)
    @rule(back=st.integers(1, 8))
    def undo(self, back: int) -> None:
        target = max(0, len(self.states) - 1 - back)
        assert undo(self.followed, target) == len(self.states)
        self.states.append(self.states[target])

    @rule(step_bytes=st.sampled_from([1, 1 << 20]))
    def poll(self, step_bytes: int) -> None:
        self.followed.follower._step_bytes = step_bytes
        self.followed.follower.poll_once()
        last = self.followed.line.last_seq
        assert last is None or self.followed.live.seq <= last

    @rule(back=st.none() | st.integers(0, 8))
    def bound(self, back: int | None) -> None:
        """Sets or removes the last delta, as an alias does."""
        last = len(self.states) - 1
        self.followed.line.last_seq = None if back is None else max(0, last - back)

    @rule()
    def start_another_applier(self) -> None:
        self.followed.follower = self.followed.started()

    @invariant()
    def rows_are_those_of_the_seq(self) -> None:
        assert self.followed.changed() == self.states[self.followed.live.seq]


TestUndosAndRestarts = UndosAndRestarts.TestCase
TestUndosAndRestarts.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


def test_undo_many_steps_after_a_damaged_delta_is_found(followed: Followed) -> None:
    """Covers an undo past the deltas of one step; its manifest is read once."""
    followed.push(1, value=1)
    for value in range(2, 8):
        followed.push(2, value=value)
    followed.damage(2)
    followed.follower._step_bytes = 1
    followed.follower.poll_once()
    assert followed.poll() == ("stalled", 1)
    assert followed.status.read().wanted_seq == 7
    undo(followed, 1)
    followed.push(3, value=9)
    assert followed.follower.poll_once()  # finds it, and asks for another call immediately
    assert followed.follower.poll_once()
    assert (followed.live.seq, followed.changed()) == (8, {1: 1})
    followed.follower.poll_once()
    assert (followed.state, followed.changed()) == ("following", {1: 1, 3: 9})


def test_second_undo_skips_an_undo_that_cannot_be_applied(followed: Followed) -> None:
    for seq in range(1, 5):
        followed.push(seq, value=seq)
    followed.follower.poll_once()
    followed.follower = followed.started()
    undo(followed, 2)
    (followed.deltas / f"{2:020d}.json").unlink()
    assert followed.poll() == ("stalled", 4)
    assert not followed.follower.poll_once()
    undo(followed, 4)
    assert followed.follower.poll_once()
    assert followed.poll() == ("following", 6)
    assert followed.changed() == {1: 1, 2: 2, 3: 3, 4: 4}


def test_undone_delta_that_exceeds_memory_is_skipped(followed: Followed) -> None:
    followed.push(1, 2, 3, 4, value=1)
    undo(followed, 0)
    followed.push(5, value=3)
    followed.push(6, 7, 8, value=4)
    followed.rows.room = 3
    assert (*followed.poll(), followed.changed()) == ("full", 3, {5: 3})


def test_newline_in_the_undo_reason_is_logged_as_a_space(
    followed: Followed, caplog: pytest.LogCaptureFixture
) -> None:
    followed.push(1)
    followed.follower.poll_once()
    undo_deltas(followed.models.where, "m", to=0, why="bad\nrows")
    with caplog.at_level(logging.WARNING):
        followed.follower.poll_once()
    assert caplog.messages == ["m: delta 2 reverts to delta 0: bad rows"]
