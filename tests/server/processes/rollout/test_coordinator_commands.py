"""Tests of the rollout coordinator: commands of administrators, and alias settings of the store."""

from dataclasses import replace

import pytest
from server.processes.rollout.coordinated_workers import EIGHT, PATH, Workers, activate, prepare

from embedserve.processes.rollout.messages import (
    AliasSettings,
    LoadState,
    Operation,
    StoreEntry,
    StoreReport,
    WorkerStatus,
)


@pytest.mark.parametrize("waits", [False, True])
def test_load_of_the_served_version_cancels_the_rollout(workers: Workers, waits: bool) -> None:
    if waits:
        workers.command(Operation.LOAD, "films", 2)
    workers.command(Operation.LOAD, "shop", 8)
    workers.load(0, name="films" if waits else "shop")
    workers.take_target_changes()
    workers.command(Operation.LOAD, "shop", 7)
    assert workers.take_target_changes() == ([] if waits else activate(0, 1, version=7))
    workers.load(1, name="films" if waits else "shop")
    assert workers.take_target_changes() == (activate(0, 1, version=2) if waits else [])
    assert workers.served_versions() == [7, 7]
    assert workers.failures() == [None, None]
    workers.command(Operation.LOAD, "shop", 8)
    assert workers.take_target_changes() == prepare(0, 1)


def test_first_poll_that_finds_the_loaded_version_continues_its_rollout(workers: Workers) -> None:
    workers.command(Operation.LOAD, "shop", 8)
    workers.load(0)
    workers.take_target_changes()
    workers.report_store(EIGHT)
    assert workers.take_target_changes() == []
    workers.load(1)
    assert workers.take_target_changes() == activate(0, 1)


def test_last_of_several_loads_wins(workers: Workers) -> None:
    for version in (8, 9, 8):
        workers.command(Operation.LOAD, "shop", version)
    workers.load(0, 1)
    assert workers.take_target_changes() == prepare(0, 1) + activate(0, 1)


def test_versions_that_wait_for_a_rollout_are_all_loaded(workers: Workers) -> None:
    loads = {"shop": 8, "films": 2, "shop@canary": 9}
    for name, version in loads.items():
        workers.command(Operation.LOAD, name, version)
    for name, version in loads.items():
        workers.load(0, 1, name=name)
        assert workers.served_versions(name) == [version] * 2


def test_name_is_loaded_and_removed_by_all_workers(workers: Workers) -> None:
    name = "shop@canary"
    workers.report_store(
        StoreEntry(9, path="/store/shop/9"), name
    )  # for a name that was removed meanwhile
    assert workers.take_target_changes() == []
    workers.command(Operation.LOAD, name, 9)
    assert workers.take_target_changes() == prepare(0, 1, version=9)
    workers.load(0, 1, name=name)
    assert workers.served_versions(name) == [9, 9]
    assert workers.adopted == [(name, "/store/shop/9")]
    workers.take_target_changes()
    workers.command(Operation.LOAD, name, 9)
    assert workers.take_target_changes() == []
    for _ in range(2):
        workers.command(Operation.UNLOAD, name)
    assert all(set(one.names) == {"shop", "films"} for one in workers.workers.values())
    assert workers.adopted[1:] == [(name, None)]


def test_new_name_that_fails_to_load_is_not_served_and_may_be_retried(workers: Workers) -> None:
    for _ in range(2):
        workers.command(Operation.LOAD, "shop@9", 9)
        assert workers.take_target_changes()[-2:] == prepare(0, 1, version=9)
        workers.load(1, name="shop@9", reason="no room")
        assert workers.failures("shop@9") == [(9, "no room")] * 2
        assert workers.take_target_changes() == activate(0, 1, version=0)
    assert workers.served_versions("shop@9") == [0, 0]


def test_unload_removes_new_name_only_after_its_load_failed(workers: Workers) -> None:
    workers.command(Operation.LOAD, "shop@9", 9)
    workers.command(Operation.UNLOAD, "shop@9")  # of a load before
    workers.load(1, name="shop@9", reason="no room")
    assert workers.failures("shop@9") == [(9, "no room")] * 2
    workers.command(Operation.UNLOAD, "shop@9")
    assert all(set(one.names) == {"shop", "films"} for one in workers.workers.values())
    assert workers.adopted == []


def test_last_name_is_not_unloaded(workers: Workers) -> None:
    for name in ("films", "shop"):
        workers.command(Operation.UNLOAD, name)
    assert workers.served_versions() == [7, 7]


def test_name_unloaded_during_its_rollout_does_not_come_back(workers: Workers) -> None:
    workers.report_store(EIGHT)
    workers.load(0)
    late = WorkerStatus(dict(workers.workers[1].names))
    workers.command(Operation.UNLOAD, "shop")
    workers.coordinator.on_report(1, late)
    assert all(set(one.names) == {"films"} for one in workers.workers.values())
    assert workers.adopted == [("shop", None)]


def test_failure_reported_late_of_an_unloaded_name_changes_nothing(workers: Workers) -> None:
    workers.command(Operation.LOAD, "films", 2)
    status = workers.workers[1].status()
    failed = replace(status.names["films"], state=LoadState.FAILED, reason="damaged")
    workers.command(Operation.UNLOAD, "films")
    workers.coordinator.on_report(1, WorkerStatus({**status.names, "films": failed}))
    assert [set(one.names) for one in workers.workers.values()] == [{"shop"}] * 2
    assert workers.ended_by_coordinator == []


def test_unload_of_another_name_does_not_interrupt_a_rollout(workers: Workers) -> None:
    workers.report_store(EIGHT)
    workers.load(0)
    workers.command(Operation.UNLOAD, "films")
    workers.load(1)
    assert workers.served_versions() == [8, 8]


def test_alias_settings_reach_all_workers_and_later_workers(workers: Workers) -> None:
    shares = AliasSettings(7, 10.0, 5.0)
    workers.report_store(StoreEntry(0, shares))
    workers.start(2)
    reached = [one.desired.names["shop"].alias_settings for one in workers.workers.values()]
    assert reached == [shares] * 3


def test_alias_settings_stay_until_the_next_version_serves(workers: Workers) -> None:
    """Covers a worker that starts while the next version loads, and one that starts after it has
    failed."""
    before, after = AliasSettings(7, 10.0), AliasSettings(8, 50.0)
    workers.report_store(StoreEntry(7, before))
    found = StoreEntry(8, after, PATH)
    workers.report_store(found)
    workers.start(2)
    assert workers.alias_settings() == [before] * 3
    workers.load(0, reason="damaged")
    workers.start(3)
    assert workers.alias_settings() == [before] * 4
    workers.command(Operation.RELOAD, "")
    workers.report_store(found)
    workers.load(0, 1, 2, 3)
    assert workers.alias_settings() == [after] * 4


def test_loaded_version_becomes_the_desired_one_of_a_polled_name(workers: Workers) -> None:
    """Covers a name that is not followed, and so is not reported by later polls."""
    workers.report_store(StoreEntry(7))
    workers.command(Operation.LOAD, "shop", 8)
    assert workers.workers[0].desired.names["shop"].store_version == 8
    workers.command(Operation.LOAD, "films", 2)  # no poll has read it
    assert workers.workers[0].desired.names["films"].store_version == 0


def test_requested_poll_is_passed_on_when_the_watcher_ends(workers: Workers) -> None:
    workers.command(Operation.RELOAD, "")
    workers.kill(0)
    assert workers.store_watchers() == [1]
    assert workers.workers[1].desired.polls_requested == 1
    workers.coordinator.on_report(1, StoreReport({}, poll_completed=1))
    workers.start(0)
    workers.kill(1)
    assert workers.store_watchers() == [0]
    assert workers.workers[0].desired.polls_requested == 0


@pytest.mark.parametrize("is_signal", [False, True])
def test_reload_requests_a_poll_and_retries_failed_versions(
    workers: Workers, is_signal: bool
) -> None:
    workers.report_store(EIGHT)
    workers.load(0, reason="damaged")
    if is_signal:
        workers.coordinator.reload()
    else:
        workers.command(Operation.RELOAD, "")
    assert [one.desired.polls_requested for one in workers.workers.values()] == [1, 1]
    assert workers.failures() == [None, None]
    workers.take_target_changes()
    workers.report_store(EIGHT)
    assert workers.take_target_changes() == prepare(0, 1)


def test_reload_without_a_ready_worker_is_left_to_the_next_one(workers: Workers) -> None:
    workers.report_store(EIGHT)
    workers.load(0, reason="damaged")
    workers.kill(0, 1)
    workers.coordinator.reload()
    workers.start(1)
    assert workers.workers[1].desired.polls_requested == 1
    assert workers.failures() == [None]
