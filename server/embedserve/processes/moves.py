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

from embedserve.processes.messages import Move, Step, WorkerMessage, refused

logger = logging.getLogger(__name__)

DEATHS_MAX = 2
"""Of workers, while they prepare a version: then it stays out."""
MOVE_S_MAX = 1800.0
"""Until all have prepared a version."""
SWITCHED = "%s is answered by version %d from now on, no more by %d"
REFUSED = "%s: version %d stays out: %s"


@dataclass
class _Moving:
    """A version that the workers prepare.

    Attributes:
        awaited: workers that have not prepared it.
        deaths: of workers meanwhile.
    """

    model: str
    version: int
    path: str
    until_s: float
    awaited: set[int] = field(default_factory=set)
    deaths: int = 0

    @property
    def key(self) -> tuple[str, int]:
        return self.model, self.version


class Together:
    """Decides, in the supervisor, when the workers move; one version at a time.

    Attributes:
        send: sends a message to a worker, by its number.
        end: ends a worker, by its number: another is started in its place.
    """

    def __init__(self, served: dict[str, int], adopt: Callable[[str, str], None]) -> None:
        """
        Args:
            served: the versions that workers start with, by model.
            adopt: told (model, path) of what workers start with from now on.
        """
        self.send: Callable[[int, bytes], None] = _do_nothing
        self.end: Callable[[int], None] = _do_nothing
        self._served = dict(served)
        self._starts_with = dict(served)  # as _served, but where a version could not be adopted
        self._adopt = adopt
        self._paths: dict[str, str] = {}
        self._workers: dict[int, dict[str, int]] = {}  # what those answer with that are ready
        self._started: dict[int, dict[str, int]] = {}
        self._attempts: dict[tuple[int, str], int] = {}  # what a worker prepares of a model
        self._count = itertools.count(1)
        self._looking: int | None = None
        self._moving: _Moving | None = None
        self._wanted: dict[str, int] = {}
        self._refused: dict[tuple[str, int], str] = {}

    def start(self, worker: int) -> None:
        """A worker is forked, and has what is served now."""
        for model in self._paths:
            self._adopt_again(model)
        self._started[worker] = dict(self._starts_with)

    def ready(self, worker: int) -> None:
        """A worker answers requests."""
        self._workers[worker] = self._started[worker]
        if self._looking is None:
            self._look(worker)
        for model, version in self._wanted.items():
            self._tell(worker, Move(Step.WANTED, model, version))
        for (model, version), reason in self._refused.items():
            self._tell(worker, refused(model, version, reason))
        moving = self._moving
        if moving is not None:
            moving.awaited.add(worker)
            self._prepare(worker, moving.model, moving.version, moving.path)
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

    def hear(self, worker: int, move: Move) -> None:
        """A worker says ``move``."""
        if move.step is Step.WANTED:
            self._want(move)
        elif move.step is Step.FOUND:
            self._find(worker, move)
        elif not move.attempt:  # it could not be opened
            self._refuse(*move.key, move.reason)
            self._tell(worker, refused(*move.key, move.reason))
        elif self._attempts.get((worker, move.model)) == move.attempt:
            del self._attempts[worker, move.model]
            if move.step is Step.REFUSED:
                self._note_refused(worker, move)
            else:
                self._note_prepared(worker, move)

    def _want(self, move: Move) -> None:
        """What was under way to another version ends; what failed before another was wanted may be
        tried again."""
        self._wanted[move.model] = move.version
        moving = self._moving
        if moving is not None and moving.model == move.model and moving.version != move.version:
            self._end_move(moving)
        for key in [one for one in self._refused if one[0] == move.model and one != move.key]:
            del self._refused[key]
        for worker in self._workers:
            self._tell(worker, move)
        self._catch_up()

    def _find(self, worker: int, found: Move) -> None:
        reason = self._refused.get(found.key)
        if reason is not None:
            self._tell(worker, refused(*found.key, reason))
        elif self._moving is None and self._served[found.model] != found.version:
            until_s = monotonic() + MOVE_S_MAX
            moving = _Moving(found.model, found.version, found.path, until_s, set(self._workers))
            self._moving = moving
            for one in self._workers:
                self._prepare(one, *moving.key, moving.path)

    def _note_prepared(self, worker: int, move: Move) -> None:
        moving = self._moving
        if moving is not None and move.key == moving.key:
            moving.awaited.discard(worker)
            self._go_on(moving)
        else:  # what the others answer with
            self._switch(worker, *move.key)

    def _note_refused(self, worker: int, move: Move) -> None:
        if self._served[move.model] == move.version:
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
        model, version = moving.key
        self._moving = None
        before = self._served[model]
        self._served[model], self._paths[model] = version, moving.path
        for worker in self._workers:
            self._switch(worker, model, version)
        logger.info(SWITCHED, model, version, before)
        self._adopt_again(model)

    def _adopt_again(self, model: str) -> None:
        """Where workers would start with another version than the others answer with."""
        if self._starts_with[model] == self._served[model]:
            return
        try:
            self._adopt(model, self._paths[model])
        except Exception as error:  # whatever it is, the workers go on
            before = self._starts_with[model]
            logger.error("%s: workers start with version %d still: %s", model, before, error)
        else:
            self._starts_with[model] = self._served[model]

    def _refuse(self, model: str, version: int, reason: str) -> None:
        key = model, version
        if key in self._refused:
            return
        self._refused[key] = reason
        logger.error(REFUSED, model, version, reason)
        if self._moving is not None and self._moving.key == key:
            self._end_move(self._moving)
        for worker in self._workers:
            self._tell(worker, refused(model, version, reason))
        self._catch_up()

    def _end_move(self, moving: _Moving) -> None:
        self._moving = None
        for worker in self._workers:
            self._attempts.pop((worker, moving.model), None)

    def _catch_up(self) -> None:
        """Has workers that answer with another version than the others prepare that one."""
        for worker, has in self._workers.items():
            for model, path in self._paths.items():
                is_under_way = (worker, model) in self._attempts
                if has[model] != self._served[model] and not is_under_way:
                    self._prepare(worker, model, self._served[model], path)

    def _look(self, worker: int) -> None:
        self._looking = worker
        self.send(worker, WorkerMessage.LOOK.value)

    def _prepare(self, worker: int, model: str, version: int, path: str) -> None:
        attempt = self._attempts[worker, model] = next(self._count)
        self._tell(worker, Move(Step.PREPARE, model, version, path, attempt=attempt))

    def _switch(self, worker: int, model: str, version: int) -> None:
        self._workers[worker][model] = version
        self._tell(worker, Move(Step.SWITCH, model, version))

    def _tell(self, worker: int, move: Move) -> None:
        self.send(worker, move.to_bytes())


def _do_nothing(worker: int, message: bytes = b"") -> None:
    return None
