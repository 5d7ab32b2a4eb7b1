"""Tests of a follower with a last delta that it may apply, as an alias with --at-seq sets it."""

import logging
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from server.deltas.followed import Followed

from embedserve.deltas.changed_rows_memory import RowsFullError
from embedserve.deltas.follower import LIST_AFTER_S, LIST_AFTER_S_MAX
from embedserve_store import compact_deltas, undo_deltas
from embedserve_store.format.delta_manifest import DELTA_SEQ_MAX


def push_each(followed: Followed, first: int, last: int) -> None:
    for seq in range(first, last + 1):
        assert followed.push(seq, 9, value=seq) == seq


def rows_at(seq: int) -> dict[int, float]:
    """Returns the changed rows after delta ``seq`` of push_each."""
    return {row: float(row) for row in range(1, seq + 1)} | ({9: float(seq)} if seq else {})


def test_no_delta_after_the_bound_is_applied(followed: Followed) -> None:
    push_each(followed, 1, 4)
    followed.line.last_seq = 2
    assert not followed.follower.poll_once()
    now = followed.status.read()
    assert (now.state, now.applied.seq, now.wanted_seq, now.lag_s()) == ("following", 2, 2, 0)
    assert followed.changed() == rows_at(2)
    assert followed.status.describe()["at_seq"] == 2
    followed.line.last_seq = 3
    followed.follower.poll_once()
    assert (followed.live.seq, followed.changed()) == (3, rows_at(3))
    followed.line.last_seq = None
    followed.follower.poll_once()
    assert (followed.live.seq, followed.changed()) == (4, rows_at(4))
    assert "at_seq" not in followed.status.describe()


@pytest.mark.parametrize("target", [0, 2])
def test_lowered_bound_reverts_rows_from_memory(
    followed: Followed,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    target: int,
) -> None:
    for seq in range(1, 5):
        push_each(followed, seq, seq)
        followed.follower.poll_once()
    followed.line.last_seq = target
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(followed.line, "rows", None)  # no file is read
        assert not followed.follower.poll_once()
    assert caplog.messages == [f"m: goes back to delta {target}, the last that it may have"]
    now = followed.status.read()
    assert (now.state, now.applied.seq, now.wanted_seq) == ("following", target, target)
    assert (now.applied.as_of > 0, now.undos) == (target > 0, 0)
    assert (followed.live.seq, followed.changed()) == (target, rows_at(target))
    followed.line.last_seq = None
    followed.follower.poll_once()
    assert (followed.live.seq, followed.changed()) == (4, rows_at(4))


def test_lowered_bound_reverts_rows_from_the_store_after_restart(followed: Followed) -> None:
    push_each(followed, 1, 4)
    followed.follower.poll_once()
    followed.follower = followed.started()  # a new applier has the newest rows only
    followed.line.last_seq = 1
    repair = followed.damage(1)
    assert (*followed.poll(), followed.changed()) == ("stalled", 4, rows_at(4))
    assert followed.status.read().reason.startswith("cannot go back to delta 1: ")
    repair()
    assert (*followed.poll(), followed.changed()) == ("following", 1, rows_at(1))
    followed.follower = followed.started()  # it continues where the other one went back to
    followed.follower.poll_once()
    assert (followed.live.seq, followed.changed()) == (1, rows_at(1))
    push_each(followed, 5, 5)
    followed.line.last_seq = None
    followed.follower.poll_once()
    assert (followed.live.seq, followed.changed()) == (5, rows_at(5))


def test_revert_without_memory_keeps_rows_and_is_retried(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    push_each(followed, 1, 3)
    followed.follower.poll_once()
    followed.follower = followed.started()
    followed.line.last_seq = 1
    with monkeypatch.context() as patch:
        patch.setattr(followed.rows, "apply", Mock(side_effect=RowsFullError("no room")))
        followed.follower.poll_once()
    assert (followed.state, followed.changed()) == ("full", rows_at(3))
    assert followed.status.read().reason == "cannot go back to delta 1: no room"
    followed.follower.poll_once()
    assert (followed.state, followed.changed()) == ("following", rows_at(1))


def test_undo_after_the_bound_is_not_applied(followed: Followed) -> None:
    """Covers an undo that comes later, and one that was read ahead as the way past a damaged
    delta."""
    push_each(followed, 1, 3)
    followed.damage(3)
    followed.follower.poll_once()
    undo_deltas(followed.models.where, "m", to=1, why="wrong")
    followed.line.last_seq = 2
    assert (*followed.poll(), followed.changed()) == ("following", 2, rows_at(2))
    followed.line.last_seq = None
    followed.follower.poll_once()
    assert (followed.live.seq, followed.changed()) == (4, rows_at(1))
    followed.line.last_seq = 2  # and back, past the undo
    followed.follower.poll_once()
    assert (followed.live.seq, followed.changed()) == (2, rows_at(2))


def test_undo_read_ahead_during_a_hold_is_not_applied_past_the_bound(followed: Followed) -> None:
    push_each(followed, 1, 3)
    followed.damage(2)
    followed.follower.poll_once()
    followed.hold.set(True)
    undo_deltas(followed.models.where, "m", to=1, why="wrong")
    for _ in range(4):  # each reads one manifest ahead
        followed.follower.poll_once()
    followed.hold.set(False)
    followed.line.last_seq = 2
    followed.follower.poll_once()
    now = followed.status.read()
    assert (now.state, now.applied.seq, now.wanted_seq) == ("stalled", 1, 2)
    followed.line.last_seq = None
    assert followed.poll() == ("following", 4)


def test_rows_are_not_reverted_during_a_hold(followed: Followed) -> None:
    push_each(followed, 1, 3)
    followed.follower.poll_once()
    followed.hold.set(True)
    push_each(followed, 4, 5)
    followed.follower.poll_once()
    followed.follower.poll_once()
    assert followed.status.read().wanted_seq == 5
    followed.line.last_seq = 1
    followed.follower.poll_once()
    now = followed.status.read()
    assert (now.state, followed.live.seq, now.wanted_seq, now.lag_s()) == ("held", 3, 3, 0)
    followed.hold.set(False)
    assert (*followed.poll(), followed.changed()) == ("following", 1, rows_at(1))


def test_bound_after_the_last_delta_has_no_effect(followed: Followed) -> None:
    push_each(followed, 1, 2)
    followed.line.last_seq = DELTA_SEQ_MAX
    followed.follower.poll_once()
    push_each(followed, 3, 3)
    followed.follower.poll_once()
    now = followed.status.read()
    assert (now.state, now.applied.seq, now.wanted_seq) == ("following", 3, 3)


def test_gap_after_the_bound_does_not_stall_the_line(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    push_each(followed, 1, 3)
    (followed.deltas / f"{2:020d}.json").unlink()
    followed.line.last_seq = 1
    assert followed.poll() == ("following", 1)
    followed.follower._list_after_s = LIST_AFTER_S_MAX  # long without a new delta
    followed.line.last_seq = None
    assert followed.poll()[0] == "following"
    now_s = time.monotonic() + LIST_AFTER_S
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    assert followed.poll()[0] == "stalled"


@pytest.mark.parametrize("is_committed", [False, True])
def test_revert_is_completed_after_the_applier_was_killed(
    followed: Followed, monkeypatch: pytest.MonkeyPatch, is_committed: bool
) -> None:
    push_each(followed, 1, 3)
    followed.follower.poll_once()
    followed.line.last_seq = 1
    bring_back = followed.follower._bring_back

    def killed(target: int, seq: int) -> None:
        if is_committed:
            bring_back(target, seq)
        raise KeyboardInterrupt

    monkeypatch.setattr(followed.follower, "_bring_back", killed)
    with pytest.raises(KeyboardInterrupt):
        followed.follower.poll_once()
    followed.follower = followed.started()
    followed.follower.poll_once()
    now = followed.status.read()
    assert (now.state, now.applied.seq, followed.changed()) == ("following", 1, rows_at(1))
    assert now.undo_from <= 1
    followed.line.last_seq = None
    followed.follower.poll_once()
    assert (followed.live.seq, followed.changed()) == (3, rows_at(3))


def test_compacted_version_is_reverted_no_further_than_its_own_rows(followed: Followed) -> None:
    push_each(followed, 1, 2)
    compact_deltas(followed.models.where, "m")
    followed.follow(Path(followed.models.where), 2)
    push_each(followed, 3, 3)
    followed.follower.poll_once()
    assert followed.live.seq == 3
    followed.line.last_seq = 1
    assert (*followed.poll(), followed.changed()) == ("following", 2, {})
