"""Tests of the applier process: it applies pushed deltas until its supervisor ends."""

import os
import select
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import pytest
from server.deltas.followed import Followed
from waits import wait_until

from embedserve.config import ServeSettings
from embedserve.deltas import applier_process
from embedserve.deltas.applier_process import (
    NICENESS,
    ApplierEvent,
    BeatingStore,
    Heartbeat,
    run_applier,
)
from embedserve.deltas.delta_target import DeltaTarget
from embedserve.processes.open_store import open_folder
from embedserve_store import DeltaLine
from embedserve_store.deltas.notify.broker import Topic
from embedserve_store.deltas.signing import TrustedKeys

WAIT_S_MAX = 60
NICENESS_MAX = 19


class ApplierProcess:
    """The applier of a store, forked from this process."""

    def __init__(
        self,
        followed: Followed,
        store: Path,
        poll_s: float = 0.0,
        notify: str = "",
        keys: TrustedKeys | None = None,
    ) -> None:
        self.supervisor, theirs = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            self.supervisor.close()
            settings = ServeSettings(
                store=str(store), deltas="follow", delta_poll_s=poll_s, delta_notify=notify
            )
            versions = {DeltaTarget("m", "", "", 0): followed.shared}
            run_applier(settings, versions, open_folder, theirs, keys=keys)
        theirs.close()
        self.supervisor.settimeout(WAIT_S_MAX)

    def wait_for_exit(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        self.supervisor.close()
        return os.waitstatus_to_exitcode(status)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert self.wait_for_exit() == -signal.SIGKILL


@pytest.mark.parametrize("is_terminated", [False, True])
def test_deltas_are_applied_until_sigterm_or_supervisor_exit(
    tmp_path: Path, is_terminated: bool
) -> None:
    followed = Followed(tmp_path / "store")
    followed.push(1)
    applier = ApplierProcess(followed, tmp_path / "store")
    while not followed.status.read().is_ready:
        assert applier.supervisor.recv(1) == b"\n"  # a heartbeat follows the first poll
    assert followed.live.seq == 1
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, applier.pid) == min(own + NICENESS, NICENESS_MAX)
    followed.push(2)
    wait_until(lambda: followed.live.seq == 2)
    assert followed.status.read().applied.seq <= 2
    if is_terminated:
        os.kill(applier.pid, signal.SIGTERM)
    else:
        applier.supervisor.shutdown(socket.SHUT_RDWR)
    assert applier.wait_for_exit() == (-signal.SIGTERM if is_terminated else 0)


def test_hold_survives_applier_restart(tmp_path: Path) -> None:
    followed = Followed(tmp_path / "store")
    for seq in (1, 2):
        applier = ApplierProcess(followed, tmp_path / "store")
        followed.hold.set(True)
        wait_until(lambda: followed.state == "held")
        followed.push(seq)
        wait_until(lambda: followed.status.read().wanted_seq == seq)  # noqa: B023
        applier.kill()
        followed.status.stall("it was killed")
        assert followed.live.seq == 0
    applier = ApplierProcess(followed, tmp_path / "store")
    wait_until(lambda: followed.state == "held")
    followed.hold.set(False)
    wait_until(lambda: followed.live.seq == 2)
    applier.kill()


def test_idle_applier_sends_heartbeats(tmp_path: Path) -> None:
    followed = Followed(tmp_path / "store")
    applier = ApplierProcess(followed, tmp_path / "store", poll_s=3600.0)
    beats = [applier.supervisor.recv(1) for _ in range(4)]
    assert beats == [b"\n"] * 4
    applier.kill()


class Clock:
    """Replaces the module time."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@dataclass
class Beating:
    """A store whose reads send heartbeats, the socket that gets them, and their clock."""

    followed: Followed
    store: BeatingStore
    beats: socket.socket
    clock: Clock


@pytest.fixture
def beating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Beating]:
    followed, clock = Followed(tmp_path / "store"), Clock()
    followed.push(1)
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(applier_process, "time", clock)
    with ours, theirs:
        store = BeatingStore(ServeSettings(store=str(tmp_path / "store")), Heartbeat(theirs))
        yield Beating(followed, store, ours, clock)


def test_heartbeats_of_file_reads_are_limited_to_one_per_second(beating: Beating) -> None:
    line = DeltaLine(beating.store, beating.followed.models.load("m").manifest)
    delta, _ = line.manifest(1)
    assert beating.beats.recv(64) == b"\n"
    for now_s, has_beat in ((100.9, False), (101.0, True), (101.5, False), (102.5, True)):
        beating.clock.now_s = now_s
        assert len(list(line.rows(delta))) == 1
        ready, _, _ = select.select([beating.beats], [], [], 0)
        assert bool(ready) == has_beat
        assert not ready or beating.beats.recv(64) == b"\n"


def test_heartbeats_are_sent_while_a_line_is_listed(beating: Beating) -> None:
    beating.followed.push(2)
    beating.beats.setblocking(False)
    beats = []
    for _ in beating.store.names_beside("m", "deltas/1"):
        beats.append(beating.beats.recv(64))
        beating.clock.now_s += 1.0
    assert beats == [b"\n"] * 4  # two deltas, of a manifest and a file each


def test_heartbeats_do_not_block_or_fail_if_unread() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        heartbeat = Heartbeat(theirs)
        for _ in range(10_000):
            heartbeat.send()
    heartbeat.send()  # the supervisor's end is closed
    theirs.close()


def test_events_end_the_wait_and_are_returned_once() -> None:
    ours, theirs = socket.socketpair()
    events: SimpleQueue[ApplierEvent] = SimpleQueue()
    with ours, theirs:
        heartbeat = Heartbeat(theirs)
        assert heartbeat.wait(0, events) == []
        events.put({Topic("m", 1)})
        events.put(b"message")
        assert heartbeat.wait(3600, events) == [{Topic("m", 1)}, b"message"]
        assert heartbeat.wait(0, events) == []
        events.put(frozenset())
        assert heartbeat.wait(0, events) == [frozenset()]
