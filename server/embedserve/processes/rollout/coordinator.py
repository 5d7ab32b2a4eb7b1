"""Decides what all processes of a server serve: owns the desired state of every served name.

A rollout has two phases. All processes load the new version while the current one serves. Once all
have loaded it, all activate it. If one fails, none does. One version is rolled out at a time. A
process that starts meanwhile receives the desired state like the others. The coordinator runs in
the supervisor, or in a server's only process. It has no I/O except through ``adopt``, which opens
the files of a version in the supervisor.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic

from embedserve.processes.rollout.messages import (
    REASON_CHARACTERS_MAX,
    AdminCommand,
    Desired,
    Failure,
    LoadState,
    NameStatus,
    Operation,
    Report,
    Shares,
    StoreEntry,
    StoreReport,
    Target,
    TargetPhase,
    WorkerStatus,
    is_news,
)
from embedserve_store import ModelVersion

logger = logging.getLogger(__name__)

DEATHS_MAX = 2
"""Worker exits while a version is prepared, after which the version is rejected."""
ROLLOUT_S_MAX = 1800.0
"""Seconds that all workers together may take to prepare a version."""
SWITCHED = "%s is answered by version %d from now on, no more by %s"
REMOVED = "%s is answered no more"
REFUSED = "%s: version %d stays out: %s"


@dataclass(frozen=True)
class RolloutVersion:
    """A version, by its number and folder. Each rollout of it has its own generation."""

    number: int
    path: str
    generation: int = 0

    @classmethod
    def of(cls, version: ModelVersion) -> RolloutVersion:
        """Returns the version that a server starts with."""
        return cls(version.manifest.version, str(version.path))


@dataclass
class _Name:
    """Desired state of a served name, and what may change it.

    Attributes:
        serving: version that all processes serve; None before the first one.
        starts_with: number of the version that forked workers start with.
        wanted: version that the store points to; 0 if that is not known.
        candidate: opened version whose rollout has not begun.
    """

    serving: RolloutVersion | None = None
    starts_with: int = 0
    wanted: int = 0
    candidate: RolloutVersion | None = None
    failure: Failure | None = None
    shares: Shares | None = None

    @property
    def number(self) -> int:
        return 0 if self.serving is None else self.serving.number


@dataclass
class _Rollout:
    """A version that the processes prepare.

    Attributes:
        until_s: monotonic time at which it is rejected.
        deaths: number of workers that exited while preparing it.
    """

    name: str
    version: RolloutVersion
    until_s: float
    deaths: int = 0

    def is_prepared(self, status: WorkerStatus) -> bool:
        one = status.names.get(self.name, NameStatus(0))
        is_loaded = one.state is LoadState.PREPARED and one.generation == self.version.generation
        return is_loaded or one.version == self.version.number


class RolloutCoordinator:
    """Desired state of a server, and what its ready workers last reported.

    Attributes:
        send: function that sends a worker, by its number, the desired state. Set by the Supervisor,
            or by start_rollouts in a single process.
        end: function that ends a worker, by its number; the supervisor restarts it. Set by the
            Supervisor; a single process is not ended.
    """

    def __init__(
        self, served: Mapping[str, RolloutVersion], adopt: Callable[[str, str | None], None]
    ) -> None:
        """
        Args:
            served: versions that workers start with, by served name.
            adopt: called with (name, path) of the version that workers start with from now on; path
                None for no version.
        """
        self.send: Callable[[int, Desired], None] = lambda worker, desired: None
        self.end: Callable[[int], None] = lambda worker: None
        self._adopt = adopt
        self._names = {name: _Name(one, one.number) for name, one in served.items()}
        self._generations = itertools.count(1)
        self._rollout: _Rollout | None = None
        self._workers: dict[int, WorkerStatus] = {}
        self._sent: dict[int, Desired] = {}
        self._watcher: int | None = None
        self._polls = 0

    def on_worker_fork(self) -> None:
        """Adopts versions that could not be adopted before; called before a worker is forked."""
        for name in self._names:
            self._adopt_serving(name)

    def on_worker_ready(self, worker: int) -> None:
        """Sends a ready worker the desired state."""
        self._workers[worker] = WorkerStatus()
        if self._watcher is None:
            self._watcher = worker
        self._publish()

    def on_worker_exit(self, worker: int, how: str) -> None:
        """Records that a worker exited, ready or not; ``how`` is the text for the log."""
        status, rollout = self._workers.pop(worker, None), self._rollout
        self._sent.pop(worker, None)
        if worker == self._watcher:
            self._watcher = min(self._workers, default=None)
        if status is not None and rollout is not None and not rollout.is_prepared(status):
            rollout.deaths += 1
            if rollout.deaths >= DEATHS_MAX:
                self._reject(rollout, f"a worker {how} while it was loaded")
            elif not self._workers:
                rollout.until_s = monotonic() + ROLLOUT_S_MAX  # for the workers that replace them
        self._advance()

    def on_report(self, worker: int, report: Report) -> None:
        """Handles a message of a ready worker."""
        if isinstance(report, WorkerStatus):
            self._on_status(worker, report)
        elif isinstance(report, StoreReport):
            for name, found in report.names.items():
                self._on_found(name, found)
        else:
            self._on_command(report)
        self._advance()

    def check_timeouts(self) -> None:
        """Rejects the version of a rollout that takes too long."""
        rollout = self._rollout
        if rollout is not None and monotonic() > rollout.until_s:
            slow = [str(one) for one, has in self._workers.items() if not rollout.is_prepared(has)]
            why = f"workers {', '.join(sorted(slow))} have not loaded it in {ROLLOUT_S_MAX:g} s"
            self._reject(rollout, why)
            self._advance()

    def is_preparing(self, worker: int) -> bool:
        """Returns whether a worker is loading a version, during which it may seem to hang."""
        if worker not in self._workers:
            return False
        has = self._workers[worker].names
        return any(
            _is_behind(has.get(name, NameStatus(0)), target)
            for name, target in self._sent[worker].names.items()
        )

    def reload(self) -> None:
        """Requests an immediate poll of the store. Rejected versions are retried."""
        if self._watcher is None:
            logger.warning("the store is not looked at: no worker is ready")
            return
        self._polls += 1
        for one in self._names.values():
            if one.failure is not None and one.failure.is_final:
                one.failure = None
        self._advance()

    def _on_status(self, worker: int, status: WorkerStatus) -> None:
        before = self._workers.get(worker)
        if before is None:
            return
        self._workers[worker] = status
        for name, one in status.names.items():
            has_failed = one.state is LoadState.FAILED and one != before.names.get(name)
            if has_failed and name in self._names:
                self._on_failed_load(worker, name, one)

    def _on_failed_load(self, worker: int, name: str, status: NameStatus) -> None:
        rollout, serving = self._rollout, self._names[name].serving
        if rollout is not None and status.generation == rollout.version.generation:
            self._reject(rollout, status.reason)
        elif serving is not None and status.generation == serving.generation:
            logger.error(
                "worker %d cannot follow the others to %s version %d: %s",
                worker,
                name,
                serving.number,
                status.reason,
            )
            self.end(worker)

    def _on_found(self, name: str, found: StoreEntry) -> None:
        """Handles the state of a name in the store."""
        one = self._names.get(name)
        if one is None or one.serving is None:  # it was unloaded meanwhile
            return
        one.shares = found.shares
        if not found.wanted:
            return
        self._set_wanted(name, one, found.wanted)
        needs_no_rollout = (
            self._is_being_rolled_out(name, found.wanted) or found.wanted == one.number
        )
        if found.reason and not needs_no_rollout:
            self._fail(name, found.wanted, found.reason, is_final=found.is_final)
        is_rejected = one.failure is not None and one.failure.is_final
        if found.path and not needs_no_rollout and not is_rejected:
            one.candidate = RolloutVersion(found.wanted, found.path)

    def _set_wanted(self, name: str, one: _Name, number: int) -> None:
        """Sets the version that the store points to. If it is another than before, ends a rollout
        of the name to other versions, and forgets their failures."""
        if one.wanted == number:
            return
        one.wanted = number
        if self._rollout is not None and self._rollout.name == name:
            self._rollout = self._rollout if self._is_being_rolled_out(name, number) else None
        if one.candidate is not None and one.candidate.number != number:
            one.candidate = None
        if one.failure is not None and one.failure.version != number:
            one.failure = None

    def _on_command(self, command: AdminCommand) -> None:
        if command.operation is Operation.RELOAD:
            self.reload()
        elif command.operation is Operation.UNLOAD:
            self._remove(command.name)
        else:
            one = self._names.setdefault(command.name, _Name())
            one.failure = None
            if not self._is_being_rolled_out(command.name, command.version):
                one.candidate = RolloutVersion(command.version, command.path)

    def _is_being_rolled_out(self, name: str, number: int) -> bool:
        rollout = self._rollout
        return rollout is not None and (rollout.name, rollout.version.number) == (name, number)

    def _remove(self, name: str) -> None:
        """Stops serving ``name``, unless nothing else is served; forgets a name that never served
        and has failed to load."""
        served = [one for one, has in self._names.items() if has.serving is not None]
        if name not in served:
            one = self._names.get(name)
            if one is not None and one.failure is not None and one.candidate is None:
                del self._names[name]
            return
        if len(served) == 1:
            return
        del self._names[name]
        if self._rollout is not None and self._rollout.name == name:
            self._rollout = None
        self._adopt(name, None)
        logger.info(REMOVED, name)

    def _reject(self, rollout: _Rollout, reason: str) -> None:
        self._fail(rollout.name, rollout.version.number, reason, is_final=True)

    def _fail(self, name: str, number: int, reason: str, *, is_final: bool) -> None:
        """Keeps a version out. The reason is logged unless only its numbers have changed."""
        one = self._names[name]
        before = one.failure
        is_same = before is not None and (before.version, before.is_final) == (number, is_final)
        if before is not None and is_same and (is_final or before.reason == reason):
            return
        one.failure = Failure(
            number, reason[:REASON_CHARACTERS_MAX], is_final, next(self._generations)
        )
        if one.candidate is not None and one.candidate.number == number:
            one.candidate = None
        if self._is_being_rolled_out(name, number):
            self._rollout = None
        if before is None or not is_same or is_news(reason, before.reason):
            logger.error(REFUSED, name, number, reason)

    def _advance(self) -> None:
        """Activates the version that all have prepared, begins the next rollout, and sends the
        workers what has changed."""
        rollout, reports = self._rollout, self._workers.values()
        if rollout is not None and reports and all(map(rollout.is_prepared, reports)):
            self._activate(rollout)
        if self._rollout is None:
            self._begin_next()
        self._publish()

    def _activate(self, rollout: _Rollout) -> None:
        self._rollout = None
        one = self._names[rollout.name]
        before, one.serving = one.number, rollout.version
        self._publish()
        logger.info(SWITCHED, rollout.name, rollout.version.number, before or "none")
        self._adopt_serving(rollout.name)

    def _begin_next(self) -> None:
        for name, one in self._names.items():
            candidate, one.candidate = one.candidate, None
            if candidate is not None and candidate.number != one.number:
                one.failure = None
                version = RolloutVersion(candidate.number, candidate.path, next(self._generations))
                self._rollout = _Rollout(name, version, monotonic() + ROLLOUT_S_MAX)
                return

    def _adopt_serving(self, name: str) -> None:
        """Adopts the served version if workers would start with another one."""
        one = self._names[name]
        if one.serving is None or one.starts_with == one.number:
            return
        try:
            self._adopt(name, one.serving.path)
        except Exception as error:  # any error: the workers keep serving
            before = one.starts_with or "none"
            logger.error("%s: workers start with version %s still: %s", name, before, error)
        else:
            one.starts_with = one.number

    def _publish(self) -> None:
        """Sends each ready worker the desired state, if it differs from what was sent before."""
        names = {name: self._target(name, one) for name, one in self._names.items()}
        for worker in self._workers:
            desired = Desired(names, worker == self._watcher, self._polls)
            if self._sent.get(worker) != desired:
                self._sent[worker] = desired
                self.send(worker, desired)

    def _target(self, name: str, one: _Name) -> Target:
        """Returns the target of ``name``. While a version is prepared the target does not say which
        one serves: a worker that starts then has that one from ``adopt``."""
        phase, version = TargetPhase.ACTIVATE, one.serving or RolloutVersion(0, "")
        if self._rollout is not None and self._rollout.name == name:
            phase, version = TargetPhase.PREPARE, self._rollout.version
        return Target(
            version.number,
            version.path,
            version.generation,
            phase,
            one.wanted,
            one.failure,
            one.shares,
        )


def _is_behind(status: NameStatus, target: Target) -> bool:
    is_loaded = status.state is not LoadState.LOADING and status.generation == target.generation
    return target.version not in (0, status.version) and not is_loaded
