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

from embedserve.deltas.bounded_line import LastSeq
from embedserve.deltas.delta_target import DeltaTarget
from embedserve.deltas.status import HELD, SharedDeltaState
from embedserve_store.errors import StoreError

if TYPE_CHECKING:
    from embedserve.deltas.applier_process import PollSchedule
    from embedserve_store.deltas.notify.channel import Topic

logger = logging.getLogger(__name__)

OPEN_S = 1.0
"""Interval of the tries to open versions while none is open."""

MakeSchedule = Callable[[DeltaTarget, SharedDeltaState, LastSeq], "PollSchedule"]


@dataclass
class _FollowedLine:
    target: DeltaTarget
    shared: SharedDeltaState
    schedule: PollSchedule


class FollowedLines:
    """The lines that one applier follows."""

    def __init__(
        self,
        make_schedule: MakeSchedule,
        open_shared_state: Callable[[DeltaTarget], SharedDeltaState],
        inherited: dict[tuple[str, int], SharedDeltaState],
    ) -> None:
        """
        Args:
            make_schedule: makes the schedule of a version, and may raise StoreError.
            open_shared_state: opens a version that came after the start; raises StoreError.
            inherited: versions from before the start, by their keys. They are taken out as they are
                followed.
        """
        self._make_schedule, self._open_shared_state = make_schedule, open_shared_state
        self._inherited = inherited
        self._lines: dict[tuple[str, int], _FollowedLine] = {}
        self._wanted: dict[tuple[str, int], DeltaTarget] = {}
        self._unopened = ""

    def follow(self, wanted: Sequence[DeltaTarget]) -> None:
        """Follows the lines of ``wanted`` from now on, and no others. A version that serves in
        place of another keeps its hold."""
        self._wanted = {target.key: target for target in wanted}
        gone = {*self._lines, *self._inherited} - self._wanted.keys()
        held = {name for name, _ in gone if self._is_held(name)}
        for key in gone:
            self._lines.pop(key, None)
            self._inherited.pop(key, None)
        for key, target in self._wanted.items():
            one = self._lines.get(key)
            if one is None:
                continue
            if target.at_seq != one.target.at_seq:
                one.schedule.hurry()
            one.target = target
            if target.name in held and not target.is_next:
                one.shared.hold.set(True)
        self._open_wanted()

    def poll_due(self) -> float:
        """Polls for deltas of each version that is due. Returns the time of the next poll, on the
        monotonic clock."""
        if len(self._lines) < len(self._wanted):
            self._open_wanted()
        for one in self._lines.values():
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

    def set_notified(self, is_connected: bool) -> None:
        """Tells workers whether the broker is connected."""
        for one in self._lines.values():
            if one.shared.notify is not None:
                one.shared.notify.set(is_connected)

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

    def _last_seq(self, shared: SharedDeltaState, key: tuple[str, int]) -> int | None:
        """Returns the last delta that a version may have: that of its alias. Once the next version
        of its name may serve, it gets no delta that the next one lacks."""
        target = self._wanted.get(key)
        bounds = [] if target is None or target.at_seq is None else [target.at_seq]
        for one in self._lines.values():
            is_next = one.target.is_next and one.target.name == key[0]
            if is_next and one.shared is not shared and one.shared.caught_up.is_set:
                last = max(one.shared.live.seq, shared.live.seq)
                bounds += [last] if _are_of_one_line(shared, one.shared) else []
        return min(bounds, default=None)

    def _open_wanted(self) -> None:
        for key, target in self._wanted.items():
            if key in self._lines:
                continue
            try:
                shared = self._inherited.get(key) or self._open_shared_state(target)
                last_seq = partial(self._last_seq, shared, key)
                schedule = self._make_schedule(target, shared, last_seq)
            except StoreError as error:  # it is tried again, or is not wanted any more
                if str(error) != self._unopened:
                    self._unopened = str(error)
                    logger.error("%s: is not followed: %s", target.name, error)
                continue
            self._inherited.pop(key, None)
            self._lines[key] = _FollowedLine(target, shared, schedule)


def _topic(one: _FollowedLine) -> Topic:
    from embedserve_store.deltas.notify.channel import Topic  # not imported without a broker

    live = one.shared.live
    return Topic(live.version.manifest.model, live.start.line)


def _are_of_one_line(one: SharedDeltaState, other: SharedDeltaState) -> bool:
    return one.live.start.line == other.live.start.line
