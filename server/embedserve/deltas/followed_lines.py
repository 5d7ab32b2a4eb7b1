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
    from embedserve.deltas.applier_process import Poll
    from embedserve_store.deltas.notify.channel import Topic

logger = logging.getLogger(__name__)

OPEN_S = 1.0
"""Seconds until the next try, where no version can be opened."""

MakePoll = Callable[[DeltaTarget, SharedDeltaState, LastSeq], "Poll"]


@dataclass
class _Followed:
    version: DeltaTarget
    model: SharedDeltaState
    poll: Poll


class FollowedLines:
    """The lines that one applier follows."""

    def __init__(
        self,
        make_poll: MakePoll,
        open_model: Callable[[DeltaTarget], SharedDeltaState],
        models: dict[tuple[str, int], SharedDeltaState],
    ) -> None:
        """
        Args:
            make_poll: makes the poll of a version, and may raise StoreError.
            open_model: opens a version that came after the start; raises StoreError.
            models: versions from before the start, by their keys. They are taken out as they are
                followed.
        """
        self._make_poll, self._open_model = make_poll, open_model
        self._inherited = models
        self._followed: dict[tuple[str, int], _Followed] = {}
        self._wanted: dict[tuple[str, int], DeltaTarget] = {}
        self._unopened = ""

    def follow(self, wanted: Sequence[DeltaTarget]) -> None:
        """Follows the lines of ``wanted`` from now on, and no others. A version that serves in
        place of another keeps its hold."""
        self._wanted = {version.key: version for version in wanted}
        gone = {*self._followed, *self._inherited} - self._wanted.keys()
        held = {name for name, _ in gone if self._is_held(name)}
        for key in gone:
            self._followed.pop(key, None)
            self._inherited.pop(key, None)
        for key, version in self._wanted.items():
            one = self._followed.get(key)
            if one is None:
                continue
            if version.at_seq != one.version.at_seq:
                one.poll.hurry()
            one.version = version
            if version.name in held and not version.is_next:
                one.model.hold.set(True)
        self._open_wanted()

    def look(self) -> float:
        """Looks for deltas of each version that is due. Returns the time of the next look, on the
        monotonic clock."""
        if len(self._followed) < len(self._wanted):
            self._open_wanted()
        for one in self._followed.values():
            one.poll.look_if_due()
        due_s = [one.poll.due_s for one in self._followed.values()]
        return min(due_s, default=time.monotonic() + OPEN_S)

    def topics(self) -> set[Topic]:
        """Returns the topics of the followed lines."""
        return {_topic(one) for one in self._followed.values()}

    def hurry(self, topics: Container[Topic]) -> None:
        """Makes the next look of lines whose topics were announced come earlier."""
        for one in self._followed.values():
            if _topic(one) in topics:
                one.poll.hurry()

    def set_notified(self, is_connected: bool) -> None:
        """Tells workers whether the broker is connected."""
        for one in self._followed.values():
            if one.model.notify is not None:
                one.model.notify.set(is_connected)

    def are_looked(self) -> bool:
        """Returns whether all served versions have the deltas that were there at the start."""
        served = (one for one in self._followed.values() if not one.version.is_next)
        return all(one.model.status.read().is_looked for one in served)

    def find_caught_up(self) -> bool:
        """Marks next versions that may serve now. Returns whether there was one."""
        found = [one for one in self._followed.values() if self._may_serve(one)]
        for one in found:
            one.model.caught_up.set(True)
        return bool(found)

    def _may_serve(self, one: _Followed) -> bool:
        """Returns whether a next version has come to the rows that it needs to serve."""
        if not one.version.is_switching or one.model.caught_up.is_set:
            return False
        now, served = one.model.status.read(), self._served(one.version.name)
        if not now.is_looked:
            return False
        if served is not None and _are_of_one_line(served.model, one.model):
            at_seq = one.version.at_seq
            needed = served.model.live.seq if at_seq is None else min(served.model.live.seq, at_seq)
            return one.model.live.seq >= needed
        return not now.is_stopped and now.state != HELD

    def _served(self, name: str) -> _Followed | None:
        versions = self._followed.values()
        return next((o for o in versions if o.version.name == name and not o.version.is_next), None)

    def _is_held(self, name: str) -> bool:
        served = self._served(name)
        return served is not None and served.model.hold.is_set

    def _last_seq(self, model: SharedDeltaState, key: tuple[str, int]) -> int | None:
        """Returns the last delta that a version may have: that of its alias. Once the next version
        of its name may serve, it gets no delta that the next one lacks."""
        version = self._wanted.get(key)
        bounds = [] if version is None or version.at_seq is None else [version.at_seq]
        for one in self._followed.values():
            is_next = one.version.is_next and one.version.name == key[0]
            if is_next and one.model is not model and one.model.caught_up.is_set:
                last = max(one.model.live.seq, model.live.seq)
                bounds += [last] if _are_of_one_line(model, one.model) else []
        return min(bounds, default=None)

    def _open_wanted(self) -> None:
        for key, version in self._wanted.items():
            if key in self._followed:
                continue
            try:
                model = self._inherited.get(key) or self._open_model(version)
                last_seq = partial(self._last_seq, model, key)
                poll = self._make_poll(version, model, last_seq)
            except StoreError as error:  # it is tried again, or is not wanted any more
                if str(error) != self._unopened:
                    self._unopened = str(error)
                    logger.error("%s: is not followed: %s", version.name, error)
                continue
            self._inherited.pop(key, None)
            self._followed[key] = _Followed(version, model, poll)


def _topic(one: _Followed) -> Topic:
    from embedserve_store.deltas.notify.channel import Topic  # not imported without a broker

    live = one.model.live
    return Topic(live.version.manifest.model, live.start.line)


def _are_of_one_line(one: SharedDeltaState, other: SharedDeltaState) -> bool:
    return one.live.start.line == other.live.start.line
