"""Tests of the lines that the applier follows: that of the served version and that of the next
one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from server.deltas.followed import ROWS, Followed
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from embedserve.config import ServeSettings
from embedserve.deltas.applier_process import PollSchedule
from embedserve.deltas.bounded_line import BoundedLine, LastSeq
from embedserve.deltas.delta_target import (
    DeltaTarget,
    check_room,
    from_bytes,
    make_shared_state,
    open_followed,
    to_bytes,
)
from embedserve.deltas.followed_lines import FollowedLines
from embedserve.deltas.follower import DeltaFollower
from embedserve.deltas.rows_reader import RowsReader
from embedserve.deltas.shared_flag import SharedFlag
from embedserve.deltas.status import SharedDeltaState
from embedserve_store import compact_deltas, publish
from embedserve_store.deltas.notify.channel import Topic
from embedserve_store.errors import StoreError


class Moving:
    """A store whose version 1 is served, and the versions that are prepared beside it."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"
        self.training = Followed(self.store)
        self.settings = ServeSettings(str(self.store), deltas="follow", delta_memory=1 << 20)
        self.models: dict[int, SharedDeltaState] = {}
        self.served = self.version(1, 0)
        self.lines = self.started()
        self.lines.follow([self.served])

    def version(self, number: int, generation: int) -> DeltaTarget:
        """Creates the memory of a version, like the supervisor."""
        version = self.training.models.load("m", number)
        made = self.models[number] = make_shared_state(self.settings, version, generation)
        return DeltaTarget("m", str(version.path), made.memory.path, generation)

    def started(self) -> FollowedLines:
        """Returns an applier that has inherited no state."""

        def make(version: DeltaTarget, model: SharedDeltaState, last_seq: LastSeq) -> PollSchedule:
            def follower() -> DeltaFollower:
                line = BoundedLine(
                    self.training.models, model.live.version.manifest, None, last_seq
                )
                return DeltaFollower(version.name, line, model, 1 << 20)

            return PollSchedule(follower, model.status, 0.0)

        return FollowedLines(make, self._open, {})

    def _open(self, version: DeltaTarget) -> SharedDeltaState:
        opened = self.training.models.load("m", int(Path(version.path).name))
        return open_followed(self.settings, opened, version.memory, version.generation)

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
        found = reader.newest(np.arange(ROWS), np.array([ROWS]), view)
        start, size = live.tables.offsets["t"], live.tables.tables["t"].row_bytes
        rows = [live.tables.data[start + size * row :][:4].view(np.float32)[0] for row in found]
        reader.end(view)
        return [float(value) for value in rows]

    def until_looked(self) -> None:
        for _ in range(10):
            self.lines.poll_due()


@pytest.fixture
def moving(tmp_path: Path) -> Iterator[Moving]:
    made = Moving(tmp_path)
    yield made
    made.training.writer.close()


def test_a_compacted_version_gets_what_came_after_it(moving: Moving) -> None:
    moving.training.push(1, 2, value=3.0)
    compact_deltas(moving.store, "m")
    moving.training.push(2, value=4.0)
    moving.until_looked()
    two = moving.prepare(2)
    assert moving.seqs() == [2, 1]
    moving.until_looked()
    assert moving.seqs() == [2, 2]
    assert moving.values(1) == moving.values(2)
    assert moving.values(2)[1:3] == [3.0, 4.0]
    assert not moving.lines.mark_caught_up()  # not all workers have prepared it
    moving.switch(two)
    assert moving.lines.mark_caught_up()
    assert moving.models[2].caught_up.is_set
    assert not moving.lines.mark_caught_up()  # only once


def test_the_served_version_is_never_ahead_of_one_that_may_serve(
    moving: Moving, monkeypatch: pytest.MonkeyPatch
) -> None:
    moving.training.push(1)
    compact_deltas(moving.store, "m")
    two = moving.prepare(2)
    moving.until_looked()
    moving.switch(two)
    assert moving.lines.mark_caught_up()
    look, seen = DeltaFollower.poll_once, []

    def looked(follower: DeltaFollower) -> bool:
        has_more = look(follower)
        seen.append(moving.seqs())
        return has_more

    monkeypatch.setattr(DeltaFollower, "poll_once", looked)
    for value in range(5):
        moving.training.push(1, value=float(value))
        moving.lines.poll_due()
    moving.until_looked()
    assert moving.seqs() == [6, 6]
    assert all(one <= two for one, two in seen)
    assert any(one < two for one, two in seen)
    # An applier that restarts keeps to that order.
    moving.lines = moving.started()
    moving.switch(two)
    moving.training.push(1)
    seen.clear()
    moving.until_looked()
    assert moving.seqs() == [7, 7]
    assert seen[0] == [6, 6]
    # Once the version serves, the line continues with it alone.
    moving.lines.follow([replace(two, is_next=False)])
    moving.training.push(1)
    moving.until_looked()
    assert moving.seqs() == [7, 8]


def test_a_version_that_is_behind_does_not_serve(moving: Moving) -> None:
    moving.training.push(1)
    compact_deltas(moving.store, "m")
    moving.training.push(2)
    moving.until_looked()
    repair = moving.training.damage(2)
    moving.switch(moving.prepare(2))
    moving.until_looked()
    assert not moving.lines.mark_caught_up()
    assert moving.models[2].status.read().state == "stalled"
    moving.training.push(3)
    moving.until_looked()
    assert moving.seqs() == [3, 1]  # the served version continues
    repair()
    moving.lines.follow([moving.served])
    moving.switch(moving.prepare(2))
    moving.until_looked()
    assert moving.lines.mark_caught_up()
    assert moving.seqs() == [3, 3]


def test_a_version_past_the_damage_may_serve(moving: Moving) -> None:
    moving.training.push(1)
    moving.training.push(2)
    compact_deltas(moving.store, "m")
    moving.training.damage(2)
    moving.until_looked()
    assert moving.seqs() == [1]
    moving.switch(moving.prepare(2))
    moving.until_looked()
    assert moving.lines.mark_caught_up()
    assert moving.seqs() == [1, 2]


def test_of_another_line_all_that_was_there_is_applied_first(moving: Moving) -> None:
    moving.training.push(1)
    moving.until_looked()
    publish_anew(moving.store)
    two = moving.prepare(2)
    moving.switch(two)
    assert not moving.lines.mark_caught_up()  # it has not polled
    moving.models[1].hold.set(True)
    moving.models[2].hold.set(True)
    moving.until_looked()
    assert not moving.lines.mark_caught_up()  # it is held
    moving.models[2].hold.set(False)
    moving.until_looked()
    assert moving.lines.mark_caught_up()
    assert moving.seqs() == [1, 0]
    moving.models[1].hold.set(False)
    moving.training.push(2)
    moving.until_looked()
    assert moving.seqs() == [2, 0]  # no seq of another line bounds it


def test_a_hold_that_comes_with_the_switch_is_kept(moving: Moving) -> None:
    moving.training.push(1)
    compact_deltas(moving.store, "m")
    two = moving.prepare(2)
    moving.until_looked()
    moving.models[1].hold.set(True)
    moving.lines.follow([replace(two, is_next=False)])
    moving.training.push(1)
    moving.until_looked()
    assert (moving.models[2].status.read().state, moving.seqs()) == ("held", [1, 1])


def test_a_version_stays_at_the_delta_of_its_alias_and_goes_back_to_it(moving: Moving) -> None:
    for row in (1, 2, 3):
        moving.training.push(row, value=float(row))
    moving.until_looked()
    assert moving.seqs() == [3]
    moving.served = replace(moving.served, at_seq=2)
    moving.lines.follow([moving.served])
    moving.until_looked()
    assert (moving.seqs(), moving.values(1)[1:3]) == ([2], [1.0, 2.0])
    assert moving.values(1)[3] != 3.0
    moving.lines = moving.started()  # another applier keeps to it
    moving.lines.follow([moving.served])
    moving.training.push(1, value=5.0)
    moving.until_looked()
    assert moving.seqs() == [2]
    moving.lines.follow([replace(moving.served, at_seq=None)])
    moving.until_looked()
    assert (moving.seqs(), moving.values(1)[1:4]) == ([4], [5.0, 2.0, 3.0])


def test_the_next_version_serves_at_the_delta_of_its_alias(moving: Moving) -> None:
    """Covers a served version with later deltas of the line: the alias names the rows to serve."""
    moving.training.push(1)
    compact_deltas(moving.store, "m")
    moving.training.push(2)
    moving.training.push(3)
    moving.until_looked()
    two = replace(moving.version(2, 2), is_next=True, at_seq=2)
    moving.lines.follow([moving.served, two])
    moving.until_looked()
    assert moving.seqs() == [3, 2]
    moving.switch(two)
    assert moving.lines.mark_caught_up()
    moving.training.push(2)
    moving.until_looked()
    assert moving.seqs() == [3, 2]  # the served version stays at its delta


def publish_anew(store: Path) -> None:
    """Publishes version 2, which begins a line of its own."""
    config = EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=4, name="t", feature_names=["f"])
    ebc = EmbeddingBagCollection(tables=[config], device=torch.device("cpu"))
    assert publish(ebc, store, model="m", dtype="float32").version == 2


def test_a_version_whose_memory_is_gone_is_not_followed(
    moving: Moving, caplog: pytest.LogCaptureFixture
) -> None:
    moving.training.push(1)
    compact_deltas(moving.store, "m")
    gone = replace(moving.served, path=str(moving.store / "m/2"), generation=9, is_next=True)
    moving.lines.follow([moving.served, gone])
    moving.until_looked()
    (message,) = caplog.messages
    assert "m: is not followed: " in message
    assert "is not the memory of rollout 9 any more" in message
    assert moving.seqs() == [1]
    moving.prepare(2)
    moving.until_looked()
    assert moving.seqs() == [1, 1]


def test_messages_are_read_as_they_were_written(moving: Moving) -> None:
    versions = [moving.served, replace(moving.served, generation=2, is_next=True)]
    assert from_bytes(to_bytes(versions)) == versions


def test_a_version_without_room_is_named(tmp_path: Path) -> None:
    training = Followed(tmp_path / "store")
    settings = ServeSettings(str(tmp_path), deltas="follow", delta_memory=1 << 20)
    version = training.models.load("m")
    needed = (1 << 20) + 4 * ROWS
    check_room(settings, version, needed)
    said = rf"m/1: its changed rows may take {needed} bytes .* and {needed - 1} bytes of memory"
    with pytest.raises(StoreError, match=said):
        check_room(settings, version, needed - 1)


def test_notifications_hurry_the_lines_that_they_name(moving: Moving) -> None:
    moving.until_looked()
    assert moving.lines.topics() == {Topic("m", 1)}
    (one,) = moving.lines._followed.values()
    one.schedule.due_s = later = time.monotonic() + 3600
    moving.lines.hurry({Topic("m", 2), Topic("n", 1)})
    assert one.schedule.due_s == later
    moving.lines.hurry({Topic("m", 1)})
    assert one.schedule.due_s < later


def test_workers_are_told_of_the_broker(moving: Moving) -> None:
    (one,) = moving.lines._followed.values()
    moving.lines.set_notified(True)
    assert one.model.notify is None  # without the setting
    one.model = replace(one.model, notify=SharedFlag())
    for is_connected in (True, False):
        moving.lines.set_notified(is_connected)
        assert one.model.describe()["notify"] == ("connected" if is_connected else "disconnected")
