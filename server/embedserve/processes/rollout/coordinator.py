"""Decides what all processes of a server serve: owns the desired state of every served name.

It runs in the supervisor, or in a server's only process. It has no I/O except in ``adopt`` and
``DeltaVersions``, which open files of a version. One version is rolled out at a time: all processes
activate it, or none does. Handlers note what has happened; ``_advance`` then takes the due steps:

    version   noted in           next state, and why
    found     ``store_version``  queued: opened by a poll, or LOAD; failed: cannot be opened
    queued    ``candidate``      loading: no other rollout is in progress
                                 failed: its deltas are held, or get no memory
    loading   ``_rollout``       prepared: all participants have loaded it
    prepared  ``_rollout``       serving: it has the deltas that ``request_switch`` has requested
    (both)                       failed: FAILED, EXITS_MAX, ROLLOUT_S_MAX, deltas held or stalled
    serving   ``serving``        dropped: another version serves, or UNLOAD
    failed    ``failure``        queued: LOAD, or opened by a poll; if final, only after RELOAD
    (others)                     dropped: another version in store, LOAD of the serving one, UNLOAD
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import monotonic

from embedserve.config import ServeSettings
from embedserve.processes.rollout.delta_versions import HELD_REASON, DeltaVersions
from embedserve.processes.rollout.messages import (
    REASON_CHARACTERS_MAX,
    AdminCommand,
    Desired,
    Failure,
    LoadState,
    NameStatus,
    Operation,
    Report,
    StoreEntry,
    StoreReport,
    WorkerStatus,
)
from embedserve.processes.rollout.served_name import Rollout, RolloutVersion, ServedName
from embedserve_store import StoreError
from embedserve_store.errors import TRANSIENT

logger = logging.getLogger(__name__)

EXITS_MAX = 2
"""Exits of workers that had not prepared a version yet, after which its rollout fails."""
ROLLOUT_S_MAX = 1800.0
"""Seconds that all workers together may take to prepare a version."""
SWITCHED = "%s: switched to version %d (before: %s)"
REMOVED = "%s is no longer served"
NOT_SERVED = "%s: version %d stays out: %s"
CANNOT_FOLLOW = "worker %d cannot follow the others to %s version %d: %s"
_DIGITS = re.compile(r"[\d.,]+")


class RolloutCoordinator:
    """Desired state of a server, and what its workers last reported.

    A worker that starts is behind until it serves what the others serve. Until then it receives
    only what is being served, does not listen, and has no part in a rollout: an activation may have
    come between its fork and its start. While no worker has caught up, none is behind.

    Attributes:
        delta_versions: as in the constructor.
        send: function that sends a worker, by its number, the desired state. Set by the Supervisor,
            or by start_rollouts in a single process.
        end: function that ends a worker, by its number; the supervisor restarts it. Set by the
            Supervisor; a single process is not ended.
    """

    def __init__(
        self,
        served: Mapping[str, RolloutVersion],
        adopt: Callable[[str, str | None], None],
        delta_versions: DeltaVersions | None = None,
    ) -> None:
        """
        Args:
            served: versions that workers start with, by served name.
            adopt: called with (name, path) of the version that workers start with from now on; path
                None for no version.
            delta_versions: versions whose deltas the server follows. Default: none.
        """
        self.send: Callable[[int, Desired], None] = lambda worker, desired: None
        self.end: Callable[[int], None] = lambda worker: None
        self._adopt = adopt
        self.delta_versions = delta_versions or DeltaVersions(ServeSettings(store=""), {})
        self._names = {name: ServedName(found, found.number) for name, found in served.items()}
        self._generations = itertools.count(1)
        self._rollout: Rollout | None = None
        self._workers: dict[int, WorkerStatus] = {}
        self._caught_up: set[int] = set()
        self._sent: dict[int, Desired] = {}
        self._commands_handled: dict[int, int] = {}
        self._watcher: int | None = None
        self._polls_requested = self._polls_completed = 0

    def on_worker_fork(self) -> None:
        """Adopts versions that could not be adopted before; called before a worker is forked."""
        for name in self._names:
            self._adopt_serving(name)

    def on_worker_start(self, worker: int, status: WorkerStatus) -> None:
        """Sends a worker the desired state, once it has loaded what it was forked with."""
        self._workers[worker] = status
        self._commands_handled[worker] = 0
        self._note_if_caught_up(worker)
        if self._watcher is None:
            self._watcher = worker
        self._publish()

    def on_worker_exit(self, worker: int, how: str) -> None:
        """Records that a worker exited, started or not; ``how`` is the text for the log."""
        rollout, status = self._rollout, self._participants().get(worker)
        self._workers.pop(worker, None)
        self._caught_up.discard(worker)
        self._sent.pop(worker, None)
        if worker == self._watcher:
            self._watcher = min(self._workers, default=None)
            # The next one repeats a poll that was requested and has not ended.
            is_polling = self._polls_requested > self._polls_completed
            self._polls_requested, self._polls_completed = int(is_polling), 0
        if rollout is not None and status is not None and not rollout.is_prepared(status):
            rollout.exits += 1
            if rollout.exits >= EXITS_MAX:
                self._fail_rollout(rollout, f"a worker {how} while it was loaded")
            elif not self._workers:
                rollout.until_s = monotonic() + ROLLOUT_S_MAX  # for the workers that replace them
        self._advance()

    def on_report(self, worker: int, report: Report) -> None:
        """Handles a message of a worker."""
        if isinstance(report, WorkerStatus):
            self._on_status(worker, report)
        elif isinstance(report, StoreReport):
            for name, found in report.names.items():
                self._on_store_entry(name, found)
            self._polls_completed = max(self._polls_completed, report.poll_completed)
        else:
            self._on_command(report)
            self._commands_handled[worker] = report.serial
        self._advance()

    def advance_rollout(self) -> None:
        """Ends the rollout in progress if it takes too long, or if its deltas are held or cannot be
        applied. Activates its version once that has its deltas. A supervisor calls this
        periodically."""
        rollout = self._rollout
        if rollout is None:
            return
        if self.delta_versions.is_held(rollout.name):
            self._record_failure(rollout.name, rollout.version.number, HELD_REASON, is_final=False)
        elif why := self.delta_versions.why_stalled():
            self._fail_rollout(rollout, why)
        elif monotonic() > rollout.until_s:
            participants = self._participants().items()
            slow = [worker for worker, status in participants if not rollout.is_prepared(status)]
            workers = ", ".join(map(str, sorted(slow)))
            who = f"workers {workers} have not loaded" if slow else "no worker has run to load"
            self._fail_rollout(rollout, f"{who} it in {ROLLOUT_S_MAX:g} s")
        self._advance()

    def is_preparing(self, worker: int) -> bool:
        """Returns whether a worker is loading a version, during which it may seem to hang."""
        if worker not in self._workers:
            return False
        statuses = self._workers[worker].names
        return any(
            statuses.get(name, NameStatus(0)).is_loading(target)
            for name, target in self._sent[worker].names.items()
        )

    def reload(self) -> None:
        """Requests an immediate poll of the store, by the next worker if none is ready. Versions
        with a final failure are retried."""
        self._polls_requested += 1
        for served in self._names.values():
            if served.failure is not None and served.failure.is_final:
                served.failure = None
        self._advance()

    def _on_status(self, worker: int, status: WorkerStatus) -> None:
        before = self._workers.get(worker)
        if before is None:
            return
        self._workers[worker] = status
        self._note_if_caught_up(worker)
        for name, new in status.names.items():
            has_failed = new.state is LoadState.FAILED and new != before.names.get(name)
            if has_failed and name in self._names:
                self._on_failed_load(worker, name, new)

    def _note_if_caught_up(self, worker: int) -> None:
        """Counts a worker among the others from now on if it serves what they serve."""
        names = self._workers[worker].names
        if all(
            names.get(name, NameStatus(0)).is_serving(served.serving_target())
            for name, served in self._names.items()
            if served.number
        ):
            self._caught_up.add(worker)

    def _is_behind(self, worker: int) -> bool:
        """Returns whether a worker has yet to load what the others serve."""
        return bool(self._caught_up) and worker not in self._caught_up

    def _participants(self) -> dict[int, WorkerStatus]:
        """Returns the workers that a rollout waits for."""
        return {one: status for one, status in self._workers.items() if not self._is_behind(one)}

    def _on_failed_load(self, worker: int, name: str, status: NameStatus) -> None:
        rollout, serving = self._rollout, self._names[name].serving
        if rollout is not None and status.generation == rollout.version.generation:
            number, is_final = rollout.version.number, status.is_final
            self._record_failure(name, number, status.reason, is_final=is_final)
        elif serving.number and status.generation == serving.generation:
            logger.error(CANNOT_FOLLOW, worker, name, serving.number, status.reason)
            self.end(worker)

    def _on_store_entry(self, name: str, found: StoreEntry) -> None:
        """Handles the state of a name in the store."""
        served = self._names.get(name)
        if served is None or not served.number:  # unloaded, or no version serves yet
            return
        served.found_alias_settings = found.alias_settings
        served.update_alias_settings()
        if not found.version:
            return
        self.delta_versions.set_at_seq(name, found.version, found.alias_settings.at_seq)
        self._set_store_version(name, served, found.version)
        needs_no_rollout = (
            self._is_being_rolled_out(name, found.version) or found.version == served.number
        )
        if found.reason and not needs_no_rollout:
            self._record_failure(name, found.version, found.reason, is_final=found.is_final)
        has_failed = served.failure is not None and served.failure.is_final
        if found.path and not needs_no_rollout and not has_failed:
            served.candidate = RolloutVersion(found.version, found.path)

    def _set_store_version(self, name: str, served: ServedName, number: int) -> None:
        """Sets the version that the store points to. If it is another than before, ends a rollout
        of the name to other versions, and forgets their failures."""
        if served.store_version == number:
            return
        served.store_version = number
        self._cancel_others(name, served, number)
        served.previous_failure = None
        if served.failure is not None and served.failure.version != number:
            served.failure = None

    def _cancel_others(self, name: str, served: ServedName, number: int) -> None:
        """Ends a rollout of ``name`` to another version than ``number``, begun or not."""
        rollout = self._rollout
        if rollout is not None and rollout.name == name and rollout.version.number != number:
            self._rollout = None
        if served.candidate is not None and served.candidate.number != number:
            served.candidate = None

    def _on_command(self, command: AdminCommand) -> None:
        if command.operation is Operation.RELOAD:
            self.reload()
        elif command.operation is Operation.UNLOAD:
            self._remove(command.name)
        else:
            served = self._names.setdefault(command.name, ServedName())
            served.failure = None
            self.delta_versions.set_at_seq(command.name, command.version, command.at_seq)
            if served.store_version:  # the store names the version that is loaded
                served.store_version = command.version
            if command.version == served.number:
                self._cancel_others(command.name, served, command.version)
            elif self._is_being_rolled_out(command.name, command.version):
                served.candidate = None
            else:
                served.candidate = RolloutVersion(command.version, command.path)

    def _is_being_rolled_out(self, name: str, number: int) -> bool:
        rollout = self._rollout
        return rollout is not None and (rollout.name, rollout.version.number) == (name, number)

    def _remove(self, name: str) -> None:
        """Stops serving ``name``, unless nothing else is served; forgets a name that never served
        and has failed to load."""
        serving = [other for other, one in self._names.items() if one.number]
        if name not in serving:
            served = self._names.get(name)
            if served is not None and served.failure is not None and served.candidate is None:
                del self._names[name]
            return
        if len(serving) == 1:
            return
        del self._names[name]
        if self._rollout is not None and self._rollout.name == name:
            self._rollout = None
        self._adopt(name, None)
        logger.info(REMOVED, name)

    def _fail_rollout(self, rollout: Rollout, reason: str) -> None:
        self._record_failure(rollout.name, rollout.version.number, reason, is_final=True)

    def _record_failure(self, name: str, number: int, reason: str, *, is_final: bool) -> None:
        """Records why a version is not served, and ends its rollout. Logs the reason unless only
        numbers in it have changed."""
        served = self._names[name]
        before = served.failure or served.previous_failure
        is_same = before is not None and (before.version, before.is_final) == (number, is_final)
        is_known = before is not None and is_same and (is_final or before.reason == reason)
        if served.failure is not None and is_known:
            return
        served.failure = Failure(number, reason[:REASON_CHARACTERS_MAX], is_final)
        if served.candidate is not None and served.candidate.number == number:
            served.candidate = None
        if self._is_being_rolled_out(name, number):
            self._rollout = None
        if before is None or not is_same or _is_new_reason(reason, before.reason):
            logger.error(NOT_SERVED, name, number, reason)

    def _advance(self) -> None:
        """Activates the version that all have prepared, begins the next rollout, and sends the
        workers what has changed."""
        rollout, reports = self._rollout, self._participants().values()
        is_prepared = rollout is not None and reports and all(map(rollout.is_prepared, reports))
        if rollout is not None and is_prepared and self.delta_versions.request_switch():
            self._activate(rollout)
        if self._rollout is None:
            self.delta_versions.drop_next()
            self._begin_next()
        self._publish()

    def _activate(self, rollout: Rollout) -> None:
        self._rollout = None
        served = self._names[rollout.name]
        before, served.serving = served.number, rollout.version
        served.update_alias_settings()
        self._publish()
        logger.info(SWITCHED, rollout.name, rollout.version.number, before or "none")
        self._adopt_serving(rollout.name)

    def _begin_next(self) -> None:
        for name, served in self._names.items():
            candidate, served.candidate = served.candidate, None
            if candidate is None:
                continue
            if self.delta_versions.is_held(name):
                self._record_failure(name, candidate.number, HELD_REASON, is_final=False)
                continue
            served.previous_failure, served.failure = served.failure, None
            version = replace(candidate, generation=next(self._generations))
            try:
                version = self.delta_versions.prepare(name, version)
            except Exception as error:  # any error: the workers keep serving
                reason = str(error) if isinstance(error, StoreError) else repr(error)
                is_final = not isinstance(error, TRANSIENT)
                self._record_failure(name, version.number, reason, is_final=is_final)
                continue
            self._rollout = Rollout(name, version, monotonic() + ROLLOUT_S_MAX)
            return

    def _adopt_serving(self, name: str) -> None:
        """Adopts the served version if workers would start with another one."""
        served = self._names[name]
        if served.starts_with == served.number:
            return
        try:
            self._adopt(name, served.serving.path)
        except Exception as error:  # any error: the workers keep serving
            before = served.starts_with or "none"
            logger.error("%s: workers start with version %s still: %s", name, before, error)
        else:
            served.starts_with = served.number

    def _publish(self) -> None:
        """Sends each worker the desired state, if it differs from what was sent before."""
        serving = {name: served.serving_target() for name, served in self._names.items()}
        names, rollout = dict(serving), self._rollout
        if rollout is not None:
            names[rollout.name] = rollout.target(serving[rollout.name])
        for worker in self._workers:
            is_behind = self._is_behind(worker)
            desired = Desired(
                serving if is_behind else names,
                watches_store=worker == self._watcher,
                polls_requested=self._polls_requested,
                may_listen=not is_behind,
                command_handled=self._commands_handled[worker],
            )
            if self._sent.get(worker) != desired:
                self._sent[worker] = desired
                self.send(worker, desired)


def _is_new_reason(reason: str, before: str) -> bool:
    """Returns whether ``reason`` differs from ``before`` in more than numbers, such as free bytes.
    Only new reasons are logged."""
    return _DIGITS.sub("", reason) != _DIGITS.sub("", before)
