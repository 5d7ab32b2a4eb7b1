"""Tests of the rollout coordinator with workers that start, fall behind or end during a rollout."""

from dataclasses import replace

import pytest
from server.processes.rollout.coordinated_workers import (
    EIGHT,
    PATH,
    Worker,
    Workers,
    activate,
    prepare,
)

from embedserve.processes.rollout.messages import (
    LoadState,
    Operation,
    StoreEntry,
    TargetPhase,
    WorkerStatus,
)


def test_rollout_waits_for_worker_that_becomes_ready_during_it(workers: Workers) -> None:
    workers.fork(2)
    workers.report_store(EIGHT)
    workers.take_target_changes()
    workers.ready(2)
    assert (2, 8, TargetPhase.PREPARE) in workers.take_target_changes()
    workers.load(0, 1)
    assert workers.take_target_changes() == []
    workers.load(2)
    assert workers.take_target_changes() == activate(0, 1, 2)


def test_worker_forked_before_the_switch_follows_it(workers: Workers) -> None:
    workers.fork(2)
    workers.report_store(EIGHT)
    workers.load(0, 1)
    workers.ready(2)
    assert workers.served_versions() == [8, 8, 7]
    assert workers.coordinator.is_preparing(2)
    workers.load(2)
    assert workers.served_versions() == [8, 8, 8]
    assert not workers.coordinator.is_preparing(2)
    workers.start(3)
    assert workers.served_versions() == [8, 8, 8, 8]


def test_worker_that_cannot_follow_to_the_served_version_is_ended(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    workers.adopt_failure = "8 was deleted"
    workers.report_store(EIGHT)
    workers.load(0, 1)
    assert caplog.messages == ["shop: workers start with version 7 still: 8 was deleted"]
    workers.start(2)
    assert workers.served_versions() == [8, 8, 7]
    workers.load(2, reason="damaged")  # those that serve it continue
    workers.report(2)
    assert workers.ended_by_coordinator == [2]
    assert workers.failures() == [None] * 3
    assert caplog.messages[-1] == "worker 2 cannot follow the others to shop version 8: damaged"
    workers.kill(2)
    workers.adopt_failure = ""
    workers.start(2)  # in its place
    assert workers.served_versions() == [8, 8, 8]
    assert workers.adopted == [("shop", PATH)]


def test_rollback_does_not_wait_for_workers_that_start_with_its_version(workers: Workers) -> None:
    """Covers workers that all ended with the new version, and start with the former one."""
    workers.adopt_failure = "8 was deleted"
    workers.report_store(EIGHT)
    workers.load(0, 1)
    workers.kill(0, 1)
    workers.start(0, 1)
    assert workers.served_versions() == [7, 7]
    workers.report_store(StoreEntry(7, path="/store/shop/7"))
    for worker in (0, 1):
        workers.report(worker)
    assert workers.take_target_changes()[-2:] == activate(0, 1, version=7)
    assert not any(map(workers.coordinator.is_preparing, (0, 1)))


def test_worker_behind_listens_only_once_it_has_followed(workers: Workers) -> None:
    """Covers a worker that becomes ready once the next rollout has begun: it would serve a version
    that is two rollouts old."""
    workers.fork(2)
    workers.report_store(EIGHT)
    workers.load(0, 1)
    workers.report_store(StoreEntry(9, path="/store/shop/9"))
    workers.take_target_changes()
    workers.ready(2)
    assert workers.take_target_changes()[:1] == activate(2)
    assert workers.may_listen() == [True, True, False]
    workers.load(2)
    assert workers.may_listen() == [True] * 3
    assert workers.take_target_changes() == prepare(2, version=9)
    workers.load(0, 1)
    assert workers.take_target_changes() == []
    workers.load(2)
    assert workers.served_versions() == [9, 9, 9]


def test_replacement_of_a_worker_listens_only_once_it_has_followed(workers: Workers) -> None:
    """Covers the place of a worker that had caught up, filled by one that starts with the version
    before."""
    workers.adopt_failure = "8 was deleted"
    workers.report_store(EIGHT)
    workers.load(0, 1)
    workers.kill(1)
    workers.start(1)
    assert workers.served_versions() == [8, 7]
    assert workers.may_listen() == [True, False]
    workers.load(1)
    assert workers.may_listen() == [True, True]


def test_rollout_does_not_wait_for_worker_that_is_behind(workers: Workers) -> None:
    workers.fork(2)
    workers.report_store(EIGHT)
    workers.load(0, 1)
    workers.ready(2)
    workers.report_store(StoreEntry(9, path="/store/shop/9"))
    for _ in range(2):
        workers.kill(2)
        workers.workers[2] = Worker({"shop": 7, "films": 1})
        workers.ready(2)
    assert workers.failures() == [None] * 3
    workers.load(0, 1)
    assert workers.take_target_changes()[-3:] == activate(0, 1, 2, version=9)
    assert workers.may_listen() == [True, True, False]
    workers.load(2)
    assert workers.may_listen() == [True] * 3


def test_worker_behind_listens_if_no_other_worker_serves(workers: Workers) -> None:
    """Covers a version that is deleted, after all workers that served it have ended."""
    workers.adopt_failure = "8 was deleted"
    workers.report_store(EIGHT)
    workers.load(0, 1)
    workers.kill(0, 1)
    workers.start(0)
    assert workers.may_listen() == [True]
    workers.report_store(StoreEntry(9, path="/store/shop/9"))
    workers.load(0)
    assert workers.served_versions() == [9]


def test_rollout_does_not_wait_for_worker_that_ended(workers: Workers) -> None:
    workers.report_store(EIGHT)
    workers.load(0)
    workers.kill(1)
    assert workers.served_versions() == [8]


def test_late_failure_of_a_version_that_is_no_longer_desired_ends_no_worker(
    workers: Workers,
) -> None:
    workers.report_store(EIGHT)
    status = workers.workers[1].status()
    loading = status.names["shop"]
    workers.report_store(StoreEntry(7))
    failed = replace(loading, state=LoadState.FAILED, reason="damaged")
    workers.coordinator.on_report(1, WorkerStatus({**status.names, "shop": failed}))
    assert workers.ended_by_coordinator == []
    assert workers.failures() == [None, None]


def test_new_workers_prepare_version_after_all_workers_ended(workers: Workers) -> None:
    workers.report_store(EIGHT)
    workers.load(0)
    workers.kill(0, 1)
    assert workers.adopted == []
    workers.take_target_changes()
    workers.start(0)
    assert workers.store_watchers() == [0]
    assert (0, 8, TargetPhase.PREPARE) in workers.take_target_changes()
    workers.load(0)
    assert workers.served_versions() == [8]


def test_time_limit_restarts_for_workers_that_replace_all_others(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("embedserve.processes.rollout.coordinator.ROLLOUT_S_MAX", -1.0)
        workers.report_store(EIGHT)
        workers.load(0)
    workers.kill(0, 1)
    workers.coordinator.advance_rollout()
    workers.start(0)
    workers.load(0)
    assert workers.failures() == [None]
    assert workers.served_versions() == [8]


def test_version_that_crashes_workers_fails(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    workers.report_store(EIGHT)
    workers.kill(0, 1, how="was ended by SIGSEGV")
    reason = "a worker was ended by SIGSEGV while it was loaded"
    assert caplog.messages == [f"shop: version 8 stays out: {reason}"]
    workers.take_target_changes()
    workers.start(0)
    workers.report_store(EIGHT)
    assert workers.failures() == [(8, reason)]
    assert prepare(0)[0] not in workers.take_target_changes()


def test_another_worker_watches_the_store_when_the_watcher_ends(workers: Workers) -> None:
    workers.kill(0)
    assert workers.store_watchers() == [1]
    workers.start(0)
    assert workers.store_watchers() == [1]
    workers.kill(1)
    assert workers.store_watchers() == [0]


def test_worker_following_to_served_version_does_not_count_for_the_next(workers: Workers) -> None:
    """Covers a worker that started with version 7, is to follow to 8, and has not when 9 is
    found."""
    workers.fork(2)
    workers.report_store(EIGHT)
    workers.load(0, 1)
    workers.ready(2)
    eight = workers.workers[2].names["shop"]
    workers.report_store(StoreEntry(9, path="/store/shop/9"))
    assert workers.take_target_changes()[-2:] == prepare(0, 1, version=9)
    late = WorkerStatus({"shop": replace(eight, state=LoadState.PREPARED)})
    workers.coordinator.on_report(2, late)  # it was too late to stop it
    workers.load(0)
    assert workers.take_target_changes() == []
    workers.load(0, reason="damaged")
    assert workers.take_target_changes() == activate(0, 1)  # back to the served version
    workers.load(2)
    assert workers.served_versions() == [8, 8, 8]


def test_worker_that_starts_during_name_changes_gets_the_same_names(workers: Workers) -> None:
    workers.fork(2)
    workers.command(Operation.LOAD, "shop@canary", 9)
    workers.load(0, 1, name="shop@canary")
    workers.fork(3)
    workers.command(Operation.UNLOAD, "films")
    workers.ready(2, 3)
    workers.load(2, name="shop@canary")
    assert workers.served_versions("shop@canary") == [9, 9, 9, 9]
    assert all(set(one.names) == {"shop", "shop@canary"} for one in workers.workers.values())
