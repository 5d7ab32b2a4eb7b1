"""Tests of the lines that the applier follows: that of the served version and that of the next
one."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pooled import collection
from server.deltas.followed import ROWS, Followed
from server.deltas.tables import first_values
from torchrec import PoolingType

from embedserve.config import ServeSettings
from embedserve.deltas import rows_writer
from embedserve.deltas.delta_target import (
    DeltaTarget,
    check_room,
    from_bytes,
    make_shared_state,
    to_bytes,
)
from embedserve.deltas.followed_lines import FollowedLines
from embedserve.deltas.follower import DeltaFollower
from embedserve.deltas.rows_reader import RowsReader
from embedserve.deltas.status import SharedDeltaState
from embedserve.deltas.version_memory import SharedFlag, VersionMemory
from embedserve.processes.open_store import open_folder
from embedserve_store import compact_deltas, publish, undo_deltas
from embedserve_store.deltas.notify.broker import Topic
from embedserve_store.errors import StoreError


class DeltaRollout:
    """A store whose version 1 is served, and the versions that are prepared beside it."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"
        self.training = Followed(self.store)
        self.settings = ServeSettings(
            str(self.store), deltas="follow", delta_memory=1 << 20, delta_poll_s=1e-12
        )
        self.models: dict[int, SharedDeltaState] = {}
        self.served = self.version(1, 0)
        self.lines = self.started()
        self.lines.follow([self.served])

    def version(self, number: int, generation: int) -> DeltaTarget:
        """Creates the memory of a version, like the supervisor."""
        version = self.training.models.load("m", number)
        made = self.models[number] = make_shared_state(self.settings, version, generation)
        return DeltaTarget("m", str(version.path), made.live.memory.path, generation)

    def started(self) -> FollowedLines:
        """Returns an applier that has inherited no state."""
        return FollowedLines(self.settings, self.training.models, open_folder, {})

    def prepare(self, number: int) -> DeltaTarget:
        made = replace(self.version(number, number), is_next=True)
        self.lines.follow([self.served, made])
        return made

    def switch(self, version: DeltaTarget) -> None:
        """Reports that all workers have prepared the version."""
        self.lines.follow([self.served, replace(version, is_switching=True)])

    def seqs(self) -> list[int]:
        return [model.live.seq for model in self.models.values()]

    def values(self, number: int) -> list[float]:
        """Returns the first value of each row, as a lookup reads it now."""
        live = self.models[number].live
        reader = RowsReader(live, 0, live.version.plan)
        view, _ = reader.begin()
        found = reader.rows_in_view(np.arange(ROWS), np.array([ROWS]), view)
        values = first_values(live, "t", found)
        reader.end(view)
        return values

    def poll_repeatedly(self) -> None:
        for _ in range(10):
            self.lines.poll_due()


@pytest.fixture
def rollout(tmp_path: Path) -> Iterator[DeltaRollout]:
    made = DeltaRollout(tmp_path)
    yield made
    made.training.writer.close()


def test_compacted_version_catches_up_with_later_deltas(rollout: DeltaRollout) -> None:
    rollout.training.push(1, 2, value=3.0)
    compact_deltas(rollout.store, "m")
    rollout.training.push(2, value=4.0)
    rollout.poll_repeatedly()
    two = rollout.prepare(2)
    assert rollout.seqs() == [2, 1]
    rollout.poll_repeatedly()
    assert rollout.seqs() == [2, 2]
    assert rollout.values(1) == rollout.values(2)
    assert rollout.values(2)[1:3] == [3.0, 4.0]
    assert not rollout.lines.mark_caught_up()  # not all workers have prepared it
    rollout.switch(two)
    assert rollout.lines.mark_caught_up()
    assert rollout.models[2].caught_up.is_set
    assert not rollout.lines.mark_caught_up()  # only once


def test_served_version_never_overtakes_a_caught_up_next_version(
    rollout: DeltaRollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout.training.push(1)
    compact_deltas(rollout.store, "m")
    two = rollout.prepare(2)
    rollout.poll_repeatedly()
    rollout.switch(two)
    assert rollout.lines.mark_caught_up()
    poll_once, seen_seqs = DeltaFollower.poll_once, []

    def recording_poll(follower: DeltaFollower) -> bool:
        has_more = poll_once(follower)
        seen_seqs.append(rollout.seqs())
        return has_more

    monkeypatch.setattr(DeltaFollower, "poll_once", recording_poll)
    for value in range(5):
        rollout.training.push(1, value=float(value))
        rollout.lines.poll_due()
    rollout.poll_repeatedly()
    assert rollout.seqs() == [6, 6]
    assert all(one <= two for one, two in seen_seqs)
    assert any(one < two for one, two in seen_seqs)
    # An applier that restarts keeps to that order.
    rollout.lines = rollout.started()
    rollout.switch(two)
    rollout.training.push(1)
    seen_seqs.clear()
    rollout.poll_repeatedly()
    assert rollout.seqs() == [7, 7]
    assert seen_seqs[0] == [6, 6]
    # Once the version serves, the line continues with it alone.
    rollout.lines.follow([replace(two, is_next=False)])
    rollout.training.push(1)
    rollout.poll_repeatedly()
    assert rollout.seqs() == [7, 8]


def test_next_version_that_is_behind_is_not_marked_caught_up(rollout: DeltaRollout) -> None:
    rollout.training.push(1)
    compact_deltas(rollout.store, "m")
    rollout.training.push(2)
    rollout.poll_repeatedly()
    repair = rollout.training.damage(2)
    rollout.switch(rollout.prepare(2))
    rollout.poll_repeatedly()
    assert not rollout.lines.mark_caught_up()
    assert rollout.models[2].status.read().state == "stalled"
    rollout.training.push(3)
    rollout.poll_repeatedly()
    assert rollout.seqs() == [3, 1]  # the served version continues
    repair()
    rollout.lines.follow([rollout.served])
    rollout.switch(rollout.prepare(2))
    rollout.poll_repeatedly()
    assert rollout.lines.mark_caught_up()
    assert rollout.seqs() == [3, 3]


def test_version_compacted_past_a_damaged_delta_is_caught_up(rollout: DeltaRollout) -> None:
    rollout.training.push(1)
    rollout.training.push(2)
    compact_deltas(rollout.store, "m")
    rollout.training.damage(2)
    rollout.poll_repeatedly()
    assert rollout.seqs() == [1]
    rollout.switch(rollout.prepare(2))
    rollout.poll_repeatedly()
    assert rollout.lines.mark_caught_up()
    assert rollout.seqs() == [1, 2]


def test_version_with_its_own_line_is_caught_up_once_polled_and_not_held(
    rollout: DeltaRollout,
) -> None:
    rollout.training.push(1)
    rollout.poll_repeatedly()
    publish_new_line(rollout.store)
    two = rollout.prepare(2)
    rollout.switch(two)
    assert not rollout.lines.mark_caught_up()  # it has not polled
    rollout.models[1].hold.set(True)
    rollout.models[2].hold.set(True)
    rollout.poll_repeatedly()
    assert not rollout.lines.mark_caught_up()  # it is held
    rollout.models[2].hold.set(False)
    rollout.poll_repeatedly()
    assert rollout.lines.mark_caught_up()
    assert rollout.seqs() == [1, 0]
    rollout.models[1].hold.set(False)
    rollout.training.push(2)
    rollout.poll_repeatedly()
    assert rollout.seqs() == [2, 0]  # no seq of another line bounds it


def test_hold_set_at_the_switch_is_carried_over(rollout: DeltaRollout) -> None:
    rollout.training.push(1)
    compact_deltas(rollout.store, "m")
    two = rollout.prepare(2)
    rollout.poll_repeatedly()
    rollout.models[1].hold.set(True)
    rollout.lines.follow([replace(two, is_next=False)])
    rollout.training.push(1)
    rollout.poll_repeatedly()
    assert (rollout.models[2].status.read().state, rollout.seqs()) == ("held", [1, 1])


def test_applier_follows_other_lines_while_a_lookup_of_undone_rows_hangs(
    rollout: DeltaRollout, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Covers an applier that was killed meanwhile."""
    reason = "lookups still read undone rows after 0.01 s"
    monkeypatch.setattr(rows_writer, "LOOKUP_S_MAX", 0.01)
    for row in (1, 2):
        rollout.training.push(row)
        rollout.poll_repeatedly()
    served = rollout.models[1]
    hanging = RowsReader(served.live, 0, served.live.version.plan)
    view, _ = hanging.begin()
    undo_deltas(rollout.store, "m", to=1, why="CTR fell")
    rollout.lines.poll_due()
    rollout.lines = rollout.started()
    other = replace(rollout.version(1, 2), name="n")
    rollout.lines.follow([rollout.served, other])
    rollout.poll_repeatedly()
    assert rollout.models[1].live.seq == 3  # of the other name
    now = served.status.read()
    assert (now.state, now.reason, now.is_ready) == ("stalled", reason, True)
    assert [one for one in caplog.messages if reason in one] == [f"m: no delta after 3: {reason}"]
    hanging.end(view)
    rollout.training.writer.resume()
    rollout.training.push(4)
    rollout.poll_repeatedly()
    assert served.live.seq == 4


def test_version_reverts_to_and_stays_at_the_delta_of_its_alias(rollout: DeltaRollout) -> None:
    for row in (1, 2, 3):
        rollout.training.push(row, value=float(row))
    rollout.poll_repeatedly()
    assert rollout.seqs() == [3]
    rollout.lines._lines[rollout.served.key].schedule.due_s = 1e9  # its alias makes it poll
    rollout.served = replace(rollout.served, at_seq=2)
    rollout.lines.follow([rollout.served])
    rollout.poll_repeatedly()
    assert (rollout.seqs(), rollout.values(1)[1:3]) == ([2], [1.0, 2.0])
    assert rollout.values(1)[3] != 3.0
    rollout.lines = rollout.started()  # another applier keeps to it
    rollout.lines.follow([rollout.served])
    rollout.training.push(1, value=5.0)
    rollout.poll_repeatedly()
    assert rollout.seqs() == [2]
    rollout.lines.follow([replace(rollout.served, at_seq=None)])
    rollout.poll_repeatedly()
    assert (rollout.seqs(), rollout.values(1)[1:4]) == ([4], [5.0, 2.0, 3.0])


def test_next_version_is_caught_up_at_the_delta_of_its_alias(rollout: DeltaRollout) -> None:
    """Covers a served version with later deltas of the line: the alias names the rows to serve."""
    rollout.training.push(1)
    compact_deltas(rollout.store, "m")
    rollout.training.push(2)
    rollout.training.push(3)
    rollout.poll_repeatedly()
    two = replace(rollout.version(2, 2), is_next=True, at_seq=2)
    rollout.lines.follow([rollout.served, two])
    rollout.poll_repeatedly()
    assert rollout.seqs() == [3, 2]
    rollout.switch(two)
    assert rollout.lines.mark_caught_up()
    rollout.training.push(2)
    rollout.poll_repeatedly()
    assert rollout.seqs() == [3, 2]  # the served version stays at its delta


def publish_new_line(store: Path) -> None:
    """Publishes version 2, which begins a line of its own."""
    ebc = collection([("t", ROWS, 4, ["f"], PoolingType.SUM)])
    assert publish(ebc, store, model="m", dtype="float32").version == 2


def test_version_whose_memory_was_released_is_not_followed(
    rollout: DeltaRollout, caplog: pytest.LogCaptureFixture
) -> None:
    rollout.training.push(1)
    compact_deltas(rollout.store, "m")
    released = replace(rollout.served, path=str(rollout.store / "m/2"), generation=9, is_next=True)
    rollout.lines.follow([rollout.served, released])
    rollout.poll_repeatedly()
    (message,) = caplog.messages
    assert "m: is not followed: " in message
    assert "is not the memory of rollout 9 any more" in message
    assert rollout.seqs() == [1]
    rollout.prepare(2)
    rollout.poll_repeatedly()
    assert rollout.seqs() == [1, 1]


def test_each_version_that_cannot_be_opened_is_logged_once(
    rollout: DeltaRollout, caplog: pytest.LogCaptureFixture
) -> None:
    released = [
        replace(rollout.served, name=name, generation=generation)
        for name, generation in (("m", 8), ("n", 9))
    ]
    rollout.lines.follow([rollout.served, *released])
    rollout.poll_repeatedly()
    first, second = caplog.messages
    assert "m: is not followed: " in first
    assert "n: is not followed: " in second


def test_version_list_round_trips_through_bytes(rollout: DeltaRollout) -> None:
    versions = [rollout.served, replace(rollout.served, generation=2, is_next=True)]
    assert from_bytes(to_bytes(versions)) == versions


def test_version_that_exceeds_memory_is_named_in_the_error(tmp_path: Path) -> None:
    training = Followed(tmp_path / "store")
    settings = ServeSettings(str(tmp_path), deltas="follow", delta_memory=1 << 20)
    version = training.models.load("m")
    needed = (1 << 20) + 4 * ROWS
    check_room(settings, version, needed)
    expected = rf"m/1: its changed rows may take {needed} bytes .* and {needed - 1} bytes of memory"
    with pytest.raises(StoreError, match=expected):
        check_room(settings, version, needed - 1)


def test_notifications_hasten_polls_of_the_named_lines_only(rollout: DeltaRollout) -> None:
    rollout.poll_repeatedly()
    assert rollout.lines.topics() == {Topic("m", 1)}
    (one,) = rollout.lines._lines.values()
    one.schedule.due_s = later = time.monotonic() + 3600
    rollout.lines.hurry({Topic("m", 2), Topic("n", 1)})
    assert one.schedule.due_s == later
    rollout.lines.hurry({Topic("m", 1)})
    assert one.schedule.due_s < later


def test_broker_connection_state_is_shared_with_workers(rollout: DeltaRollout) -> None:
    (one,) = rollout.lines._lines.values()
    rollout.lines.set_broker_connected(True)
    assert one.shared.broker_connected is None  # without the setting
    one.shared.broker_connected = SharedFlag(VersionMemory.create())
    for is_connected in (True, False):
        rollout.lines.set_broker_connected(is_connected)
        assert one.shared.describe()["notify"] == ("connected" if is_connected else "disconnected")
