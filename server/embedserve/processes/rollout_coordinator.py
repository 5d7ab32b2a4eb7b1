"""Two-phase rollout of a model version across the workers of a server.

One worker watches the store. When it finds a new version, the supervisor has every worker load it
while the current version serves. Once all have loaded it, all switch. If one fails, none switches.
A worker that starts meanwhile catches up with the others, or is ended and restarted.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from embedserve.processes.rollout_messages import (
    RolloutMessage,
    RolloutStep,
    WorkerMessage,
    is_news,
    refused,
)

logger = logging.getLogger(__name__)

DEATHS_MAX = 2
"""Worker exits while a version is prepared, after which the version is rejected."""
MOVE_S_MAX = 1800.0
"""Seconds that all workers together may take to prepare a version."""
SWITCHED = "%s is answered by version %d from now on, no more by %s"
REMOVED = "%s is answered no more"
REFUSED = "%s: version %d stays out: %s"


@dataclass
class _PendingRollout:
    """A version that the workers are preparing.

    Attributes:
        awaited: workers that have not prepared it yet.
        deaths: number of workers that exited while preparing it.
    """

    name: str
    version: int
    path: str
    until_s: float
    awaited: set[int] = field(default_factory=set)
    deaths: int = 0

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.version


class RolloutCoordinator:
    """Decides, in the supervisor, when the workers switch versions. One version is rolled out at a
    time.

    Attributes:
        send: function that sends a message to a worker, by its number.
        end: function that ends a worker, by its number; the supervisor restarts it.
    """

    def __init__(self, served: dict[str, int], adopt: Callable[[str, str | None], None]) -> None:
        """
        Args:
            served: versions that workers start with, by served name.
            adopt: called with (name, path) of the version that workers start with from now on; path
                None for no version.
        """
        self.send: Callable[[int, bytes], None] = _do_nothing
        self.end: Callable[[int], None] = _do_nothing
        self._served = dict(served)
        self._starts_with = dict(served)  # differs from _served if a version could not be adopted
        self._adopt = adopt
        self._paths: dict[str, str] = {}
        self._workers: dict[int, dict[str, int]] = {}  # the versions that each ready worker serves
        self._started: dict[int, dict[str, int]] = {}
        self._attempts: dict[tuple[int, str], int] = {}  # the attempt that a worker is preparing
        self._count = itertools.count(1)
        self._looking: int | None = None
        self._moving: _PendingRollout | None = None
        self._wanted: dict[str, int] = {}
        self._refused: dict[tuple[str, int], str] = {}
        self._unopened: dict[str, RolloutMessage] = {}  # retried at the next poll
        self._shares: dict[str, RolloutMessage] = {}

    def start(self, worker: int) -> None:
        """Records that a worker is forked, with the versions that are adopted now."""
        for name in self._paths:
            self._adopt_again(name)
        self._started[worker] = dict(self._starts_with)

    def on_worker_ready(self, worker: int) -> None:
        """Records that a worker is ready, and brings it up to date."""
        has = self._workers[worker] = self._started[worker]
        if self._looking is None:
            self._watch_store(worker)
        for name in [one for one in has if one not in self._served]:
            del has[name]
            self._send(worker, RolloutMessage(RolloutStep.REMOVE, name))
        for name, version in self._wanted.items():
            self._send(worker, RolloutMessage(RolloutStep.DESIRED, name, version))
        for share in self._shares.values():
            self._send(worker, share)
        for unopened in self._unopened.values():
            self._send(worker, unopened)
        for (name, version), reason in self._refused.items():
            self._send(worker, refused(name, version, reason))
        moving = self._moving
        if moving is not None:
            moving.awaited.add(worker)
            self._prepare(worker, moving.name, moving.version, moving.path)
        self._catch_up()

    def on_worker_exit(self, worker: int, how: str) -> None:
        """Records that a worker exited, ready or not; ``how`` is the text for the log."""
        self._workers.pop(worker, None)
        for key in [one for one in self._attempts if one[0] == worker]:
            del self._attempts[key]
        if worker == self._looking:
            self._looking = None
            if self._workers:
                self._watch_store(min(self._workers))
        moving = self._moving
        if moving is None or worker not in moving.awaited:
            return
        moving.awaited.discard(worker)
        moving.deaths += 1
        if moving.deaths >= DEATHS_MAX:
            self._reject(*moving.key, f"a worker {how} while it was loaded")
        elif not self._workers:
            moving.until_s = monotonic() + MOVE_S_MAX  # for the workers that replace them
        else:
            self._advance(moving)

    def is_preparing(self, worker: int) -> bool:
        """Returns whether a worker is loading a version, during which it may seem to hang."""
        return any(one == worker for one, _ in self._attempts)

    def check_timeouts(self) -> None:
        """Rejects the version of a rollout that takes too long; called every POLL_S."""
        moving = self._moving
        if moving is not None and monotonic() > moving.until_s:
            slow = ", ".join(map(str, sorted(moving.awaited)))
            why = f"workers {slow} have not loaded it in {MOVE_S_MAX:g} s"
            self._reject(*moving.key, why)

    def reload(self) -> None:
        """Requests an immediate poll of the store."""
        if self._looking is not None:
            self.send(self._looking, WorkerMessage.RELOAD.value)
        else:
            logger.warning("the store is not looked at: no worker is ready")

    def on_message(self, worker: int, message: RolloutMessage) -> None:
        """Handles a rollout message of a worker."""
        if message.step is RolloutStep.DESIRED:
            self._set_desired(message)
        elif message.step is RolloutStep.SHARE:
            self._shares[message.name] = message
            self._send_all(message)
        elif message.step is RolloutStep.RETRY:
            self._forgive(message.name)
            self._send_all(message)
        elif message.step is RolloutStep.AVAILABLE or message.step is RolloutStep.LOAD:
            self._find(worker, message)
        elif message.step is RolloutStep.REMOVE:
            self._remove(message)
        elif message.step is RolloutStep.UNOPENED:
            self._note_unopened(message)
        elif not message.attempt:  # it was opened, but differs from its published state
            self._reject(*message.key, message.reason)
            self._send(worker, refused(*message.key, message.reason))
        elif self._attempts.get((worker, message.name)) == message.attempt:
            del self._attempts[worker, message.name]
            if message.step is RolloutStep.REFUSED:
                self._note_rejected(worker, message)
            else:
                self._note_prepared(worker, message)

    def _set_desired(self, message: RolloutMessage) -> None:
        """Sets the desired version of a name. Ends a rollout of that name to another version, and
        forgets its earlier failures."""
        if message.name not in self._served:  # it was removed meanwhile
            return
        self._wanted[message.name] = message.version
        moving = self._moving
        if moving is not None and moving.name == message.name and moving.version != message.version:
            self._end_rollout(moving)
        self._forgive(message.name, but=message.version)
        self._send_all(message)
        self._catch_up()

    def _forgive(self, name: str, but: int | None = None) -> None:
        for key in [one for one in self._refused if one[0] == name and one[1] != but]:
            del self._refused[key]
        if name in self._unopened and self._unopened[name].version != but:
            del self._unopened[name]

    def _note_unopened(self, message: RolloutMessage) -> None:
        before = self._unopened.get(message.name)
        is_loaded = self._moving is not None and self._moving.key == message.key
        if message == before or is_loaded or message.name not in self._served:
            return
        self._unopened[message.name] = message
        if before is None or before.key != message.key or is_news(message.reason, before.reason):
            logger.error(REFUSED, message.name, message.version, message.reason)
        self._send_all(message)

    def _find(self, worker: int, found: RolloutMessage) -> None:
        self._unopened.pop(found.name, None)
        reason = self._refused.get(found.key)
        is_served = found.name in self._served
        if reason is not None:
            self._send(worker, refused(*found.key, reason))
        elif (
            self._moving is None
            and (is_served or found.step is RolloutStep.LOAD)
            and self._served.get(found.name) != found.version
        ):
            until_s = monotonic() + MOVE_S_MAX
            moving = _PendingRollout(
                found.name, found.version, found.path, until_s, set(self._workers)
            )
            self._moving = moving
            for one in self._workers:
                self._prepare(one, *moving.key, moving.path)

    def _remove(self, message: RolloutMessage) -> None:
        name = message.name
        if name not in self._served or len(self._served) == 1:
            return
        if self._moving is not None and self._moving.name == name:
            self._end_rollout(self._moving)
        for of_names in (self._served, self._paths, self._wanted, self._shares, self._starts_with):
            of_names.pop(name, None)
        self._forgive(name)
        self._adopt(name, None)
        for worker, has in self._workers.items():
            has.pop(name, None)
            self._attempts.pop((worker, name), None)
        self._send_all(message)
        logger.info(REMOVED, name)
        self._catch_up()

    def _send_all(self, message: RolloutMessage) -> None:
        for worker in self._workers:
            self._send(worker, message)

    def _note_prepared(self, worker: int, message: RolloutMessage) -> None:
        moving = self._moving
        if moving is not None and message.key == moving.key:
            moving.awaited.discard(worker)
            self._advance(moving)
        else:  # the version that the others serve already
            self._switch(worker, *message.key)

    def _note_rejected(self, worker: int, message: RolloutMessage) -> None:
        if self._served.get(message.name) == message.version:
            logger.error(
                "worker %d cannot follow the others to %s version %d: %s",
                worker,
                *message.key,
                message.reason,
            )
            self.end(worker)
        else:
            self._reject(*message.key, message.reason)

    def _advance(self, moving: _PendingRollout) -> None:
        """Switches all workers if all have prepared the version."""
        if moving.awaited:
            return
        name, version = moving.key
        self._moving = None
        before = self._served.get(name, "none")
        self._served[name], self._paths[name] = version, moving.path
        for worker in self._workers:
            self._switch(worker, name, version)
        logger.info(SWITCHED, name, version, before)
        self._adopt_again(name)
        self._catch_up()

    def _adopt_again(self, name: str) -> None:
        """Adopts the served version if workers would start with another one."""
        if self._starts_with.get(name) == self._served[name]:
            return
        try:
            self._adopt(name, self._paths[name])
        except Exception as error:  # any error: the workers keep serving
            before = self._starts_with.get(name, "none")
            logger.error("%s: workers start with version %s still: %s", name, before, error)
        else:
            self._starts_with[name] = self._served[name]

    def _reject(self, name: str, version: int, reason: str) -> None:
        key = name, version
        if key in self._refused:
            return
        self._refused[key] = reason
        logger.error(REFUSED, name, version, reason)
        if self._moving is not None and self._moving.key == key:
            self._end_rollout(self._moving)
        self._send_all(refused(name, version, reason))
        self._catch_up()

    def _end_rollout(self, moving: _PendingRollout) -> None:
        self._moving = None
        for worker in self._workers:
            self._attempts.pop((worker, moving.name), None)

    def _catch_up(self) -> None:
        """Makes workers that serve another version than the others prepare the common one."""
        for worker, has in self._workers.items():
            for name, path in self._paths.items():
                is_under_way = (worker, name) in self._attempts
                if has.get(name) != self._served[name] and not is_under_way:
                    self._prepare(worker, name, self._served[name], path)

    def _watch_store(self, worker: int) -> None:
        self._looking = worker
        self.send(worker, WorkerMessage.WATCH_STORE.value)

    def _prepare(self, worker: int, name: str, version: int, path: str) -> None:
        attempt = self._attempts[worker, name] = next(self._count)
        self._send(
            worker, RolloutMessage(RolloutStep.PREPARE, name, version, path, attempt=attempt)
        )

    def _switch(self, worker: int, name: str, version: int) -> None:
        self._workers[worker][name] = version
        self._send(worker, RolloutMessage(RolloutStep.SWITCH, name, version))

    def _send(self, worker: int, message: RolloutMessage) -> None:
        self.send(worker, message.to_bytes())


def _do_nothing(worker: int, message: bytes = b"") -> None:
    return None
