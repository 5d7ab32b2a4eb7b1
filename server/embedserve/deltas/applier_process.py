"""Loop of the applier: looks for deltas of all followed models, in a process of its own.

It may be killed at any instruction. Its successor continues after the last committed delta. It
sends the supervisor heartbeats: while it waits, and after each file that it reads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from embedserve.config import ServeSettings
from embedserve.config_checks import delta_poll_s
from embedserve.deltas.follower import CheckRows, DeltaFollower
from embedserve.deltas.memory import memory_bytes
from embedserve.deltas.status import DeltaStatus, FollowedModel
from embedserve_store.deltas.delta_line import DeltaLine
from embedserve_store.deltas.signing import TrustedKeys
from embedserve_store.model_store import ModelStore
from embedserve_store.model_version import ModelVersion
from embedserve_store.transfer.stored_version import SMALL_FILE_BYTES_MAX

logger = logging.getLogger(__name__)

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
    check_on_device: CheckRows | None = None,
    keys: TrustedKeys | None = None,
) -> None:
    """Applies deltas until SIGTERM, or until the supervisor is gone.

    Sends a heartbeat at once when every model has looked for the first time.

    Args:
        versions, deltas: versions and their memory, by served name.
        check_on_device: as in DeltaFollower.
        keys: public keys that may have signed a delta; None if no signature is needed.
    """
    with suppress(OSError):  # ps shows which process it is
        Path("/proc/self/comm").write_text(PROCESS_NAME)
    threading.Thread(target=_end_with, args=(supervisor,), daemon=True).start()
    heartbeat = Heartbeat(supervisor)
    models = BeatingStore(settings, heartbeat)

    def follower(name: str) -> DeltaFollower:
        line = DeltaLine(models, versions[name].manifest, keys)
        room = memory_bytes(settings, versions[name])
        return DeltaFollower(name, line, deltas[name], room, check_on_device)

    polls = [
        Poll(partial(follower, name), followed.status, delta_poll_s(settings))
        for name, followed in deltas.items()
    ]
    is_told = False
    while True:
        for poll in polls:
            poll.look_if_due()
        if not is_told and all(one.status.read().is_looked for one in deltas.values()):
            is_told = True
            heartbeat.send()
        heartbeat.beat()
        heartbeat.wait(min(poll.due_s for poll in polls) - time.monotonic())


class Poll:
    """Looks of one follower: at an interval that grows while no delta can be applied.

    Attributes:
        due_s: time of the next look, on the monotonic clock.
    """

    def __init__(
        self, make: Callable[[], DeltaFollower], status: DeltaStatus, poll_s: float
    ) -> None:
        """
        Args:
            make: makes the follower, as the successor of one that may have failed anywhere.
        """
        self.due_s = 0.0
        self._make, self._status = make, status
        self._poll_s = self._wait_s = poll_s
        self._follower = make()

    def look_if_due(self) -> None:
        if self.due_s > time.monotonic():
            return
        has_more = self._look()
        is_failed = bool(self._status.read().reason)
        longest_s = max(RETRY_S_MAX, self._poll_s)
        self._wait_s = min(2 * self._wait_s, longest_s) if is_failed else self._poll_s
        self.due_s = time.monotonic() + (0.0 if has_more else self._wait_s)

    def _look(self) -> bool:
        """Looks once. An unexpected error is that of this follower alone."""
        try:
            return self._follower.look()
        except Exception as error:
            logger.exception("deltas cannot be applied")
            self._follower = self._make()
            self._status.stall(f"{type(error).__name__}: {error}")
            return False


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

    def read_beside(
        self, model: str, what: str, path: str, bytes_max: int = SMALL_FILE_BYTES_MAX
    ) -> bytes:
        data = super().read_beside(model, what, path, bytes_max)
        self._heartbeat.beat()
        return data


def _end_with(supervisor: socket.socket) -> None:
    """Ends this process when the supervisor's end of the channel is closed."""
    supervisor.recv(1)
    os._exit(0)
