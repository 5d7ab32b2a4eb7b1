"""Tests of DeltaFollower while its line is held: it applies nothing, and reports what waits."""

import logging
import os
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from server.deltas.followed import Followed

from embedserve.deltas.version_memory import SharedFlag, VersionMemory
from embedserve_store import undo_deltas
from embedserve_store.errors import StoreError
from embedserve_store.format.delta_file import ChangedRows
from embedserve_store.format.delta_manifest import DeltaManifest, LinePosition


class HeldFollower(Followed):
    """A follower that is held at delta 1."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.push(1)
        self.follower.poll_once()
        self.hold.set(True)

    def poll_once(self) -> tuple[str, int, int]:
        """Polls once; returns (state, seq, desired seq)."""
        assert not self.follower.poll_once()
        now = self.status.read()
        assert now.applied.seq == self.live.seq
        return now.state, now.applied.seq, now.wanted_seq


@pytest.fixture
def held(tmp_path: Path) -> HeldFollower:
    return HeldFollower(tmp_path / "store")


def read_nothing(delta: DeltaManifest) -> None:
    raise AssertionError(f"the rows of delta {delta.seq} are read")


def test_hold_flag_is_shared_with_forked_processes() -> None:
    hold = SharedFlag(VersionMemory.create())
    assert not hold.is_set
    for is_set in (True, True, False):
        if not (child := os.fork()):
            hold.set(is_set)
            os._exit(0)
        os.waitpid(child, 0)
        assert hold.is_set == is_set


def test_held_line_applies_nothing_and_reports_pending_deltas(
    held: HeldFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert held.poll_once() == ("held", 1, 1)
    assert held.status.read().lag_s() == 0
    before = time.time()
    for seq in (2, 3, 4):
        held.push(seq)
    with monkeypatch.context() as patch:
        patch.setattr(held.line, "rows", read_nothing)
        assert [held.poll_once() for _ in range(4)] == [
            *(("held", 1, seq) for seq in (2, 3, 4)),
            ("held", 1, 4),
        ]
    now = held.status.read()
    assert before - 0.001 <= now.waiting_since <= time.time()  # is written in whole milliseconds
    assert (now.reason, now.refused, now.looked_at >= before) == ("", 0, True)
    held.hold.set(False)
    assert held.poll_once() == ("following", 4, 4)
    assert held.rows.steps == [1, 4]
    assert held.status.read().lag_s() == 0


def test_lag_is_that_of_the_oldest_pending_delta(held: HeldFollower) -> None:
    for seq in (2, 3):
        held.push(seq)
        held.poll_once()
    oldest, _ = held.line.manifest(2)
    since = datetime.fromisoformat(oldest.as_of).timestamp()
    assert held.status.read().waiting_since == since
    assert held.status.read().lag_s() > 0


def test_hold_lets_the_step_in_progress_complete(
    held: HeldFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    held.hold.set(False)
    apply = held.rows.apply

    def apply_and_hold(seq: int, changes: Sequence[ChangedRows], check: Any) -> None:
        held.hold.set(True)
        apply(seq, changes, check)

    monkeypatch.setattr(held.rows, "apply", apply_and_hold)
    held.push(2)
    held.push(3)
    assert held.poll_once() == ("following", 3, 3)
    held.push(4)
    assert held.poll_once() == ("held", 3, 4)


def test_hold_survives_applier_restart(
    held: HeldFollower, caplog: pytest.LogCaptureFixture
) -> None:
    held.push(2)
    held.poll_once()
    held.status.stall("the process that applies deltas was ended by SIGKILL")
    held.push(3)
    held.follower = held.started()
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert held.poll_once() == ("held", 1, 3)  # its first poll lists the line
        assert (held.status.read().reason, held.poll_once()) == ("", ("held", 1, 3))
    assert caplog.messages == ["m: deltas after 1 are held"]
    held.hold.set(False)
    assert held.poll_once() == ("following", 3, 3)


def test_new_hold_begins_after_the_last_applied_delta(held: HeldFollower) -> None:
    held.push(2)
    held.poll_once()
    held.hold.set(False)
    held.push(3)
    held.push(4)
    assert held.poll_once() == ("following", 4, 4)
    held.hold.set(True)
    held.push(5)
    assert held.poll_once() == ("held", 4, 5)
    assert held.status.read().lag_s() > 0


def test_beginning_and_end_of_a_hold_are_logged_once(
    held: HeldFollower, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for is_set in (True, False):
            held.hold.set(is_set)
            held.poll_once()
            held.poll_once()
    assert caplog.messages == ["m: deltas after 1 are held", "m: deltas are held no longer"]


def test_delta_with_invalid_manifest_stalls_the_line_after_the_hold(
    held: HeldFollower, caplog: pytest.LogCaptureFixture
) -> None:
    """Covers a delta with a bad manifest. Manifests are read during the hold, rows are not."""
    held.push(2)
    held.push(3)
    held.edit(3, lambda data: data.update(previous="0" * 64))
    with caplog.at_level(logging.ERROR):
        assert held.poll_once() == ("held", 1, 2)
        assert held.poll_once() == ("held", 1, 2)
    now = held.status.read()
    assert ("does not continue delta 2" in now.reason, now.refused) == (True, 1)
    assert [one.split(":")[1] for one in caplog.messages] == [" no delta after 2"]
    held.hold.set(False)
    assert held.poll_once() == ("stalled", 2, 2)
    assert held.status.read().refused == 1  # for the same reason
    held.hold.set(True)
    assert held.poll_once() == ("held", 2, 2)


def test_store_error_during_a_hold_is_reported(
    held: HeldFollower, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held.poll_once()

    def after(position: LinePosition) -> None:
        raise StoreError("s3://b: the remote store says: no")

    with monkeypatch.context() as patch:
        patch.setattr(held.line, "after", after)
        assert held.poll_once() == ("held", 1, 1)
        assert held.status.read().reason[:6] == "s3://b"
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert held.poll_once() == ("held", 1, 1)
    assert (held.status.read().reason, caplog.messages) == ("", [])


def test_full_line_can_be_held(held: HeldFollower) -> None:
    held.hold.set(False)
    held.rows.room = 1
    held.push(2)
    assert held.poll_once()[0] == "full"
    held.hold.set(True)
    assert held.poll_once() == ("held", 1, 2)
    held.hold.set(False)
    assert held.poll_once()[0] == "full"


def test_delta_found_during_a_hold_postpones_the_next_listing(held: HeldFollower) -> None:
    """Checks that a delta found during a hold postpones the next listing, like one that is
    applied."""
    held.follower._list_after_s = 300.0
    held.push(2)
    held.poll_once()
    assert held.follower._list_after_s == 10.0


def test_delta_undone_during_a_hold_is_never_applied(held: HeldFollower) -> None:
    held.push(2, value=2)
    undo_deltas(held.models.where, "m", to=1, why="CTR fell")
    held.poll_once()
    assert held.poll_once() == ("held", 1, 3)
    held.hold.set(False)
    held.follower.poll_once()
    assert (held.rows.steps, held.live.seq, held.changed()) == ([1, 3], 3, {1: 1})
