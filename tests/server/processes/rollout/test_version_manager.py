"""Tests of the version manager: a process switches from one version of a model to the next, and
keeps the former if that fails."""

import asyncio
import gc
import weakref
from pathlib import Path
from unittest.mock import Mock

import pytest
from mapped import map_tables, mapped_kb
from server.fake_engine import make_request
from server.gate import Gate
from server.pending_requests import submit_to
from server.processes.rollout.switching_process import (
    USER,
    SwitchingProcess,
    do_nothing,
    make_version,
)
from server.thread_limit import make_thread_start_fail
from server.waiting import until

from embedserve.processes.rollout.messages import Failure, LoadState, NameStatus, TargetPhase
from embedserve_store import StoreError
from embedserve_store.errors import UnreachableError
from embedserve_store.memory.mapped_tables import populate


async def test_process_switches_once_version_is_loaded_and_activated(
    process: SwitchingProcess, gate: Gate
) -> None:
    process.on_restore = gate.before(do_nothing)
    process.desire(store_version=8)
    metrics = process.pipeline.metrics.models["shop"]
    assert process.desired_and_failed() == (True, False)
    assert metrics.found_s is not None
    metrics.found_s -= 1e6  # its pull takes long
    found_s = metrics.found_s
    process.prepare(8)
    await until(lambda: gate.threads)
    assert process.pending_version() == (8, "loading", "")
    assert process.state() == NameStatus(7, 1, LoadState.LOADING)
    process.desire(store_version=8)  # at the next poll
    assert metrics.found_s == found_s
    await process.check_served(7)
    gate.opened.set()
    await until(lambda: process.state() == NameStatus(7, 1, LoadState.PREPARED))
    assert process.pending_version() == (8, "warming", "")
    await process.check_served(7)
    process.activate()
    await process.check_served(8)
    assert process.state() == NameStatus(8)
    assert process.pending_version() is None
    assert (metrics.store_version, metrics.switches, metrics.model.version) == (8, 1, 8)
    assert process.desired_and_failed() == (False, False)
    assert metrics.load_seconds > 1e6
    assert process.restored_numbers == [8]


async def test_process_behind_other_workers_switches_once_it_has_loaded(
    process: SwitchingProcess, gate: Gate
) -> None:
    process.on_restore = gate.before(do_nothing)
    process.desire(version=8, generation=5, phase=TargetPhase.SERVE)
    await until(lambda: gate.threads)
    await process.check_served(7)
    gate.opened.set()
    await until(lambda: process.state() == NameStatus(8))
    await process.check_served(8)


async def test_replaced_version_is_released(process: SwitchingProcess) -> None:
    engine = weakref.ref(process.engines[7])
    waiting = submit_to(process.pipeline.models, make_request(USER))
    await process.prepare_and_wait(8)
    process.activate()
    await waiting
    del process.engines[7], waiting
    gc.collect()  # frees asyncio's futures
    await until(lambda: engine() is None)
    await process.check_served(8)


async def test_replaced_version_is_released_even_if_no_thread_can_start(
    process: SwitchingProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = weakref.ref(process.engines[7])
    await process.prepare_and_wait(8)
    make_thread_start_fail(monkeypatch, "release")
    process.activate()
    assert process.state() == NameStatus(8)
    await process.prepare_and_wait(9)
    make_thread_start_fail(monkeypatch, "release")
    process.desire(version=8, generation=0, phase=TargetPhase.SERVE)  # 9 is no longer desired
    assert process.state() == NameStatus(8)
    del process.engines[7]
    gc.collect()  # frees asyncio's futures
    assert engine() is None
    await process.check_served(8)


async def test_version_is_loaded_later_if_no_thread_can_start(
    process: SwitchingProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_thread_start_fail(monkeypatch, "load")
    process.prepare(8)
    await until(lambda: process.state().state is LoadState.FAILED)
    assert not process.state().is_final
    assert "can't start new thread" in process.state().reason
    await process.prepare_and_wait(8)


async def test_prepared_version_that_is_no_longer_desired_is_released(
    process: SwitchingProcess,
) -> None:
    engine = weakref.ref(process.engines[8])
    await process.prepare_and_wait(8)
    del process.engines[8]
    process.desire(version=7, generation=0, phase=TargetPhase.SERVE)
    gc.collect()  # frees asyncio's futures
    await until(lambda: engine() is None)
    assert process.pending_version() is None
    await process.check_served(7)


async def test_rows_of_a_replaced_version_are_unmapped(
    process: SwitchingProcess, tmp_path: Path
) -> None:
    """Guards against unmapping the rows in one call, which stalls all threads that map memory
    meanwhile."""
    tables = map_tables(tmp_path / "rows", 1 << 20)
    process.versions_to_open[8] = make_version(process.engines[8].model.manifest, tables)
    populate(process.versions_to_open[8], 1 << 30)
    for number in (8, 9):
        await process.prepare_and_wait(number)
        assert mapped_kb(tmp_path / "rows") == 1 << 10
        process.activate()
    await until(lambda: not mapped_kb(tmp_path / "rows"))
    await process.check_served(9)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (StoreError("tables.safetensors: damaged"), "tables.safetensors: damaged"),
        (MemoryError("no room"), "MemoryError: no room"),
    ],
)
async def test_version_that_fails_to_load_is_not_served_and_may_be_retried(
    process: SwitchingProcess, error: Exception, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(number: int) -> None:
        raise error

    process.on_restore = fail
    process.desire(store_version=8)
    process.prepare(8)
    await until(lambda: process.state().state is LoadState.FAILED)
    assert process.state() == NameStatus(7, 1, LoadState.FAILED, reason)
    logged = [] if isinstance(error, StoreError) else ["shop version 8 cannot be loaded"]
    assert [one.message for one in caplog.records if one.exc_info is not None] == logged
    process.fail(8, reason)
    assert process.pending_version() == (8, "failed", reason)
    assert process.desired_and_failed() == (True, True)
    assert process.state() == NameStatus(7)
    await process.check_served(7)
    process.desire(store_version=7, failure=None)  # 8 may be tried again afterwards
    assert process.pending_version() is None
    assert process.desired_and_failed() == (False, False)
    process.on_restore = do_nothing
    await process.prepare_and_wait(8)
    process.activate()
    await process.check_served(8)


@pytest.mark.parametrize(
    ("error", "is_final"),
    [
        (UnreachableError("manifest.json: cannot be read: Stale file handle"), False),
        (StoreError("plan.json: damaged"), True),
    ],
)
async def test_version_that_fails_to_open_may_be_loaded_later(
    process: SwitchingProcess, monkeypatch: pytest.MonkeyPatch, error: StoreError, is_final: bool
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(process.rollout, "open_version", Mock(side_effect=error))
        process.prepare(8)
        await until(lambda: process.state().state is LoadState.FAILED)
    assert process.state() == NameStatus(7, 1, LoadState.FAILED, str(error), is_final)
    await process.prepare_and_wait(8)


@pytest.mark.parametrize("is_opened_later", [False, True])
async def test_load_seconds_do_not_include_those_of_an_earlier_version_that_failed(
    process: SwitchingProcess, is_opened_later: bool
) -> None:
    process.desire(store_version=8)
    process.fail(8, "is cut")
    metrics = process.pipeline.metrics.models["shop"]
    assert metrics.found_s is not None
    metrics.found_s -= 1e6
    if is_opened_later:
        process.desire(store_version=9, failure=None)
    process.desire(version=9, store_version=9, failure=None, phase=TargetPhase.PREPARE)
    await until(lambda: process.state().state is LoadState.PREPARED)
    process.activate()
    await process.check_served(9)
    assert 0 < metrics.load_seconds < 1e6


async def test_repeated_failure_keeps_its_start_time(process: SwitchingProcess) -> None:
    process.fail(8, "is cut")
    shown = process.pipeline.models.pending_versions["shop"]
    shown.since = "then"
    for reason in ("is cut", "is cut still"):
        process.fail(8, reason)
        shown = process.pipeline.models.pending_versions["shop"]
        assert (shown.reason, shown.since) == (reason, "then")
    process.fail(9, "is cut")
    assert process.pipeline.models.pending_versions["shop"].since != "then"


async def test_version_that_fails_elsewhere_during_its_load_is_discarded(
    process: SwitchingProcess, gate: Gate
) -> None:
    process.on_restore = gate.before(do_nothing)
    process.prepare(8)
    await until(lambda: gate.threads)
    process.fail(8, "another worker cannot load it")
    gate.opened.set()
    await process.prepare_and_wait(9)
    assert process.restored_numbers == [8, 9]
    assert {one.names["shop"].state for one in process.reports} == {
        LoadState.LOADING,
        LoadState.IDLE,
        LoadState.PREPARED,
    }
    process.activate()
    await process.check_served(9)


async def test_repeated_attempt_loads_the_version_again(process: SwitchingProcess) -> None:
    for attempt in (1, 2):
        await process.prepare_and_wait(8)
        assert process.state().generation == attempt
    assert process.restored_numbers == [8, 8]


async def test_served_version_is_reloaded_for_new_memory_of_changed_rows(
    process: SwitchingProcess,
) -> None:
    """Covers a worker that starts late, with the version of before a rollout and its rollback."""
    process.desire(version=7, generation=2, memory="/memory/2")
    await until(lambda: process.reports and process.state() == NameStatus(7, rows_generation=2))
    assert process.restored_numbers == [7]
    process.desire(failure=Failure(8, "damaged", True))  # the same memory
    assert process.pending_version() == (8, "failed", "damaged")
    assert process.restored_numbers == [7]


async def test_versions_are_loaded_one_at_a_time(process: SwitchingProcess, gate: Gate) -> None:
    """Checks that loads do not overlap, because one thread builds what torchrec builds and torch.fx
    traces, and that a version which is replaced while it waits is not loaded."""
    begun: list[int] = []
    process.on_restore = gate.before(begun.append)
    process.prepare(8)
    await until(lambda: gate.threads)
    for number in (9, 8, 9):  # others are desired meanwhile
        process.prepare(number)
    await asyncio.sleep(0.05)
    assert len(gate.threads) == 1
    gate.opened.set()
    await until(lambda: process.state() == NameStatus(7, 4, LoadState.PREPARED))
    assert begun == [8, 9]
    process.activate()
    await process.check_served(9)


async def test_draining_version_is_shown_until_its_requests_are_answered(
    process: SwitchingProcess,
) -> None:
    models = process.pipeline.models
    process.engines[7].hold()
    waiting = submit_to(models, make_request(USER))
    await until(lambda: process.engines[7].lookups)
    since = models.status(models.model("shop"))["since"]
    await process.prepare_and_wait(8)
    process.activate()
    status = models.status(models.model("shop"))
    assert status["leaving"] == [7]
    assert status["since"] >= since
    process.engines[7].release()
    assert (await waiting).model.version == 7
    await until(lambda: not models.status(models.model("shop"))["leaving"])
