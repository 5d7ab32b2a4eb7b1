"""Workers that a rollout coordinator controls, and that load when the test says so."""

from dataclasses import replace

from embedserve.processes.rollout.coordinator import RolloutCoordinator
from embedserve.processes.rollout.messages import (
    AdminCommand,
    AliasSettings,
    Desired,
    LoadState,
    NameStatus,
    Operation,
    StoreEntry,
    StoreReport,
    Target,
    TargetPhase,
    WorkerStatus,
)
from embedserve.processes.rollout.served_name import RolloutVersion
from embedserve_store import StoreError

PATH = "/store/shop/8"
EIGHT = StoreEntry(8, path=PATH)
UNOPENED = StoreEntry(8, reason="is cut")
TargetChange = tuple[int, int, TargetPhase]
"""Worker, version and phase of a name's target."""


class Worker:
    """A process that follows its targets, and loads when the test says so."""

    def __init__(self, versions: dict[str, int]) -> None:
        self.names = {name: NameStatus(number) for name, number in versions.items()}
        self.desired = Desired()

    def apply(self, desired: Desired) -> None:
        self.desired = desired
        for name, target in desired.names.items():
            has = self.names.get(name, NameStatus(0))
            if target.version in (0, has.version):
                self.names[name] = NameStatus(has.version)
            elif has.generation != target.generation:
                self.names[name] = NameStatus(has.version, target.generation, LoadState.LOADING)
            self._activate(name, target)
        for name in set(self.names) - set(desired.names):
            del self.names[name]

    def status(self) -> WorkerStatus:
        return WorkerStatus(dict(self.names))

    def load(self, name: str, reason: str = "", *, is_final: bool = True) -> None:
        """Completes the load of a version, which is prepared, or fails for ``reason``."""
        state = LoadState.FAILED if reason else LoadState.PREPARED
        before = self.names[name]
        self.names[name] = replace(before, state=state, reason=reason, is_final=is_final)
        self._activate(name, self.desired.names[name])

    def _activate(self, name: str, target: Target) -> None:
        if self.names[name].state is LoadState.PREPARED and target.phase is TargetPhase.SERVE:
            self.names[name] = NameStatus(target.version)


class Workers:
    """The workers of a server, and the targets that they receive."""

    def __init__(self) -> None:
        served = {
            "shop": RolloutVersion(7, "/store/shop/7"),
            "films": RolloutVersion(1, "/store/films/1"),
        }
        self.coordinator = RolloutCoordinator(served, self._adopt)
        self.coordinator.send = self._send
        self.ended_by_coordinator: list[int] = []
        self.coordinator.end = self.ended_by_coordinator.append
        self.adopted: list[tuple[str, str | None]] = []
        self.adopt_failure = ""
        self.workers: dict[int, Worker] = {}
        self._started = {"shop": 7, "films": 1}
        self._target_changes: list[TargetChange] = []

    def _adopt(self, name: str, path: str | None) -> None:
        if self.adopt_failure:
            raise StoreError(self.adopt_failure)
        self.adopted.append((name, path))
        self._started.pop(name, None)
        if path is not None:
            self._started[name] = int(path.rpartition("/")[2])

    def _send(self, worker: int, desired: Desired) -> None:
        before = self.workers[worker].desired.names
        self._target_changes += [
            (worker, one.version, one.phase)
            for name, one in desired.names.items()
            if name not in before
            or (one.version, one.phase) != (before[name].version, before[name].phase)
        ]
        self.workers[worker].apply(desired)

    def fork(self, *workers: int) -> None:
        for worker in workers:
            self.coordinator.on_worker_fork()
            self.workers[worker] = Worker(self._started)

    def ready(self, *workers: int) -> None:
        for worker in workers:
            self.coordinator.on_worker_start(worker, self.workers[worker].status())
            self.report(worker)

    def start(self, *workers: int) -> None:
        for worker in workers:
            self.fork(worker)
            self.ready(worker)

    def report(self, worker: int) -> None:
        self.coordinator.on_report(worker, self.workers[worker].status())

    def load(
        self, *workers: int, name: str = "shop", reason: str = "", is_final: bool = True
    ) -> None:
        for worker in workers:
            self.workers[worker].load(name, reason, is_final=is_final)
            self.report(worker)

    def report_store(self, found: StoreEntry, name: str = "shop") -> None:
        self.coordinator.on_report(0, StoreReport({name: found}))

    def command(self, operation: Operation, name: str, version: int = 0) -> None:
        path = f"/store/shop/{version}" if version else ""
        self.coordinator.on_report(0, AdminCommand(operation, name, version, path))

    def kill(self, *workers: int, how: str = "was ended by SIGKILL") -> None:
        for worker in workers:
            del self.workers[worker]
            self.coordinator.on_worker_exit(worker, how)

    def take_target_changes(self) -> list[TargetChange]:
        """Returns the targets that changed since the last call."""
        changes, self._target_changes = self._target_changes, []
        return changes

    def served_versions(self, name: str = "shop") -> list[int]:
        return [worker.names[name].version for worker in self.workers.values()]

    def failures(self, name: str = "shop") -> list[tuple[int, str] | None]:
        """Returns the (version, reason) that each worker receives."""
        found = [worker.desired.names[name].failure for worker in self.workers.values()]
        return [None if one is None else (one.version, one.reason) for one in found]

    def may_listen(self) -> list[bool]:
        return [worker.desired.may_listen for worker in self.workers.values()]

    def alias_settings(self) -> list[AliasSettings | None]:
        return [worker.desired.names["shop"].alias_settings for worker in self.workers.values()]

    def store_watchers(self) -> list[int]:
        return [number for number, one in self.workers.items() if one.desired.watches_store]


def prepare(*workers: int, version: int = 8) -> list[TargetChange]:
    return [(worker, version, TargetPhase.PREPARE) for worker in workers]


def activate(*workers: int, version: int = 8) -> list[TargetChange]:
    return [(worker, version, TargetPhase.SERVE) for worker in workers]
