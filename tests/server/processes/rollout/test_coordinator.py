"""Tests of the rollout coordinator: all workers switch to a version, or none does."""

import logging

import pytest
from server.processes.rollout.coordinated_workers import (
    EIGHT,
    PATH,
    UNOPENED,
    Workers,
    activate,
    prepare,
)

from embedserve.processes.rollout.messages import Operation, StoreEntry, WorkerStatus


def test_all_workers_prepare_before_any_switches(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    workers.report_store(StoreEntry(8))
    assert workers.take_target_changes() == []
    assert [one.desired.names["shop"].store_version for one in workers.workers.values()] == [8, 8]
    workers.report_store(EIGHT)
    assert workers.take_target_changes() == prepare(0, 1)
    workers.load(0)
    workers.report_store(EIGHT)  # it has polled again meanwhile
    assert workers.take_target_changes() == []
    assert workers.served_versions() == [7, 7]
    workers.load(1)
    assert workers.take_target_changes() == activate(0, 1)
    assert workers.served_versions() == [8, 8]
    assert workers.adopted == [("shop", PATH)]
    workers.report_store(EIGHT)
    assert workers.take_target_changes() == []
    assert caplog.messages == ["shop: switched to version 8 (before: 7)"]


def test_load_failure_of_one_worker_keeps_old_version_and_is_logged_once(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    workers.report_store(EIGHT)
    workers.load(0)
    workers.take_target_changes()
    workers.load(1, reason="damaged")
    assert workers.take_target_changes() == activate(0, 1, version=7)
    assert workers.failures() == [(8, "damaged")] * 2
    workers.report_store(EIGHT)
    workers.report_store(StoreEntry(8, reason="cannot be opened either", is_final=True))
    assert workers.take_target_changes() == []
    assert workers.failures() == [(8, "damaged")] * 2
    assert caplog.messages == ["shop: version 8 stays out: damaged"]
    for number in (7, 8):  # it may be tried again after another version was desired
        workers.report_store(StoreEntry(number))
    assert workers.failures() == [None, None]
    workers.report_store(EIGHT)
    assert workers.take_target_changes() == prepare(0, 1)


def test_temporary_load_failure_is_retried_at_each_poll_and_logged_once(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    for replicas in (1, 2, 2):
        workers.report_store(StoreEntry(8))
        workers.report_store(EIGHT)
        assert workers.take_target_changes() == prepare(0, 1)
        assert workers.failures() == [None, None]
        workers.load(0)
        workers.report_store(EIGHT)  # it has polled again meanwhile
        reason = f"{replicas} shards were not there"
        workers.load(1, reason=reason, is_final=False)
        assert workers.take_target_changes() == activate(0, 1, version=7)
        assert workers.failures() == [(8, reason)] * 2
    workers.report_store(EIGHT)
    workers.take_target_changes()
    workers.load(0)
    workers.load(1, reason="its goldens differ")
    assert workers.failures() == [(8, "its goldens differ")] * 2
    workers.take_target_changes()
    workers.report_store(EIGHT)
    assert workers.take_target_changes() == []
    logged = [line.partition(" out: ")[2] for line in caplog.messages]
    assert logged == ["1 shards were not there", "its goldens differ"]


def test_version_that_is_desired_again_logs_its_failure_again(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        workers.report_store(EIGHT)
        workers.load(1, reason="a part is overloaded", is_final=False)
        workers.report_store(StoreEntry(7))
    assert caplog.messages == ["shop: version 8 stays out: a part is overloaded"] * 2


def test_versions_are_prepared_one_at_a_time(workers: Workers) -> None:
    workers.report_store(EIGHT)
    workers.take_target_changes()
    workers.report_store(StoreEntry(2, path="/store/films/2"), "films")
    assert workers.take_target_changes() == []
    workers.load(0, 1)
    assert workers.take_target_changes() == activate(0, 1) + prepare(0, 1, version=2)


def test_version_that_is_no_longer_desired_is_not_activated(workers: Workers) -> None:
    workers.report_store(EIGHT)
    workers.load(0)
    old = WorkerStatus({"shop": workers.workers[0].names["shop"]})
    workers.report_store(StoreEntry(7))
    workers.take_target_changes()
    workers.coordinator.on_report(0, old)
    workers.coordinator.on_report(1, old)
    assert workers.take_target_changes() == []
    assert workers.adopted == []
    workers.report_store(EIGHT)
    assert workers.take_target_changes() == prepare(0, 1)
    workers.coordinator.on_report(0, old)  # of the attempt before
    workers.load(1)
    assert workers.take_target_changes() == []
    workers.load(0)
    assert workers.served_versions() == [8, 8]


def test_all_workers_get_failure_of_unopenable_version_until_it_opens(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        workers.report_store(UNOPENED)
    workers.start(2)
    assert workers.failures() == [(8, "is cut")] * 3
    workers.take_target_changes()
    workers.report_store(EIGHT)
    assert workers.take_target_changes() == prepare(0, 1, 2)
    workers.report_store(UNOPENED)  # an old poll, while they load it
    assert workers.take_target_changes() == []
    assert workers.failures() == [None] * 3
    workers.load(1, reason="damaged")
    workers.start(3)
    assert workers.failures() == [(8, "damaged")] * 4
    assert [line.partition(" out: ")[2] for line in caplog.messages] == ["is cut", "damaged"]


def test_open_failure_is_logged_again_only_if_more_than_its_numbers_change(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    reasons = ["the disk has 1,024 free", "the disk has 88 free", "is cut"]
    for reason in reasons:
        for _ in range(2):
            workers.report_store(StoreEntry(8, reason=reason))
        assert workers.failures() == [(8, reason)] * 2
    logged = [line.partition(" out: ")[2] for line in caplog.messages]
    assert logged == [reasons[0], reasons[2]]


def test_version_that_becomes_openable_during_a_rollout_is_prepared_next(workers: Workers) -> None:
    workers.report_store(UNOPENED)
    workers.report_store(StoreEntry(2, path="/store/films/2"), "films")
    workers.take_target_changes()
    workers.report_store(EIGHT)
    assert workers.take_target_changes() == []
    workers.load(0, 1, name="films")
    assert workers.take_target_changes()[-2:] == prepare(0, 1)
    assert workers.failures() == [None, None]


@pytest.mark.parametrize("is_removed", [False, True])
def test_open_failure_is_cleared_once_version_is_no_longer_desired(
    workers: Workers, is_removed: bool
) -> None:
    workers.report_store(UNOPENED)
    if is_removed:
        workers.command(Operation.UNLOAD, "shop")
    else:
        workers.report_store(StoreEntry(9))
    workers.start(2)
    assert all(
        one.failure is None
        for worker in workers.workers.values()
        for one in worker.desired.names.values()
    )


def test_rollout_fails_after_its_time_limit(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embedserve.processes.rollout.coordinator.ROLLOUT_S_MAX", -1.0)
    workers.report_store(EIGHT)
    workers.load(0)
    assert [*map(workers.coordinator.is_preparing, (0, 1))] == [False, True]
    workers.coordinator.advance_rollout()
    assert workers.failures() == [(8, "workers 1 have not loaded it in -1 s")] * 2
    assert not workers.coordinator.is_preparing(1)
    workers.kill(1)
    workers.report_store(StoreEntry(9, path="/store/shop/9"))
    workers.kill(0)
    workers.coordinator.advance_rollout()
    workers.start(0)
    assert workers.failures() == [(9, "no worker has run to load it in -1 s")]
