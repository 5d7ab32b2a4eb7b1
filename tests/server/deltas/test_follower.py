"""Tests of DeltaFollower: it applies the deltas of a line in order, and nothing from a bad one
on."""

import errno
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from server.deltas.followed import Followed

from embedserve.deltas import follower
from embedserve_store.errors import StoreError, UnreachableError
from embedserve_store.format.delta_file import ChangedRows
from embedserve_store.format.delta_manifest import manifest_name


def test_pending_deltas_are_applied_in_one_step_and_the_last_row_wins(followed: Followed) -> None:
    assert not followed.status.read().is_ready
    followed.push(3, 5, value=1)
    followed.push(5, 7, value=2)
    followed.writer.push_rows({})
    assert not followed.follower.poll_once()
    assert followed.rows.rows == {3: 1, 5: 2, 7: 2}
    assert followed.rows.steps == [3]
    now = followed.status.read()
    assert (now.state, now.applied.seq, now.wanted_seq, now.lag_s()) == ("following", 3, 3, 0)
    assert (now.rows, now.rows_changed, now.is_ready) == (4, 3, True)
    assert sum(now.freshness_seconds.counts) == 3
    assert now.applied.as_of > 0


def test_line_without_deltas_is_followed(followed: Followed) -> None:
    assert not followed.follower.poll_once()
    assert (followed.state, followed.status.read().is_ready) == ("following", True)
    followed.push(1)
    followed.follower.poll_once()
    assert followed.live.seq == 1


def test_bytes_per_step_are_bounded(followed: Followed) -> None:
    for row in (1, 2, 3):
        followed.push(row)
    followed.follower._step_bytes = 1
    assert followed.follower.poll_once()
    assert (followed.state, followed.rows.steps) == ("catching up", [1])
    assert not followed.status.read().is_ready
    assert followed.status.read().lag_s() > 0
    assert followed.follower.poll_once()
    assert not followed.follower.poll_once()
    assert (followed.state, followed.rows.steps) == ("following", [1, 2, 3])


def test_number_of_deltas_per_step_is_bounded(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against missing heartbeats, when a server that is 100,000 small deltas behind merges
    them in one step."""
    monkeypatch.setattr(follower, "STEP_DELTAS_MAX", 2)
    followed.follower.poll_once()  # later polls list nothing
    for row in range(5):
        followed.push(row)
    states = []
    while followed.follower.poll_once():
        states.append(followed.state)
    assert (states, followed.state) == (["catching up"] * 2, "following")
    assert followed.rows.steps == [2, 4, 5]


def test_damaged_delta_stalls_the_line_and_is_logged_once(
    followed: Followed, caplog: pytest.LogCaptureFixture
) -> None:
    for row in (1, 2, 3):
        followed.push(row)
    repair = followed.damage(2)
    with caplog.at_level(logging.ERROR):
        assert not followed.follower.poll_once()
        assert not followed.follower.poll_once()
    now = followed.status.read()
    assert (now.state, now.applied.seq, now.refused, now.is_ready) == ("stalled", 1, 1, True)
    assert "sha256 is" in now.reason
    assert len(caplog.records) == 1
    assert now.lag_s() > 0
    repair()
    assert not followed.follower.poll_once()
    now = followed.status.read()
    assert (now.state, now.reason, now.applied.seq) == ("following", "", 3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data.update(previous="0" * 64), "does not continue version 1"),
        (lambda data: data.update(line=2), "is delta 1 of line 2"),
        (lambda data: data["files"][0].update(rows={"u": 1}), "table 'u' is not one of"),
        (lambda data: data["files"][0].update(rows={"t": 99}), "99 rows, the table has 20"),
    ],
)
def test_invalid_manifest_stalls_the_line(
    followed: Followed, change: Callable[[Any], None], reason: str
) -> None:
    followed.push(1)
    followed.edit(1, change)
    assert followed.poll()[0] == "stalled"
    assert reason in followed.status.read().reason
    assert (followed.rows.rows, followed.live.seq) == ({}, 0)


def test_gap_is_found_by_the_next_listing(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed.push(1)
    followed.follower.poll_once()
    followed.push(2)
    followed.push(3)
    path = followed.deltas / manifest_name(2)
    whole = path.read_bytes()
    path.unlink()
    assert followed.poll()[0] == "following"  # no listing yet
    followed.follower._list_after_s = 0.0  # the next listing is due
    assert followed.poll()[0] == "stalled"
    assert "delta 2 of line 1 does not exist; after version 1 it has 1 to 3" in (
        followed.status.read().reason
    )
    path.write_bytes(whole)
    assert followed.poll() == ("following", 3)


def test_unreachable_store_stalls_the_line_until_the_next_poll(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that the reason differs from that of a damaged delta, and that the follower searches
    no undo."""
    requests = 0

    def after(position: object) -> None:
        nonlocal requests
        requests += 1
        raise UnreachableError("s3://b: the remote store says: no")

    with monkeypatch.context() as patch:
        patch.setattr(followed.line, "after", after)
        assert not followed.follower.poll_once()
    reason = "no access to the store: s3://b: the remote store says: no"
    assert (followed.state, followed.status.read().reason, requests) == ("stalled", reason, 1)
    followed.follower.poll_once()
    assert (followed.state, followed.status.read().reason) == ("following", "")


def test_unreadable_rows_are_retried_at_the_next_poll(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed.push(1)
    followed.push(2)
    real = Path.open

    def deny_access(path: Path, *options: Any) -> Any:
        if path.suffix == ".safetensors" and path.name.startswith(f"{2:020d}"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, *options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", deny_access)
        followed.follower.poll_once()
        now = followed.status.read()
        assert (now.state, now.applied.seq) == ("stalled", 1)
        assert now.reason.startswith("no access to the store: ")
        assert now.reason.endswith("cannot be read: Permission denied")
    assert followed.poll() == ("following", 2)


def test_deltas_before_a_delta_that_exceeds_memory_are_applied(followed: Followed) -> None:
    followed.push(1, 2)
    followed.push(3, 4, 5)
    followed.rows.room = 4
    followed.follower.poll_once()
    now = followed.status.read()
    assert (now.state, now.reason) == ("full", "no room for delta 2")
    assert followed.rows.rows == {1: 1, 2: 1}
    followed.rows.room = 5
    assert followed.poll() == ("following", 2)


def test_follower_resumes_where_a_killed_follower_stopped(followed: Followed) -> None:
    """Covers a kill before the rows are visible, and one before the status reports them."""
    followed.push(1)
    followed.follower.poll_once()
    before = followed.status.read()
    followed.push(2)
    followed.follower.poll_once()
    after = followed.status.read()
    followed.push(3)
    for state in (after, replace(before, applying=after.applied)):
        followed.status.write(state)
        followed.live.commit(followed.live.committed[0], 2)
        followed.started().poll_once()
        assert (followed.state, followed.rows.rows) == ("following", {3: 1})


def test_listed_but_missing_delta_is_not_polled_again_immediately(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that the poll reports that it found nothing, so that the applier does not poll again
    immediately."""
    monkeypatch.setattr(followed.line, "seqs", lambda: [1])
    assert not followed.follower.poll_once()
    assert (followed.state, followed.status.read().is_ready) == ("catching up", True)
    followed.push(1)
    assert followed.poll()[0] == "following"


def test_idle_line_is_listed_at_growing_intervals(followed: Followed) -> None:
    waits = []
    for _ in range(7):
        followed.follower._found_s = -1e9
        followed.follower.poll_once()
        waits.append(followed.follower._list_after_s)
    assert waits == [10, 20, 40, 80, 160, 300, 300]
    followed.push(1)
    followed.follower.poll_once()
    assert followed.follower._list_after_s == 10


def test_kill_after_commit_does_not_lose_the_line_position(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that the status written before the rows contains their position."""
    followed.push(1)

    def apply_and_die(seq: int, changes: Sequence[ChangedRows], check: object) -> None:
        followed.live.commit(followed.live.committed[0], seq)
        raise KeyboardInterrupt

    monkeypatch.setattr(followed.rows, "apply", apply_and_die)
    with pytest.raises(KeyboardInterrupt):
        followed.follower.poll_once()
    followed.push(2)
    followed.started().poll_once()
    assert (followed.state, followed.live.seq, followed.rows.rows) == ("following", 2, {2: 1})


def test_rows_rejected_by_the_device_check_stall_the_line(followed: Followed) -> None:
    def check(changed: ChangedRows) -> None:
        if 7 in changed.numbers:
            raise StoreError("row 7 does not fit")

    follower = followed.started(check)
    for row in (3, 7, 5):
        followed.push(row)
    follower.poll_once()
    assert (followed.live.seq, followed.state) == (1, "stalled")
    assert followed.status.read().reason == "row 7 does not fit"
    follower.poll_once()
    assert followed.status.read().refused == 1
