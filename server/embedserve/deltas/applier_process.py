"""Loop of the applier: looks for deltas of all followed models, in a process of its own.

It may be killed at any instruction. Its successor continues after the last committed delta. It
sends the supervisor heartbeats: while it waits, and after each file that it reads.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from embedserve.config import ServeSettings
from embedserve.config_checks import delta_poll_s
from embedserve.deltas.follower import DeltaFollower
from embedserve.deltas.memory import memory_bytes
from embedserve.deltas.status import FollowedModel
from embedserve_store.deltas.delta_line import DeltaLine
from embedserve_store.model_store import ModelStore
from embedserve_store.model_version import ModelVersion

PROCESS_NAME = "delta-applier"
RETRY_S_MAX = 5.0
"""Seconds between two looks, at most, while no delta can be applied."""
BEAT_S = 1.0
"""Seconds between two heartbeats, at least: each wakes the supervisor, which itself checks all
processes once in a second."""


def run_applier(
    settings: ServeSettings,
    versions: Mapping[str, ModelVersion],
    deltas: Mapping[str, FollowedModel],
    supervisor: socket.socket,
) -> None:
    """Applies deltas until SIGTERM, or until the supervisor is gone.

    Sends a heartbeat at once when every model has looked for the first time.

    Args:
        versions, deltas: versions and their memory, by served name.
    """
    with suppress(OSError):  # ps shows which process it is
        Path("/proc/self/comm").write_text(PROCESS_NAME)
    threading.Thread(target=_end_with, args=(supervisor,), daemon=True).start()
    heartbeat = Heartbeat(supervisor)
    models = BeatingStore(settings, heartbeat)
    followers = []
    for name, followed in deltas.items():
        version = versions[name]
        line = DeltaLine(models, version.manifest)
        room = memory_bytes(settings, version)
        followers.append(DeltaFollower(name, line, followed, room))
    is_told, wait_s = False, delta_poll_s(settings)
    while True:
        looks = [follower.look() for follower in followers]
        states = [followed.status.read() for followed in deltas.values()]
        if not is_told and all(state.is_looked for state in states):
            is_told = True
            heartbeat.send()
        heartbeat.beat()
        if not any(looks):
            has_failed = all(state.reason for state in states)
            least_s = delta_poll_s(settings)
            wait_s = min(2 * wait_s, max(RETRY_S_MAX, least_s)) if has_failed else least_s
            heartbeat.wait(wait_s)


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
        with contextlib.suppress(OSError):
            self._supervisor.send(b"\n", socket.MSG_DONTWAIT)

    def wait(self, seconds: float) -> None:
        """Sends heartbeats for ``seconds``."""
        ends_s = time.monotonic() + seconds
        while (left_s := ends_s - time.monotonic()) > 0:
            time.sleep(min(left_s, BEAT_S))
            self.beat()


class BeatingStore(ModelStore):
    """Store that sends a heartbeat after each file, so that a long step does not count as hung."""

    def __init__(self, settings: ServeSettings, heartbeat: Heartbeat) -> None:
        super().__init__(settings.store, Path(settings.cache) if settings.cache else None)
        self._heartbeat = heartbeat

    def read_beside(self, model: str, what: str, path: str) -> bytes:
        data = super().read_beside(model, what, path)
        self._heartbeat.beat()
        return data


def _end_with(supervisor: socket.socket) -> None:
    """Ends this process when the supervisor's end of the channel is closed."""
    supervisor.recv(1)
    os._exit(0)
