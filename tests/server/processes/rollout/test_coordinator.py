"""Tests of the rollout coordinator: all workers switch to a version, or none does."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from embedserve.processes.rollout.coordinator import RolloutCoordinator
from embedserve.processes.rollout.messages import (
    AdminCommand,
    AliasSettings,
    Desired,
    Failure,
    LoadState,
    NameStatus,
    Operation,
    Report,
    StartReport,
    StoreEntry,
    StoreReport,
    Target,
    TargetPhase,
    WorkerStage,
    WorkerStatus,
    desired_from_bytes,
    desired_to_bytes,
    report_from_bytes,
    report_to_bytes,
)
from embedserve.processes.rollout.served_name import RolloutVersion
from embedserve_store import StoreError

PATH = "/store/shop/8"
EIGHT = StoreEntry(8, path=PATH)
UNOPENED = StoreEntry(8, reason="is cut")
Told = tuple[int, int, TargetPhase]
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
        self.ended_by_us: list[int] = []
        self.coordinator.end = self.ended_by_us.append
        self.adopted: list[tuple[str, str | None]] = []
        self.damage = ""
        self.workers: dict[int, Worker] = {}
        self._started = {"shop": 7, "films": 1}
        self._told: list[Told] = []

    def _adopt(self, name: str, path: str | None) -> None:
        if self.damage:
            raise StoreError(self.damage)
        self.adopted.append((name, path))
        self._started.pop(name, None)
        if path is not None:
            self._started[name] = int(path.rpartition("/")[2])

    def _send(self, worker: int, desired: Desired) -> None:
        before = self.workers[worker].desired.names
        self._told += [
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

    def find(self, found: StoreEntry, name: str = "shop") -> None:
        self.coordinator.on_report(0, StoreReport({name: found}))

    def command(self, operation: Operation, name: str, version: int = 0) -> None:
        path = f"/store/shop/{version}" if version else ""
        self.coordinator.on_report(0, AdminCommand(operation, name, version, path))

    def kill(self, *workers: int, how: str = "was ended by SIGKILL") -> None:
        for worker in workers:
            del self.workers[worker]
            self.coordinator.on_worker_exit(worker, how)

    def told(self) -> list[Told]:
        """Returns the targets that changed since the last call."""
        told, self._told = self._told, []
        return told

    def serving(self, name: str = "shop") -> list[int]:
        return [worker.names[name].version for worker in self.workers.values()]

    def failures(self, name: str = "shop") -> list[tuple[int, str] | None]:
        """Returns the (version, reason) that each worker receives."""
        found = [worker.desired.names[name].failure for worker in self.workers.values()]
        return [None if one is None else (one.version, one.reason) for one in found]

    def may_listen(self) -> list[bool]:
        return [worker.desired.may_listen for worker in self.workers.values()]

    def shares(self) -> list[AliasSettings | None]:
        return [worker.desired.names["shop"].alias_settings for worker in self.workers.values()]

    def watchers(self) -> list[int]:
        return [number for number, one in self.workers.items() if one.desired.watches_store]


@pytest.fixture
def workers() -> Workers:
    """Returns two workers; the first one watches the store."""
    workers = Workers()
    workers.start(0, 1)
    assert workers.watchers() == [0]
    workers.told()
    return workers


def prepare(*workers: int, version: int = 8) -> list[Told]:
    return [(worker, version, TargetPhase.PREPARE) for worker in workers]


def activate(*workers: int, version: int = 8) -> list[Told]:
    return [(worker, version, TargetPhase.SERVE) for worker in workers]


def test_all_prepare_and_then_all_switch(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    workers.find(StoreEntry(8))
    assert workers.told() == []
    assert [one.desired.names["shop"].wanted for one in workers.workers.values()] == [8, 8]
    workers.find(EIGHT)
    assert workers.told() == prepare(0, 1)
    workers.load(0)
    workers.find(EIGHT)  # it has polled again meanwhile
    assert workers.told() == []
    assert workers.serving() == [7, 7]
    workers.load(1)
    assert workers.told() == activate(0, 1)
    assert workers.serving() == [8, 8]
    assert workers.adopted == [("shop", PATH)]
    workers.find(EIGHT)
    assert workers.told() == []
    assert caplog.messages == ["shop: switched to version 8 (before: 7)"]


def test_where_one_cannot_none_does_and_it_is_said_once(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    workers.find(EIGHT)
    workers.load(0)
    workers.told()
    workers.load(1, reason="damaged")
    assert workers.told() == activate(0, 1, version=7)
    assert workers.failures() == [(8, "damaged")] * 2
    workers.find(EIGHT)
    workers.find(StoreEntry(8, reason="cannot be opened either", is_final=True))
    assert workers.told() == []
    assert workers.failures() == [(8, "damaged")] * 2
    assert caplog.messages == ["shop: version 8 stays out: damaged"]
    for number in (7, 8):  # it may be tried again after another version was desired
        workers.find(StoreEntry(number))
    assert workers.failures() == [None, None]
    workers.find(EIGHT)
    assert workers.told() == prepare(0, 1)


def test_one_that_may_be_loaded_later_is_tried_at_each_poll_and_logged_once(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    for replicas in (1, 2, 2):
        workers.find(StoreEntry(8))
        workers.find(EIGHT)
        assert workers.told() == prepare(0, 1)
        assert workers.failures() == [None, None]
        workers.load(0)
        reason = f"{replicas} shards were not there"
        workers.load(1, reason=reason, is_final=False)
        assert workers.told() == activate(0, 1, version=7)
        assert workers.failures() == [(8, reason)] * 2
    workers.find(EIGHT)
    workers.told()
    workers.load(0)
    workers.load(1, reason="its goldens differ")
    assert workers.failures() == [(8, "its goldens differ")] * 2
    workers.told()
    workers.find(EIGHT)
    assert workers.told() == []
    logged = [line.partition(" out: ")[2] for line in caplog.messages]
    assert logged == ["1 shards were not there", "its goldens differ"]


def test_one_that_is_wanted_again_is_logged_again(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        workers.find(EIGHT)
        workers.load(1, reason="a part is overloaded", is_final=False)
        workers.find(StoreEntry(7))
    assert caplog.messages == ["shop: version 8 stays out: a part is overloaded"] * 2


def test_one_version_is_prepared_at_a_time_and_the_next_one_follows(workers: Workers) -> None:
    workers.find(EIGHT)
    workers.told()
    workers.find(StoreEntry(2, path="/store/films/2"), "films")
    assert workers.told() == []
    workers.load(0, 1)
    assert workers.told() == activate(0, 1) + prepare(0, 1, version=2)


def test_what_is_not_wanted_any_more_does_not_take_over(workers: Workers) -> None:
    workers.find(EIGHT)
    workers.load(0)
    old = WorkerStatus({"shop": workers.workers[0].names["shop"]})
    workers.find(StoreEntry(7))
    workers.told()
    workers.coordinator.on_report(0, old)
    workers.coordinator.on_report(1, old)
    assert workers.told() == []
    assert workers.adopted == []
    workers.find(EIGHT)
    assert workers.told() == prepare(0, 1)
    workers.coordinator.on_report(0, old)  # of the attempt before
    workers.load(1)
    assert workers.told() == []
    workers.load(0)
    assert workers.serving() == [8, 8]


def test_a_worker_that_becomes_ready_meanwhile_is_waited_for(workers: Workers) -> None:
    workers.fork(2)
    workers.find(EIGHT)
    workers.told()
    workers.ready(2)
    assert (2, 8, TargetPhase.PREPARE) in workers.told()
    workers.load(0, 1)
    assert workers.told() == []
    workers.load(2)
    assert workers.told() == activate(0, 1, 2)


def test_one_that_was_started_before_the_switch_follows_it(workers: Workers) -> None:
    workers.fork(2)
    workers.find(EIGHT)
    workers.load(0, 1)
    workers.ready(2)
    assert workers.serving() == [8, 8, 7]
    assert workers.coordinator.is_preparing(2)
    workers.load(2)
    assert workers.serving() == [8, 8, 8]
    assert not workers.coordinator.is_preparing(2)
    workers.start(3)
    assert workers.serving() == [8, 8, 8, 8]


def test_so_does_one_that_starts_with_the_version_before_for_the_new_one_is_gone(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    workers.damage = "8 was deleted"
    workers.find(EIGHT)
    workers.load(0, 1)
    assert caplog.messages == ["shop: workers start with version 7 still: 8 was deleted"]
    workers.start(2)
    assert workers.serving() == [8, 8, 7]
    workers.load(2, reason="damaged")  # those that serve it continue
    workers.report(2)
    assert workers.ended_by_us == [2]
    assert workers.failures() == [None] * 3
    assert caplog.messages[-1] == "worker 2 cannot follow the others to shop version 8: damaged"
    workers.kill(2)
    workers.damage = ""
    workers.start(2)  # in its place
    assert workers.serving() == [8, 8, 8]
    assert workers.adopted == [("shop", PATH)]


def test_one_that_is_behind_listens_once_it_has_followed(workers: Workers) -> None:
    """Covers a worker that becomes ready once the next rollout has begun: it would serve a version
    that is two rollouts old."""
    workers.fork(2)
    workers.find(EIGHT)
    workers.load(0, 1)
    workers.find(StoreEntry(9, path="/store/shop/9"))
    workers.told()
    workers.ready(2)
    assert workers.told()[:1] == activate(2)
    assert workers.may_listen() == [True, True, False]
    workers.load(2)
    assert workers.may_listen() == [True] * 3
    assert workers.told() == prepare(2, version=9)
    workers.load(0, 1)
    assert workers.told() == []
    workers.load(2)
    assert workers.serving() == [9, 9, 9]


def test_the_others_neither_wait_for_one_that_is_behind_nor_miss_it(workers: Workers) -> None:
    workers.fork(2)
    workers.find(EIGHT)
    workers.load(0, 1)
    workers.ready(2)
    workers.find(StoreEntry(9, path="/store/shop/9"))
    for _ in range(2):
        workers.kill(2)
        workers.workers[2] = Worker({"shop": 7, "films": 1})
        workers.ready(2)
    assert workers.failures() == [None] * 3
    workers.load(0, 1)
    assert workers.told()[-3:] == activate(0, 1, 2, version=9)
    assert workers.may_listen() == [True, True, False]
    workers.load(2)
    assert workers.may_listen() == [True] * 3


def test_where_no_other_serves_one_that_is_behind_listens(workers: Workers) -> None:
    """Covers a version that is deleted, after all workers that served it have ended."""
    workers.damage = "8 was deleted"
    workers.find(EIGHT)
    workers.load(0, 1)
    workers.kill(0, 1)
    workers.start(0)
    assert workers.may_listen() == [True]
    workers.find(StoreEntry(9, path="/store/shop/9"))
    workers.load(0)
    assert workers.serving() == [9]


def test_a_worker_that_ends_is_not_waited_for(workers: Workers) -> None:
    workers.find(EIGHT)
    workers.load(0)
    workers.kill(1)
    assert workers.serving() == [8]


def test_where_all_ended_those_that_come_prepare_it(workers: Workers) -> None:
    workers.find(EIGHT)
    workers.load(0)
    workers.kill(0, 1)
    assert workers.adopted == []
    workers.told()
    workers.start(0)
    assert workers.watchers() == [0]
    assert (0, 8, TargetPhase.PREPARE) in workers.told()
    workers.load(0)
    assert workers.serving() == [8]


def test_a_version_that_ends_workers_stays_out(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    workers.find(EIGHT)
    workers.kill(0, 1, how="was ended by SIGSEGV")
    reason = "a worker was ended by SIGSEGV while it was loaded"
    assert caplog.messages == [f"shop: version 8 stays out: {reason}"]
    workers.told()
    workers.start(0)
    workers.find(EIGHT)
    assert workers.failures() == [(8, reason)]
    assert prepare(0)[0] not in workers.told()


def test_another_looks_when_the_one_that_did_ends(workers: Workers) -> None:
    workers.kill(0)
    assert workers.watchers() == [1]
    workers.start(0)
    assert workers.watchers() == [1]
    workers.kill(1)
    assert workers.watchers() == [0]


def test_messages_are_read_as_they_were_written() -> None:
    failure = Failure(2**31, "é\n" * 500, is_final=True, serial=3)
    target = Target(
        8, "/" + "ö" * 2000, 2, TargetPhase.PREPARE, 9, failure, AliasSettings(8, 10.0, 5.0)
    )
    names = {"shop": target, "films@1": Target(1, "", 0, TargetPhase.SERVE)}
    desired = Desired(names, True, 2, True, True, True)
    statuses = {
        "m": NameStatus(1, 2, LoadState.FAILED, "no\nroom"),
        "n": NameStatus(1, 2, LoadState.FAILED, "a part is overloaded", is_final=False),
    }
    reports: list[Report | StartReport] = [
        WorkerStatus(statuses),
        StartReport(WorkerStage.WARM, statuses, "why"),
        StoreReport({"m": EIGHT, "n": StoreEntry(0, AliasSettings(0)), "o": UNOPENED}, 2),
        AdminCommand(Operation.LOAD, "m@x", 8, PATH),
    ]
    messages = [desired_to_bytes(desired), *map(report_to_bytes, reports)]
    assert desired_from_bytes(messages[0]) == desired
    assert [*map(report_from_bytes, messages[1:])] == reports
    assert not any(b"\n" in message for message in messages)


def test_what_one_joins_and_what_comes_next_do_not_mix(workers: Workers) -> None:
    """Covers a worker that started with version 7, is to follow to 8, and has not when 9 is
    found."""
    workers.fork(2)
    workers.find(EIGHT)
    workers.load(0, 1)
    workers.ready(2)
    eight = workers.workers[2].names["shop"]
    workers.find(StoreEntry(9, path="/store/shop/9"))
    assert workers.told()[-2:] == prepare(0, 1, version=9)
    late = WorkerStatus({"shop": replace(eight, state=LoadState.PREPARED)})
    workers.coordinator.on_report(2, late)  # it was too late to stop it
    workers.load(0)
    assert workers.told() == []
    workers.load(0, reason="damaged")
    assert workers.told() == activate(0, 1)  # back to the served version
    workers.load(2)
    assert workers.serving() == [8, 8, 8]


def test_all_show_a_version_that_cannot_be_opened_and_prepare_it_once_it_can(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        workers.find(UNOPENED)
    workers.start(2)
    assert workers.failures() == [(8, "is cut")] * 3
    workers.told()
    workers.find(EIGHT)
    assert workers.told() == prepare(0, 1, 2)
    workers.find(UNOPENED)  # an old poll, while they load it
    assert workers.told() == []
    assert workers.failures() == [None] * 3
    workers.load(1, reason="damaged")
    workers.start(3)
    assert workers.failures() == [(8, "damaged")] * 4
    assert [line.partition(" out: ")[2] for line in caplog.messages] == ["is cut", "damaged"]


def test_why_it_cannot_be_opened_is_told_anew_and_logged_where_more_than_numbers_change(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    reasons = ["the disk has 1,024 free", "the disk has 88 free", "is cut"]
    for reason in reasons:
        for _ in range(2):
            workers.find(StoreEntry(8, reason=reason))
        assert workers.failures() == [(8, reason)] * 2
    logged = [line.partition(" out: ")[2] for line in caplog.messages]
    assert logged == [reasons[0], reasons[2]]


def test_one_that_can_be_opened_while_another_is_prepared_is_next(workers: Workers) -> None:
    workers.find(UNOPENED)
    workers.find(StoreEntry(2, path="/store/films/2"), "films")
    workers.told()
    workers.find(EIGHT)
    assert workers.told() == []
    workers.load(0, 1, name="films")
    assert workers.told()[-2:] == prepare(0, 1)
    assert workers.failures() == [None, None]


@pytest.mark.parametrize("is_removed", [False, True])
def test_one_that_cannot_be_opened_is_forgotten_where_it_is_not_wanted(
    workers: Workers, is_removed: bool
) -> None:
    workers.find(UNOPENED)
    if is_removed:
        workers.command(Operation.UNLOAD, "shop")
    else:
        workers.find(StoreEntry(9))
    workers.start(2)
    assert all(
        one.failure is None
        for worker in workers.workers.values()
        for one in worker.desired.names.values()
    )


def test_a_move_that_takes_for_ever_is_given_up(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embedserve.processes.rollout.coordinator.ROLLOUT_S_MAX", -1.0)
    workers.find(EIGHT)
    workers.load(0)
    assert [*map(workers.coordinator.is_preparing, (0, 1))] == [False, True]
    workers.coordinator.advance_rollout()
    assert workers.failures() == [(8, "workers 1 have not loaded it in -1 s")] * 2
    assert not workers.coordinator.is_preparing(1)
    workers.kill(1)
    workers.find(StoreEntry(9, path="/store/shop/9"))
    workers.kill(0)
    workers.coordinator.advance_rollout()
    workers.start(0)
    assert workers.failures() == [(9, "no worker has run to load it in -1 s")]


@pytest.mark.parametrize("waits", [False, True])
def test_a_load_of_what_serves_calls_a_rollout_off(workers: Workers, waits: bool) -> None:
    if waits:
        workers.command(Operation.LOAD, "films", 2)
    workers.command(Operation.LOAD, "shop", 8)
    workers.load(0, name="films" if waits else "shop")
    workers.told()
    workers.command(Operation.LOAD, "shop", 7)
    assert workers.told() == ([] if waits else activate(0, 1, version=7))
    workers.load(1, name="films" if waits else "shop")
    assert workers.told() == (activate(0, 1, version=2) if waits else [])
    assert workers.serving() == [7, 7]
    assert workers.failures() == [None, None]
    workers.command(Operation.LOAD, "shop", 8)
    assert workers.told() == prepare(0, 1)


def test_of_several_loads_the_last_one_stays(workers: Workers) -> None:
    for version in (8, 9, 8):
        workers.command(Operation.LOAD, "shop", version)
    workers.load(0, 1)
    assert workers.told() == prepare(0, 1) + activate(0, 1)


def test_a_name_is_loaded_and_removed_by_all(workers: Workers) -> None:
    name = "shop@canary"
    workers.find(StoreEntry(9, path="/store/shop/9"), name)  # for a name that was removed meanwhile
    assert workers.told() == []
    workers.command(Operation.LOAD, name, 9)
    assert workers.told() == prepare(0, 1, version=9)
    workers.load(0, 1, name=name)
    assert workers.serving(name) == [9, 9]
    assert workers.adopted == [(name, "/store/shop/9")]
    workers.told()
    workers.command(Operation.LOAD, name, 9)
    assert workers.told() == []
    for _ in range(2):
        workers.command(Operation.UNLOAD, name)
    assert all(set(one.names) == {"shop", "films"} for one in workers.workers.values())
    assert workers.adopted[1:] == [(name, None)]


def test_a_new_name_that_fails_is_not_served_and_may_be_tried_again(workers: Workers) -> None:
    for _ in range(2):
        workers.command(Operation.LOAD, "shop@9", 9)
        assert workers.told()[-2:] == prepare(0, 1, version=9)
        workers.load(1, name="shop@9", reason="no room")
        assert workers.failures("shop@9") == [(9, "no room")] * 2
        assert workers.told() == activate(0, 1, version=0)
    assert workers.serving("shop@9") == [0, 0]


def test_a_new_name_that_failed_is_forgotten_unless_it_is_tried_again(workers: Workers) -> None:
    workers.command(Operation.LOAD, "shop@9", 9)
    workers.command(Operation.UNLOAD, "shop@9")  # of a load before
    workers.load(1, name="shop@9", reason="no room")
    assert workers.failures("shop@9") == [(9, "no room")] * 2
    workers.command(Operation.UNLOAD, "shop@9")
    assert all(set(one.names) == {"shop", "films"} for one in workers.workers.values())
    assert workers.adopted == []


def test_a_worker_that_starts_meanwhile_has_what_the_others_have(workers: Workers) -> None:
    workers.fork(2)
    workers.command(Operation.LOAD, "shop@canary", 9)
    workers.load(0, 1, name="shop@canary")
    workers.fork(3)
    workers.command(Operation.UNLOAD, "films")
    workers.ready(2, 3)
    workers.load(2, name="shop@canary")
    assert workers.serving("shop@canary") == [9, 9, 9, 9]
    assert all(set(one.names) == {"shop", "shop@canary"} for one in workers.workers.values())


def test_the_last_name_is_not_removed(workers: Workers) -> None:
    for name in ("films", "shop"):
        workers.command(Operation.UNLOAD, name)
    assert workers.serving() == [7, 7]


def test_what_is_removed_while_it_is_loaded_does_not_come_back(workers: Workers) -> None:
    workers.find(EIGHT)
    workers.load(0)
    late = WorkerStatus(dict(workers.workers[1].names))
    workers.command(Operation.UNLOAD, "shop")
    workers.coordinator.on_report(1, late)
    assert all(set(one.names) == {"films"} for one in workers.workers.values())
    assert workers.adopted == [("shop", None)]


def test_shares_are_told_to_all_and_to_those_that_come(workers: Workers) -> None:
    shares = AliasSettings(7, 10.0, 5.0)
    workers.find(StoreEntry(0, shares))
    workers.start(2)
    told = [one.desired.names["shop"].alias_settings for one in workers.workers.values()]
    assert told == [shares] * 3


def test_a_version_keeps_its_share_until_the_next_one_serves(workers: Workers) -> None:
    """Covers a worker that starts while the next version loads, and one that starts after it was
    rejected."""
    before, after = AliasSettings(7, 10.0), AliasSettings(8, 50.0)
    workers.find(StoreEntry(7, before))
    found = StoreEntry(8, after, PATH)
    workers.find(found)
    workers.start(2)
    assert workers.shares() == [before] * 3
    workers.load(0, reason="damaged")
    workers.start(3)
    assert workers.shares() == [before] * 4
    workers.command(Operation.RELOAD, "")
    workers.find(found)
    workers.load(0, 1, 2, 3)
    assert workers.shares() == [after] * 4


def test_what_an_administrator_loads_is_what_the_store_names(workers: Workers) -> None:
    """Covers a name that is not followed, and so is not reported by later polls."""
    workers.find(StoreEntry(7))
    workers.command(Operation.LOAD, "shop", 8)
    assert workers.workers[0].desired.names["shop"].wanted == 8
    workers.command(Operation.LOAD, "films", 2)  # no poll has read it
    assert workers.workers[0].desired.names["films"].wanted == 0


def test_a_look_that_was_asked_for_is_not_lost_with_the_one_that_looks(workers: Workers) -> None:
    workers.command(Operation.RELOAD, "")
    workers.kill(0)
    assert workers.watchers() == [1]
    assert workers.workers[1].desired.polls_requested == 1
    workers.coordinator.on_report(1, StoreReport({}, poll_completed=1))
    workers.start(0)
    workers.kill(1)
    assert workers.watchers() == [0]
    assert workers.workers[0].desired.polls_requested == 0


def test_a_reload_has_the_one_that_looks_poll_and_what_was_refused_tried_again(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    workers.find(EIGHT)
    workers.load(0, reason="damaged")
    workers.command(Operation.RELOAD, "")
    assert [one.desired.polls_requested for one in workers.workers.values()] == [1, 1]
    assert workers.failures() == [None, None]
    workers.told()
    workers.find(EIGHT)
    assert workers.told() == prepare(0, 1)
    caplog.clear()
    nobody = Workers()
    nobody.coordinator.reload()
    assert caplog.messages == ["cannot poll the store: no worker is ready"]
