"""Loop of the applier: polls for deltas of all followed versions, in a process of its own.

It may be killed at any instruction. Its successor continues after the last committed delta. It
sends the supervisor heartbeats: while it waits, and after each file that it reads.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Set
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

from embedserve.config import ServeSettings
from embedserve.config_checks import delta_poll_s
from embedserve.deltas.delta_target import DeltaTarget, from_bytes
from embedserve.deltas.followed_lines import FollowedLines, shortest_poll_s
from embedserve.deltas.read_changes import CheckRows
from embedserve.deltas.status import SharedDeltaState
from embedserve_store.deltas.signing import TrustedKeys
from embedserve_store.model_store import ModelStore
from embedserve_store.model_version import ModelVersion
from embedserve_store.transfer.stored_version import SMALL_FILE_BYTES_MAX

if TYPE_CHECKING:
    from embedserve.deltas.delta_subscriber import DeltaSubscriber
    from embedserve_store.deltas.notify.broker import Topic

logger = logging.getLogger(__name__)

PROCESS_NAME = "delta-applier"
NICENESS = 3
"""Added to the niceness of the process. Where both want a core, lookups get two thirds of it."""
BEAT_S = 1.0
"""Shortest interval of heartbeats: each wakes the supervisor, which itself checks all processes
once in a second."""

ApplierEvent: TypeAlias = "bytes | Set[Topic]"
"""A message of the supervisor, or topics whose lines may have new deltas. It ends the wait between
two polls."""


def run_applier(
    settings: ServeSettings,
    versions: dict[DeltaTarget, SharedDeltaState],
    open_version: Callable[[str], ModelVersion],
    supervisor: socket.socket,
    check_on_device: CheckRows | None = None,
    keys: TrustedKeys | None = None,
) -> None:
    """Applies deltas until SIGTERM, or until the supervisor is gone.

    Sends a heartbeat immediately when every served version has the deltas that were there at its
    start, and when a next version may serve. The supervisor sends which versions are followed, when
    that changes.

    Args:
        versions: versions at the start, and their memory. It is emptied, so that memory is given
            back once a version is not followed any more.
        open_version: opens the version in a folder.
        check_on_device: as in DeltaFollower.
        keys: public keys that may have signed a delta; None if no signature is needed.
    """
    with suppress(OSError):  # ps shows which process it is
        Path("/proc/self/comm").write_text(PROCESS_NAME)
    os.nice(NICENESS)
    events: SimpleQueue[ApplierEvent] = SimpleQueue()
    threading.Thread(target=_read_messages, args=(supervisor, events), daemon=True).start()
    heartbeat = Heartbeat(supervisor)
    store = BeatingStore(settings, heartbeat)
    targets = [*versions]
    inherited = {one.key: versions.pop(one) for one in targets}
    lines = FollowedLines(settings, store, open_version, inherited, check_on_device, keys)
    lines.follow(targets)
    subscriber = _subscriber(settings, events)
    is_announced = False
    while True:
        if subscriber is not None:
            subscriber.follow(lines.topics())
            lines.set_broker_connected(subscriber.is_connected)
        due_s = lines.poll_due()
        if (not is_announced and lines.are_ready()) or lines.mark_caught_up():
            is_announced = True
            heartbeat.send()
        heartbeat.beat()
        found = heartbeat.wait(due_s - time.monotonic(), events)
        if messages := [one for one in found if isinstance(one, bytes)]:
            lines.follow(from_bytes(messages[-1]))
        if topics := {topic for one in found if not isinstance(one, bytes) for topic in one}:
            lines.hurry(topics)


def _subscriber(
    settings: ServeSettings, events: SimpleQueue[ApplierEvent]
) -> DeltaSubscriber | None:
    """Returns what adds notifications to ``events``; None without settings.delta_notify."""
    if not settings.delta_notify:
        return None
    from embedserve.deltas.delta_subscriber import DeltaSubscriber

    pace_s = shortest_poll_s(delta_poll_s(settings))
    subscriber = DeltaSubscriber(settings.delta_notify, events.put, pace_s)
    subscriber.start()
    return subscriber


def _read_messages(supervisor: socket.socket, events: SimpleQueue[ApplierEvent]) -> None:
    """Adds what the supervisor sends to ``events``. Ends this process when the supervisor's end of
    the channel is closed."""
    with suppress(OSError), supervisor.makefile("rb") as lines:
        for line in lines:
            events.put(line)
    os._exit(0)


class Heartbeat:
    """Heartbeats of the applier, each a byte on the channel to the supervisor."""

    def __init__(self, supervisor: socket.socket) -> None:
        self._supervisor = supervisor
        self._sent_s = 0.0

    def beat(self) -> None:
        """Sends a heartbeat if the last one was BEAT_S ago."""
        if time.monotonic() - self._sent_s >= BEAT_S:
            self.send()

    def send(self) -> None:
        self._sent_s = time.monotonic()
        # A full channel has heartbeats that a stopped supervisor has still to read.
        with suppress(OSError):
            self._supervisor.send(b"\n", socket.MSG_DONTWAIT)

    def wait(self, seconds: float, events: SimpleQueue[ApplierEvent]) -> list[ApplierEvent]:
        """Sends heartbeats for ``seconds``, or until there are events. Returns these."""
        ends_s = time.monotonic() + seconds
        found: list[ApplierEvent] = []
        while not found and (left_s := ends_s - time.monotonic()) > 0:
            with suppress(Empty):
                found.append(events.get(timeout=min(left_s, BEAT_S)))
            self.beat()
        while not events.empty():
            found.append(events.get())
        return found


class BeatingStore(ModelStore):
    """Store that sends heartbeats after each file and while it lists files, so that a long step
    does not count as hung."""

    def __init__(self, settings: ServeSettings, heartbeat: Heartbeat) -> None:
        super().__init__(settings.store, settings.cache)
        self._heartbeat = heartbeat

    def names_beside(self, model: str, path: str) -> Iterator[str]:
        for name in super().names_beside(model, path):
            self._heartbeat.beat()
            yield name

    def read(self, path: str, bytes_max: int = SMALL_FILE_BYTES_MAX) -> bytes:
        data = super().read(path, bytes_max)
        self._heartbeat.beat()
        return data
