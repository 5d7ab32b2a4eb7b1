"""Follows the lines of all served versions in the applier, and those of versions that come next.

A server moves to another version while deltas are applied. If both versions are of one line, no
response may have older rows after the switch than before. So once all workers have prepared the
next version, it gets each delta first: from the moment at which it has all deltas of the served
version, that one is followed no further than the next one is.

A version that is served by an alias may have to stay at a delta, or go back to it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from embedserve.config import ServeSettings
from embedserve.config_checks import delta_poll_s
from embedserve.deltas.bounded_line import BoundedLine
from embedserve.deltas.changed_rows_memory import changed_rows_bytes_max
from embedserve.deltas.delta_target import DeltaTarget, open_shared_state
from embedserve.deltas.follower import DeltaFollower
from embedserve.deltas.read_changes import CheckRows
from embedserve.deltas.status import HELD, DeltaStatus, SharedDeltaState
from embedserve_store.deltas.signing import TrustedKeys
from embedserve_store.errors import StoreError
from embedserve_store.model_store import ModelStore
from embedserve_store.model_version import ModelVersion

if TYPE_CHECKING:
    from embedserve_store.deltas.notify.broker import Topic

logger = logging.getLogger(__name__)

OPEN_S = 1.0
"""Interval of the tries to open versions while none is open."""
RETRY_S_MAX = 5.0
"""Longest interval of polls while no delta can be applied."""
SHORTEST_POLL_S_MAX = 0.05
"""Upper bound of ``shortest_poll_s``: a flood of notifications costs at most 20 requests to the
store a second."""


def shortest_poll_s(poll_s: float) -> float:
    """Returns the shortest interval of polls, however many notifications come: a fifth of the
    configured interval."""
    return min(poll_s / 5, SHORTEST_POLL_S_MAX)


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
        """Polls once. An unexpected error stalls this follower alone, and the next poll recreates
        it."""
        try:
            if self._follower is None:
                self._follower = self._make()  # reads the status
            return self._follower.poll_once()
        except Exception as error:
            logger.exception("deltas cannot be applied")
            self._status.stall(f"{type(error).__name__}: {error}")
            self._follower = None
            return False


@dataclass
class _FollowedLine:
    target: DeltaTarget
    shared: SharedDeltaState
    line: BoundedLine
    schedule: PollSchedule


class FollowedLines:
    """The lines that one applier follows."""

    def __init__(
        self,
        settings: ServeSettings,
        store: ModelStore,
        open_version: Callable[[str], ModelVersion],
        inherited: dict[tuple[str, int], SharedDeltaState],
        check_on_device: CheckRows | None = None,
        keys: TrustedKeys | None = None,
    ) -> None:
        """
        Args:
            store: store of the lines.
            open_version, check_on_device, keys: as for ``run_applier``.
            inherited: versions from before the start, by their keys. They are taken out as they are
                followed.
        """
        self._settings, self._store, self._open_version = settings, store, open_version
        self._inherited, self._check_on_device, self._keys = inherited, check_on_device, keys
        self._lines: dict[tuple[str, int], _FollowedLine] = {}
        self._targets: dict[tuple[str, int], DeltaTarget] = {}
        self._open_errors: set[str] = set()  # of the last call of _open_missing

    def follow(self, targets: Sequence[DeltaTarget]) -> None:
        """Follows the lines of ``targets`` from now on, and no others. A version that serves in
        place of another keeps its hold."""
        self._targets = {target.key: target for target in targets}
        gone = {*self._lines, *self._inherited} - self._targets.keys()
        held = {name for name, _ in gone if self._is_held(name)}
        for key in gone:
            self._lines.pop(key, None)
            self._inherited.pop(key, None)
        for key, target in self._targets.items():
            one = self._lines.get(key)
            if one is None:
                continue
            if target.at_seq != one.target.at_seq:
                one.schedule.hurry()
            one.target = target
            if target.name in held and not target.is_next:
                one.shared.hold.set(True)
        self._open_missing()

    def poll_due(self) -> float:
        """Polls for deltas of each version that is due. Returns the time of the next poll, on the
        monotonic clock."""
        if len(self._lines) < len(self._targets):
            self._open_missing()
        for one in self._lines.values():
            one.line.last_seq = self._last_seq(one)
            one.schedule.poll_if_due()
        due_s = [one.schedule.due_s for one in self._lines.values()]
        return min(due_s, default=time.monotonic() + OPEN_S)

    def topics(self) -> set[Topic]:
        """Returns the topics of the followed lines."""
        return {_topic(one) for one in self._lines.values()}

    def hurry(self, topics: Container[Topic]) -> None:
        """Makes the next poll of lines whose topics were announced come earlier."""
        for one in self._lines.values():
            if _topic(one) in topics:
                one.schedule.hurry()

    def set_broker_connected(self, is_connected: bool) -> None:
        """Tells workers whether the broker is connected."""
        for one in self._lines.values():
            if one.shared.broker_connected is not None:
                one.shared.broker_connected.set(is_connected)

    def are_ready(self) -> bool:
        """Returns whether all served versions have the deltas that were there at the start."""
        served = (one for one in self._lines.values() if not one.target.is_next)
        return all(one.shared.status.read().is_ready for one in served)

    def mark_caught_up(self) -> bool:
        """Marks next versions that may serve now. Returns whether there was one."""
        found = [one for one in self._lines.values() if self._may_serve(one)]
        for one in found:
            one.shared.caught_up.set(True)
        return bool(found)

    def _may_serve(self, one: _FollowedLine) -> bool:
        """Returns whether a next version has come to the rows that it needs to serve."""
        if not one.target.is_switching or one.shared.caught_up.is_set:
            return False
        now, served = one.shared.status.read(), self._served(one.target.name)
        if not now.is_ready:
            return False
        if served is not None and _are_of_one_line(served.shared, one.shared):
            at_seq = one.target.at_seq
            seq = served.shared.live.seq
            needed = seq if at_seq is None else min(seq, at_seq)
            return one.shared.live.seq >= needed
        return not now.is_stopped and now.state != HELD

    def _served(self, name: str) -> _FollowedLine | None:
        lines = self._lines.values()
        return next((o for o in lines if o.target.name == name and not o.target.is_next), None)

    def _is_held(self, name: str) -> bool:
        served = self._served(name)
        return served is not None and served.shared.hold.is_set

    def _last_seq(self, one: _FollowedLine) -> int | None:
        """Returns the last delta that a version may have: that of its alias. Once the next version
        of its name may serve, it gets no delta that the next one lacks."""
        bounds = [] if one.target.at_seq is None else [one.target.at_seq]
        for other in self._lines.values():
            is_next = other.target.is_next and other.target.name == one.target.name
            if is_next and other is not one and other.shared.caught_up.is_set:
                last = max(other.shared.live.seq, one.shared.live.seq)
                bounds += [last] if _are_of_one_line(one.shared, other.shared) else []
        return min(bounds, default=None)

    def _open_missing(self) -> None:
        """Opens the targets that have no line yet. Each call tries again, and logs new errors."""
        errors: set[str] = set()
        for key, target in self._targets.items():
            if key in self._lines:
                continue
            try:
                self._lines[key] = self._open(target)
                self._inherited.pop(key, None)
            except StoreError as error:  # tried again, unless it is no longer a target
                errors.add(str(error))
                if str(error) not in self._open_errors:
                    logger.error("%s: is not followed: %s", target.name, error)
        self._open_errors = errors

    def _open(self, target: DeltaTarget) -> _FollowedLine:
        settings = self._settings
        shared = self._inherited.get(target.key) or open_shared_state(
            settings, self._open_version(target.path), target.memory, target.generation
        )
        version = shared.live.version
        line = BoundedLine(self._store, version.manifest, self._keys)
        room = changed_rows_bytes_max(settings, version)
        make = partial(DeltaFollower, target.name, line, shared, room, self._check_on_device)
        schedule = PollSchedule(make, shared.status, delta_poll_s(settings))
        return _FollowedLine(target, shared, line, schedule)


def _topic(one: _FollowedLine) -> Topic:
    from embedserve_store.deltas.notify.broker import Topic  # not imported without a broker

    live = one.shared.live
    return Topic(live.version.manifest.model, live.start.line)


def _are_of_one_line(one: SharedDeltaState, other: SharedDeltaState) -> bool:
    return one.live.start.line == other.live.start.line
