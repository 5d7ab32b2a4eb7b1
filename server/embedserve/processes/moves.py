"""How all workers of a server move to another version of a model together.

One of them looks at the store. What it finds the supervisor has all of them prepare, each beside
the version that it answers with; once the last one has, all switch. Where one cannot, none does.
A worker that starts meanwhile follows the others, or is ended and started anew.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from embedserve.processes.messages import Move, Step, WorkerMessage, is_news, refused

logger = logging.getLogger(__name__)

DEATHS_MAX = 2
"""Of workers, while they prepare a version: then it stays out."""
MOVE_S_MAX = 1800.0
"""Until all have prepared a version."""
SWITCHED = "%s is answered by version %d from now on, no more by %s"
REMOVED = "%s is answered no more"
REFUSED = "%s: version %d stays out: %s"


@dataclass
class _Moving:
    """A version that the workers prepare.

    Attributes:
        awaited: workers that have not prepared it.
        deaths: of workers meanwhile.
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


class Together:
    """Decides, in the supervisor, when the workers move; one version at a time.

    Attributes:
        send: sends a message to a worker, by its number.
        end: ends a worker, by its number: another is started in its place.
    """

    def __init__(self, served: dict[str, int], adopt: Callable[[str, str | None], None]) -> None:
        """
        Args:
            served: the versions that workers start with, by the name that they are served by.
            adopt: told (name, path) of what workers start with from now on, None for nothing.
        """
        self.send: Callable[[int, bytes], None] = _do_nothing
        self.end: Callable[[int], None] = _do_nothing
        self._served = dict(served)
        self._starts_with = dict(served)  # as _served, but where a version could not be adopted
        self._adopt = adopt
        self._paths: dict[str, str] = {}
        self._workers: dict[int, dict[str, int]] = {}  # what those answer with that are ready
        self._started: dict[int, dict[str, int]] = {}
        self._attempts: dict[tuple[int, str], int] = {}  # what a worker prepares
        self._count = itertools.count(1)
        self._looking: int | None = None
        self._moving: _Moving | None = None
        self._wanted: dict[str, int] = {}
        self._refused: dict[tuple[str, int], str] = {}
        self._unopened: dict[str, Move] = {}  # which the next look tries again
        self._shares: dict[str, Move] = {}

    def start(self, worker: int) -> None:
        """A worker is forked, and has what is served now."""
        for name in self._paths:
            self._adopt_again(name)
        self._started[worker] = dict(self._starts_with)

    def ready(self, worker: int) -> None:
        """A worker answers requests."""
        has = self._workers[worker] = self._started[worker]
        if self._looking is None:
            self._look(worker)
        for name in [one for one in has if one not in self._served]:
            del has[name]
            self._tell(worker, Move(Step.REMOVE, name))
        for name, version in self._wanted.items():
            self._tell(worker, Move(Step.WANTED, name, version))
        for share in self._shares.values():
            self._tell(worker, share)
        for unopened in self._unopened.values():
            self._tell(worker, unopened)
        for (name, version), reason in self._refused.items():
            self._tell(worker, refused(name, version, reason))
        moving = self._moving
        if moving is not None:
            moving.awaited.add(worker)
            self._prepare(worker, moving.name, moving.version, moving.path)
        self._catch_up()

    def gone(self, worker: int, how: str) -> None:
        """A worker ended, whether it was ready or not; ``how`` is said of it."""
        self._workers.pop(worker, None)
        for key in [one for one in self._attempts if one[0] == worker]:
            del self._attempts[key]
        if worker == self._looking:
            self._looking = None
            if self._workers:
                self._look(min(self._workers))
        moving = self._moving
        if moving is None or worker not in moving.awaited:
            return
        moving.awaited.discard(worker)
        moving.deaths += 1
        if moving.deaths >= DEATHS_MAX:
            self._refuse(*moving.key, f"a worker {how} while it was loaded")
        elif not self._workers:
            moving.until_s = monotonic() + MOVE_S_MAX  # for those that come
        else:
            self._go_on(moving)

    def is_preparing(self, worker: int) -> bool:
        """Whether a worker loads a version, in which it may seem to hang."""
        return any(one == worker for one, _ in self._attempts)

    def look_at_time(self) -> None:
        """Gives a move up that takes too long; asked now and then."""
        moving = self._moving
        if moving is not None and monotonic() > moving.until_s:
            slow = ", ".join(map(str, sorted(moving.awaited)))
            why = f"workers {slow} have not loaded it in {MOVE_S_MAX:g} s"
            self._refuse(*moving.key, why)

    def reload(self) -> None:
        """Has the store looked at now."""
        if self._looking is not None:
            self.send(self._looking, WorkerMessage.RELOAD.value)
        else:
            logger.warning("the store is not looked at: no worker is ready")

    def hear(self, worker: int, move: Move) -> None:
        """A worker says ``move``."""
        if move.step is Step.WANTED:
            self._want(move)
        elif move.step is Step.SHARE:
            self._shares[move.name] = move
            self._tell_all(move)
        elif move.step is Step.RETRY:
            self._forgive(move.name)
            self._tell_all(move)
        elif move.step is Step.FOUND or move.step is Step.LOAD:
            self._find(worker, move)
        elif move.step is Step.REMOVE:
            self._remove(move)
        elif move.step is Step.UNOPENED:
            self._note_unopened(move)
        elif not move.attempt:  # it was opened, and is not as it was published
            self._refuse(*move.key, move.reason)
            self._tell(worker, refused(*move.key, move.reason))
        elif self._attempts.get((worker, move.name)) == move.attempt:
            del self._attempts[worker, move.name]
            if move.step is Step.REFUSED:
                self._note_refused(worker, move)
            else:
                self._note_prepared(worker, move)

    def _want(self, move: Move) -> None:
        """What was under way to another version ends; what failed before another was wanted may be
        tried again."""
        if move.name not in self._served:  # it was removed meanwhile
            return
        self._wanted[move.name] = move.version
        moving = self._moving
        if moving is not None and moving.name == move.name and moving.version != move.version:
            self._end_move(moving)
        self._forgive(move.name, but=move.version)
        self._tell_all(move)
        self._catch_up()

    def _forgive(self, name: str, but: int | None = None) -> None:
        for key in [one for one in self._refused if one[0] == name and one[1] != but]:
            del self._refused[key]
        if name in self._unopened and self._unopened[name].version != but:
            del self._unopened[name]

    def _note_unopened(self, move: Move) -> None:
        before = self._unopened.get(move.name)
        is_loaded = self._moving is not None and self._moving.key == move.key
        if move == before or is_loaded or move.name not in self._served:
            return
        self._unopened[move.name] = move
        if before is None or before.key != move.key or is_news(move.reason, before.reason):
            logger.error(REFUSED, move.name, move.version, move.reason)
        self._tell_all(move)

    def _find(self, worker: int, found: Move) -> None:
        self._unopened.pop(found.name, None)
        reason = self._refused.get(found.key)
        is_served = found.name in self._served
        if reason is not None:
            self._tell(worker, refused(*found.key, reason))
        elif (
            self._moving is None
            and (is_served or found.step is Step.LOAD)
            and self._served.get(found.name) != found.version
        ):
            until_s = monotonic() + MOVE_S_MAX
            moving = _Moving(found.name, found.version, found.path, until_s, set(self._workers))
            self._moving = moving
            for one in self._workers:
                self._prepare(one, *moving.key, moving.path)

    def _remove(self, move: Move) -> None:
        name = move.name
        if name not in self._served or len(self._served) == 1:
            return
        if self._moving is not None and self._moving.name == name:
            self._end_move(self._moving)
        for of_names in (self._served, self._paths, self._wanted, self._shares, self._starts_with):
            of_names.pop(name, None)
        self._forgive(name)
        self._adopt(name, None)
        for worker, has in self._workers.items():
            has.pop(name, None)
            self._attempts.pop((worker, name), None)
        self._tell_all(move)
        logger.info(REMOVED, name)
        self._catch_up()

    def _tell_all(self, move: Move) -> None:
        for worker in self._workers:
            self._tell(worker, move)

    def _note_prepared(self, worker: int, move: Move) -> None:
        moving = self._moving
        if moving is not None and move.key == moving.key:
            moving.awaited.discard(worker)
            self._go_on(moving)
        else:  # what the others answer with
            self._switch(worker, *move.key)

    def _note_refused(self, worker: int, move: Move) -> None:
        if self._served.get(move.name) == move.version:
            logger.error(
                "worker %d cannot follow the others to %s version %d: %s",
                worker,
                *move.key,
                move.reason,
            )
            self.end(worker)
        else:
            self._refuse(*move.key, move.reason)

    def _go_on(self, moving: _Moving) -> None:
        """All switch, if all have prepared it."""
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
        """Where workers would start with another version than the others answer with."""
        if self._starts_with.get(name) == self._served[name]:
            return
        try:
            self._adopt(name, self._paths[name])
        except Exception as error:  # whatever it is, the workers go on
            before = self._starts_with.get(name, "none")
            logger.error("%s: workers start with version %s still: %s", name, before, error)
        else:
            self._starts_with[name] = self._served[name]

    def _refuse(self, name: str, version: int, reason: str) -> None:
        key = name, version
        if key in self._refused:
            return
        self._refused[key] = reason
        logger.error(REFUSED, name, version, reason)
        if self._moving is not None and self._moving.key == key:
            self._end_move(self._moving)
        self._tell_all(refused(name, version, reason))
        self._catch_up()

    def _end_move(self, moving: _Moving) -> None:
        self._moving = None
        for worker in self._workers:
            self._attempts.pop((worker, moving.name), None)

    def _catch_up(self) -> None:
        """Has workers that answer with another version than the others prepare that one."""
        for worker, has in self._workers.items():
            for name, path in self._paths.items():
                is_under_way = (worker, name) in self._attempts
                if has.get(name) != self._served[name] and not is_under_way:
                    self._prepare(worker, name, self._served[name], path)

    def _look(self, worker: int) -> None:
        self._looking = worker
        self.send(worker, WorkerMessage.LOOK.value)

    def _prepare(self, worker: int, name: str, version: int, path: str) -> None:
        attempt = self._attempts[worker, name] = next(self._count)
        self._tell(worker, Move(Step.PREPARE, name, version, path, attempt=attempt))

    def _switch(self, worker: int, name: str, version: int) -> None:
        self._workers[worker][name] = version
        self._tell(worker, Move(Step.SWITCH, name, version))

    def _tell(self, worker: int, move: Move) -> None:
        self.send(worker, move.to_bytes())


def _do_nothing(worker: int, message: bytes = b"") -> None:
    return None
