"""Tests of the supervisor's delta versions: the next version gets memory for its deltas, and serves
once it has them."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from server.deltas.followed import Followed

from embedserve.config import ServeSettings
from embedserve.deltas.delta_target import make_shared_state
from embedserve.deltas.status import SharedDeltaState
from embedserve.deltas.version_memory import NAME
from embedserve.processes.rollout import delta_versions
from embedserve.processes.rollout.coordinator import RolloutCoordinator
from embedserve.processes.rollout.delta_versions import STALL_S_MAX, DeltaVersions
from embedserve.processes.rollout.messages import (
    AdminCommand,
    AliasSettings,
    Desired,
    Failure,
    LoadState,
    NameStatus,
    Operation,
    StoreEntry,
    StoreReport,
    Target,
    TargetPhase,
    WorkerStatus,
    message_to_bytes,
    report_from_bytes,
)
from embedserve.processes.rollout.served_name import RolloutVersion
from embedserve_store import ModelVersion, StoreError, compact_deltas
from embedserve_store.errors import NO_ACCESS, UnreachableError


class Server:
    """A supervisor whose only worker and applier do what the test says."""

    def __init__(self, store: Path) -> None:
        self.training = Followed(store)
        settings = ServeSettings(str(store), deltas="follow", delta_memory=1 << 20)
        one = make_shared_state(settings, self.training.models.load("m"))
        self.delta_versions = DeltaVersions(settings, {"m": one})
        self.notifications = 0
        self.delta_versions.on_change = self._count_notification
        self.now_s = 1.0  # at 0.0 a stall would have no start
        self.target = Target(0, "", 0, TargetPhase.SERVE)
        self.may_listen: dict[int, bool] = {}
        self.adopted_versions: list[int] = []
        served = {"m": RolloutVersion.of(one.live.version)}
        self.coordinator = RolloutCoordinator(served, self._adopt, self.delta_versions)
        self.coordinator.send = self._send
        self.coordinator.on_worker_start(0, WorkerStatus({"m": NameStatus(1)}))
        self.training.push(1)
        for number in (2, 3):
            assert compact_deltas(store, "m").version == number
            self.training.push(number)

    def _count_notification(self) -> None:
        self.notifications += 1

    def _adopt(self, name: str, path: str | None) -> None:
        version = self.delta_versions.activate(name)
        assert version is not None
        assert str(version.path) == path
        self.adopted_versions.append(version.manifest.version)

    def _send(self, worker: int, desired: Desired) -> None:
        self.target = desired.names["m"]
        self.may_listen[worker] = desired.may_listen

    def report_store(self, number: int, at_seq: int | None = None) -> None:
        path = str(self.training.deltas.parents[1] / str(number))
        entry = StoreEntry(number, AliasSettings(number, at_seq=at_seq), path)
        self.coordinator.on_report(0, StoreReport({"m": entry}))

    def report_prepared(self) -> None:
        """Reports that the worker has prepared its target."""
        status = NameStatus(1, self.target.generation, LoadState.PREPARED)
        self.coordinator.on_report(0, WorkerStatus({"m": status}))

    @property
    def next(self) -> SharedDeltaState:
        return [*self.delta_versions.states()][-1]

    @property
    def failure(self) -> Failure:
        """Returns why a version is not served, with the reason "" if there is no failure."""
        return self.target.failure or Failure(0, "", is_final=False)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    made = Server(tmp_path / "store")
    monkeypatch.setattr(delta_versions, "monotonic", lambda: made.now_s)
    yield made
    made.training.writer.close()


def mapped_memories() -> int:
    gc.collect()
    return len({line.split()[4] for line in _maps() if NAME in line})


def _maps() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


@pytest.mark.parametrize(
    ("error", "is_final"), [(UnreachableError("no file left"), False), (StoreError("cut"), True)]
)
def test_version_that_fails_to_open_is_retried_unless_failure_is_final(
    server: Server, monkeypatch: pytest.MonkeyPatch, error: StoreError, is_final: bool
) -> None:
    def fail(path: str) -> ModelVersion:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(delta_versions, "open_folder", fail)
        server.report_store(2)
    assert (server.failure.reason, server.failure.is_final) == (str(error), is_final)
    server.report_store(2)
    assert server.target.version == (1 if is_final else 2)


def test_rollout_switches_once_the_version_has_its_deltas(server: Server) -> None:
    server.report_store(2)
    assert (server.target.version, server.target.phase) == (2, TargetPhase.PREPARE)
    assert server.target.memory == server.next.live.memory.path
    assert [(one.is_next, one.is_switching) for one in server.delta_versions.targets()] == [
        (False, False),
        (True, False),
    ]
    server.report_prepared()
    assert [one.is_switching for one in server.delta_versions.targets()] == [False, True]
    server.coordinator.advance_rollout()
    assert server.target.phase is TargetPhase.PREPARE
    notifications, two = server.notifications, server.next
    two.caught_up.set(True)
    server.coordinator.advance_rollout()
    assert (server.target.version, server.target.phase) == (2, TargetPhase.SERVE)
    assert server.delta_versions.served == {"m": two}
    (following,) = server.delta_versions.targets()
    assert (following.key, following.is_next) == (("m", 1), False)
    assert (server.adopted_versions, server.notifications) == ([2], notifications + 1)


def test_memory_of_the_replaced_version_is_unmapped(server: Server) -> None:
    before = mapped_memories()
    server.report_store(2)
    assert mapped_memories() == before + 1
    server.next.caught_up.set(True)
    server.report_prepared()
    assert server.adopted_versions == [2]
    assert mapped_memories() == before


def test_a_worker_with_the_rows_of_an_earlier_rollout_does_not_listen(server: Server) -> None:
    """Covers a worker that was forked with version 1, while the others switched to 2 and back, to
    new memory."""
    for number in (2, 1):
        server.report_store(number)
        server.next.caught_up.set(True)
        server.report_prepared()
    assert server.adopted_versions == [2, 1]
    for generation in (0, 1):
        status = NameStatus(1, rows_generation=generation)
        server.coordinator.on_worker_start(1, WorkerStatus({"m": status}))
        assert server.may_listen[1] is False
    loading = NameStatus(1, 2, LoadState.LOADING)
    server.coordinator.on_report(1, WorkerStatus({"m": loading}))
    assert server.coordinator.is_preparing(1)
    assert server.may_listen[1] is False
    server.coordinator.on_report(1, WorkerStatus({"m": NameStatus(1, rows_generation=2)}))
    assert not server.coordinator.is_preparing(1)
    assert server.may_listen[1] is True


def test_newly_found_version_replaces_the_version_being_prepared(server: Server) -> None:
    before = mapped_memories()
    server.report_store(2)
    two = server.target
    server.report_store(3)
    assert (server.target.version, server.target.phase) == (3, TargetPhase.PREPARE)
    assert server.target.generation != two.generation
    assert server.next.live.version.manifest.version == 3
    assert mapped_memories() == before + 1
    server.report_store(1)
    assert len(server.delta_versions.targets()) == 1
    assert mapped_memories() == before


def test_held_model_keeps_its_version(server: Server) -> None:
    hold = server.delta_versions.served["m"].hold
    hold.set(True)
    server.report_store(2)
    assert "its deltas are held" in server.failure.reason
    assert not server.failure.is_final
    hold.set(False)
    server.report_store(2)
    assert len(server.delta_versions.targets()) == 2
    hold.set(True)  # while it is prepared
    server.coordinator.advance_rollout()
    assert (server.target.version, "its deltas are held" in server.failure.reason) == (1, True)
    assert len(server.delta_versions.targets()) == 1


def test_hold_before_the_switch_prevents_the_switch(server: Server) -> None:
    server.report_store(2)
    server.next.caught_up.set(True)
    server.delta_versions.served["m"].hold.set(True)
    server.report_prepared()
    assert (server.target.phase, server.adopted_versions) == (TargetPhase.PREPARE, [])


def stall(server: Server, reason: str) -> None:
    server.next.status.stall(reason)
    server.coordinator.advance_rollout()
    server.now_s += STALL_S_MAX + 1
    server.coordinator.advance_rollout()


def test_version_with_damaged_delta_line_fails(server: Server) -> None:
    server.delta_versions.served["m"].live.commit(2, 9)
    server.report_store(2)
    stall(server, f"{NO_ACCESS}: the host does not respond")  # nothing is known to be wrong
    assert server.failure.reason == ""
    stall(server, "delta 4 is damaged")
    assert server.failure.reason == "delta 4 is damaged"
    assert server.failure.is_final
    assert len(server.delta_versions.targets()) == 1


def test_stall_that_ends_within_its_limit_does_not_fail_the_version(server: Server) -> None:
    server.delta_versions.served["m"].live.commit(2, 9)
    server.report_store(2)
    for _ in range(2):
        server.next.status.stall("its files are on their way")
        server.coordinator.advance_rollout()
        server.now_s += STALL_S_MAX
        server.coordinator.advance_rollout()
        now = server.next.status.read()
        server.next.status.write(replace(now, state="following", reason=""))
        server.coordinator.advance_rollout()
    assert server.failure.reason == ""


def test_version_stalled_at_the_served_delta_does_not_fail(server: Server) -> None:
    server.delta_versions.served["m"].live.commit(2, 1)
    server.report_store(2)  # it has the rows after delta 1
    stall(server, "delta 2 is damaged")
    assert (server.target.phase, server.failure.reason) == (TargetPhase.PREPARE, "")


def test_version_that_stalls_once_it_has_caught_up_does_not_fail(server: Server) -> None:
    server.delta_versions.served["m"].live.commit(2, 9)
    server.report_store(2)
    server.next.caught_up.set(True)
    stall(server, "delta 4 is damaged")
    assert (server.target.phase, server.failure.reason) == (TargetPhase.PREPARE, "")


def test_version_without_memory_for_changed_rows_fails(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_versions, "available_bytes", lambda: 1000)
    server.report_store(2)
    assert "and 1000 bytes of memory are available" in server.failure.reason
    assert server.target.version == 1


def test_forked_process_drops_versions_that_it_does_not_use(server: Server) -> None:
    server.report_store(2)
    assert [one.is_next for one in server.delta_versions.take()] == [False, True]
    assert (server.delta_versions.served, [*server.delta_versions.states()]) == ({}, [])


def at_seqs(server: Server) -> dict[str, int | None]:
    """Returns the last delta that each followed version may have, by the number of its folder."""
    return {Path(one.path).name: one.at_seq for one in server.delta_versions.targets()}


def test_delta_limit_stays_until_the_next_version_serves(server: Server) -> None:
    assert at_seqs(server) == {"1": None}
    server.report_store(1, at_seq=2)
    assert (at_seqs(server), server.notifications) == ({"1": 2}, 1)
    server.report_store(1, at_seq=2)
    assert server.notifications == 1  # nothing new
    server.report_store(2, at_seq=3)
    assert at_seqs(server) == {"1": 2, "2": 3}
    server.report_store(2)
    assert at_seqs(server) == {"1": 2, "2": None}
    server.report_prepared()
    server.next.caught_up.set(True)
    server.coordinator.advance_rollout()
    assert (server.adopted_versions, at_seqs(server)) == ([2], {"2": None})
    server.delta_versions.prepare(
        "m", RolloutVersion(1, str(server.training.deltas.parents[1] / "1"))
    )
    assert at_seqs(server) == {"1": None, "2": None}  # it comes back without its former delta


def test_queued_version_keeps_its_delta_limit(server: Server) -> None:
    for number, at_seq in ((2, 3), (3, 4)):
        path = str(server.training.deltas.parents[1] / str(number))
        command = AdminCommand(Operation.LOAD, "m", number, path, at_seq)
        server.coordinator.on_report(0, command)
    server.report_prepared()
    server.next.caught_up.set(True)
    server.coordinator.advance_rollout()
    assert (server.adopted_versions, at_seqs(server)) == ([2], {"2": 3, "3": 4})


def test_a_server_starts_at_the_delta_of_its_alias(server: Server) -> None:
    opened = replace(server.training.models.load("m", 1), at_seq=2)
    made = make_shared_state(ServeSettings("", deltas="follow", delta_memory=1 << 20), opened)
    started = DeltaVersions(ServeSettings(""), {"m": made})
    assert [one.at_seq for one in started.targets()] == [2]
    started.set_at_seq("m", 1, None)
    assert [one.at_seq for one in started.targets()] == [None]
    started.set_at_seq("m", 1, 4)
    started.remove("m")
    started.served["m"] = made
    assert [one.at_seq for one in started.targets()] == [None]


def test_admin_load_sets_the_delta_limit_of_its_version(server: Server) -> None:
    path = str(server.training.deltas.parents[1] / "2")
    command = AdminCommand(Operation.LOAD, "m", 2, path, at_seq=3)
    received = report_from_bytes(message_to_bytes(command))
    assert isinstance(received, AdminCommand)
    server.coordinator.on_report(0, received)
    assert at_seqs(server) == {"1": None, "2": 3}


def test_removed_name_is_no_longer_followed(server: Server) -> None:
    notifications = server.notifications
    server.delta_versions.remove("m")
    server.delta_versions.remove("films")
    assert (server.delta_versions.targets(), server.notifications) == ({}, notifications + 1)


def test_version_without_deltas_gets_no_memory() -> None:
    followed = DeltaVersions(ServeSettings(store=""), {})
    version = RolloutVersion(2, "/store/m/2", 1)
    assert followed.prepare("m", version) is version
    assert followed.request_switch()
    assert followed.activate("m") is None


def test_version_that_does_not_exist_fails(server: Server) -> None:
    server.report_store(7)
    assert "version 7 does not exist" in server.failure.reason
