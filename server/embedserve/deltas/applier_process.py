"""Loop of the applier: polls for deltas of all followed versions, in a process of its own.

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
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from embedserve.config import ServeSettings
from embedserve.config_checks import delta_poll_s
from embedserve.deltas.bounded_line import BoundedLine, LastSeq
from embedserve.deltas.delta_target import DeltaTarget, from_bytes, open_shared_state
from embedserve.deltas.delta_waiter import DeltaWaiter
from embedserve.deltas.followed_lines import FollowedLines
from embedserve.deltas.follower import DeltaFollower
from embedserve.deltas.memory import memory_bytes
from embedserve.deltas.read_changes import CheckRows
from embedserve.deltas.status import DeltaStatus, SharedDeltaState
from embedserve_store.deltas.signing import TrustedKeys
from embedserve_store.model_store import ModelStore
from embedserve_store.model_version import ModelVersion
from embedserve_store.transfer.stored_version import SMALL_FILE_BYTES_MAX

if TYPE_CHECKING:
    from embedserve.deltas.delta_subscriber import DeltaSubscriber

logger = logging.getLogger(__name__)

PROCESS_NAME = "delta-applier"
NICENESS = 3
"""Added to the niceness of the process. Where both want a core, lookups get two thirds of it."""
RETRY_S_MAX = 5.0
"""Longest interval of polls while no delta can be applied."""
BEAT_S = 1.0
"""Shortest interval of heartbeats: each wakes the supervisor, which itself checks all processes
once in a second."""

SHORTEST_POLL_S_MAX = 0.05
"""Upper bound of ``shortest_poll_s``: a flood of notifications costs at most 20 requests to the
store a second."""


def shortest_poll_s(poll_s: float) -> float:
    """Returns the shortest interval of polls, however many notifications come: a fifth of the
    configured interval."""
    return min(poll_s / 5, SHORTEST_POLL_S_MAX)


def run_applier(
    settings: ServeSettings,
    versions: dict[DeltaTarget, SharedDeltaState],
    open_version: Callable[[str], ModelVersion],
    supervisor: socket.socket,
    check_on_device: CheckRows | None = None,
    keys: TrustedKeys | None = None,
) -> None:
    """Applies deltas until SIGTERM, or until the supervisor is gone.

    Sends a heartbeat at once when every served version has been polled for the first time, and when
    a next version may serve. The supervisor sends which versions are followed, when that changes.

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
    waiter = DeltaWaiter()
    messages: deque[bytes] = deque(maxlen=1)  # versions to follow; only the last message counts
    arguments = supervisor, messages, waiter
    threading.Thread(target=_read_messages, args=arguments, daemon=True).start()
    heartbeat = Heartbeat(supervisor)
    models = BeatingStore(settings, heartbeat)

    def make_schedule(
        target: DeltaTarget, shared: SharedDeltaState, last_seq: LastSeq
    ) -> PollSchedule:
        published = shared.live.version

        def follower() -> DeltaFollower:
            line = BoundedLine(models, published.manifest, keys, last_seq)
            room = memory_bytes(settings, published)
            return DeltaFollower(target.name, line, shared, room, check_on_device)

        return PollSchedule(follower, shared.status, delta_poll_s(settings))

    def open_state(target: DeltaTarget) -> SharedDeltaState:
        return open_shared_state(
            settings, open_version(target.path), target.memory, target.generation
        )

    targets = [*versions]
    inherited = {one.key: versions.pop(one) for one in targets}
    lines = FollowedLines(make_schedule, open_state, inherited)
    lines.follow(targets)
    subscriber = _subscriber(settings, waiter, lines)
    is_announced = False
    while True:
        if messages:
            lines.follow(from_bytes(messages.pop()))
        if subscriber is not None:
            subscriber.follow(lines.topics())
            lines.set_notified(subscriber.is_connected)
        due_s = lines.poll_due()
        if (not is_announced and lines.are_ready()) or lines.mark_caught_up():
            is_announced = True
            heartbeat.send()
        heartbeat.beat()
        heartbeat.wait(due_s - time.monotonic(), waiter)
        if announced := waiter.take():
            lines.hurry(announced)


def _subscriber(
    settings: ServeSettings, waiter: DeltaWaiter, lines: FollowedLines
) -> DeltaSubscriber | None:
    """Returns what announces notifications to ``waiter``; None without settings.delta_notify."""
    if not settings.delta_notify:
        return None
    from embedserve.deltas.delta_subscriber import DeltaSubscriber

    pace_s = shortest_poll_s(delta_poll_s(settings))
    subscriber = DeltaSubscriber(settings.delta_notify, waiter, pace_s)
    subscriber.follow(lines.topics())
    subscriber.start()
    return subscriber


def _read_messages(supervisor: socket.socket, messages: deque[bytes], waiter: DeltaWaiter) -> None:
    """Adds what the supervisor sends to ``messages``. Ends this process when the supervisor's end
    of the channel is closed."""
    with suppress(OSError), supervisor.makefile("rb") as lines:
        for line in lines:
            messages.append(line)
            waiter.wake()
    os._exit(0)


class PollSchedule:
    """Polls of one follower, at an interval that grows while no delta can be applied.

    Attributes:
        due_s: time of the next poll, on the monotonic clock.
    """

    def __init__(
        self, make: Callable[[], DeltaFollower], status: DeltaStatus, poll_s: float
    ) -> None:
        """
        Args:
            make: makes the follower, as the successor of one that may have failed anywhere.

        Raises:
            StoreError: as ``make``.
        """
        self.due_s = 0.0
        self._make, self._status = make, status
        self._poll_s = self._wait_s = poll_s
        self._polled_s = 0.0
        self._is_failed = False
        self._follower: DeltaFollower | None = make()

    def poll_if_due(self) -> None:
        if self.due_s > time.monotonic():
            return
        has_more = self._poll()
        self._is_failed = bool(self._status.read().reason)
        longest_s = max(RETRY_S_MAX, self._poll_s)
        self._wait_s = min(2 * self._wait_s, longest_s) if self._is_failed else self._poll_s
        self._polled_s = time.monotonic()
        self.due_s = self._polled_s + (0.0 if has_more else self._wait_s)

    def hurry(self) -> None:
        """Makes the next poll due as early as ``shortest_poll_s`` allows. While no delta can be
        applied its time stays: each of these polls may read a large delta again."""
        if not self._is_failed:
            self.due_s = min(self.due_s, self._polled_s + shortest_poll_s(self._poll_s))

    def _poll(self) -> bool:
        """Polls once. An unexpected error is that of this follower alone."""
        try:
            if self._follower is None:
                self._follower = self._make()  # reads the status
            return self._follower.poll_once()
        except Exception as error:
            logger.exception("deltas cannot be applied")
            self._status.stall(f"{type(error).__name__}: {error}")
            self._follower = None
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

    def wait(self, seconds: float, waiter: DeltaWaiter) -> None:
        """Sends heartbeats for ``seconds``, or until ``waiter`` is woken."""
        ends_s = time.monotonic() + seconds
        while (left_s := ends_s - time.monotonic()) > 0:
            if waiter.wait(min(left_s, BEAT_S)):
                return
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
