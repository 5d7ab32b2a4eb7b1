"""Tests of the admin service of one process: commands are done, or rejected with the reason."""

from __future__ import annotations

import asyncio
import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from server.gate import Gate
from server.processes.rollout.test_store_watcher import Serving, appear
from server.processes.rollout.test_store_watcher import later as later
from server.processes.rollout.test_store_watcher import published as published
from server.processes.rollout.test_store_watcher import store as store
from server.waiting import WAIT_S_MAX, until

from embedserve.errors import RefusedError
from embedserve.processes.rollout import version_resolver
from embedserve.processes.rollout.admin_service import AdminService
from embedserve.processes.rollout.messages import AdminCommand, Desired
from embedserve.processes.rollout.version_resolver import VersionResolver
from embedserve_store import StoreError, set_alias
from embedserve_store.errors import NoSuchPartError


def remember(monkeypatch: pytest.MonkeyPatch, operated: Operated) -> list[AdminCommand]:
    """Returns a list that collects the commands from now on."""
    commands, send = list[AdminCommand](), operated.admin._send

    def record(command: AdminCommand) -> None:
        commands.append(command)
        send(command)

    monkeypatch.setattr(operated.admin, "_send", record)
    return commands


class Operated(Serving):
    """A process with an admin service, which follows no names by itself."""

    def __init__(self, store: Path, executor: ThreadPoolExecutor) -> None:
        super().__init__(store, executor, follow="none")
        self.start()
        self.admin = self.agent.admin

    def served(self) -> dict[str, int]:
        return {model.served_as: model.version for model in self.pipeline.models.models()}


async def test_names_are_loaded_beside_others_and_unloaded(
    store: Path, later: Path, executor: ThreadPoolExecutor
) -> None:
    operated = Operated(store, executor)
    admin = operated.admin
    appear(later, store, 2)
    set_alias(store, "shop", "canary", 2)
    assert await admin.load("shop@canary") == 2
    assert await admin.load("shop@1") == 1
    assert operated.served() == {"shop": 1, "shop@canary": 2, "shop@1": 1}
    assert await admin.load("shop") == 2  # replaces the version before
    assert operated.served() == {"shop": 2, "shop@canary": 2, "shop@1": 1}
    await admin.unload("shop")
    assert operated.served() == {"shop@canary": 2, "shop@1": 1}
    assert await operated.answering() == 2  # the model's next version
    await admin.unload("shop@canary")
    with pytest.raises(RefusedError, match=r"^model is 'shop@1', and nothing else is served$"):
        await admin.unload("shop@1")
    with pytest.raises(RefusedError, match=r"^model is 'shop': this server has shop@1$"):
        await admin.unload("shop")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("shop@9", r"shop: version 9 does not exist; versions are 1"),
        ("shop@none", "'none' is no version and no alias"),
        ("films", "there is no model 'films'"),
        ("../shop", r"'\.\./shop' is not the name of a model"),
        ("shop@", "model is 'shop@': expected NAME, NAME@VERSION or NAME@ALIAS"),
        ("", "'' is not the name of a model"),
    ],
)
async def test_what_there_is_not_is_refused(
    store: Path, executor: ThreadPoolExecutor, name: str, problem: str
) -> None:
    operated = Operated(store, executor)
    with pytest.raises(RefusedError, match=problem) as caught:
        await operated.admin.load(name)
    assert (caught.value.http_status, caught.value.field) == (409, "model")
    assert operated.served() == {"shop": 1}


async def test_what_cannot_be_served_is_refused_and_may_be_tried_again(
    store: Path, later: Path, executor: ThreadPoolExecutor
) -> None:
    operated = Operated(store, executor)
    appear(later, store, 2)
    operated.failures[2] = StoreError("no room")
    for _ in range(2):
        with pytest.raises(RefusedError, match=r"^shop version 2 stays out: no room$"):
            await operated.admin.load("shop")
    assert operated.served() == {"shop": 1}
    del operated.failures[2]
    assert await operated.admin.load("shop") == 2


async def test_of_a_new_name_that_cannot_be_served_nothing_is_kept(
    store: Path, later: Path, executor: ThreadPoolExecutor
) -> None:
    operated = Operated(store, executor)
    appear(later, store, 2)
    operated.failures[2] = StoreError("no room")
    with pytest.raises(RefusedError, match=r"^shop@2 version 2 stays out: no room$"):
        await operated.admin.load("shop@2")
    await until(lambda: operated.rollout.target("shop@2") is None)
    assert operated.pipeline.models.pending_versions == {}
    assert await operated.admin.load("shop@1") == 1


async def test_a_load_that_the_store_overtakes_is_refused(
    store: Path, later: Path, executor: ThreadPoolExecutor, gate: Gate
) -> None:
    operated = Operated(store, executor)
    appear(later, store, 2)
    operated.before_restore = gate.before(lambda: None)
    loading = asyncio.create_task(operated.admin.load("shop"))
    await until(lambda: gate.threads)
    appear(later, store, 3)
    operated.admin.reload()
    with pytest.raises(RefusedError, match=r"^shop version 2 is not loaded: the store names 3 "):
        await loading
    gate.opened.set()
    await until(lambda: operated.served() == {"shop": 3})


async def test_a_load_that_a_rollback_calls_off_is_refused(
    store: Path, later: Path, executor: ThreadPoolExecutor, gate: Gate
) -> None:
    operated = Operated(store, executor)
    operated.admin.reload()
    await until(lambda: wanted(operated) == 1)
    appear(later, store, 2)
    operated.before_restore = gate.before(lambda: None)
    loading = asyncio.create_task(operated.admin.load("shop"))
    await until(lambda: gate.threads)
    shutil.rmtree(store / "shop" / "2")
    operated.admin.reload()
    await until(loading.done)
    with pytest.raises(RefusedError, match=r"^shop version 2 is not loaded: the store names 1 "):
        await loading
    gate.opened.set()
    assert operated.served() == {"shop": 1}


@pytest.mark.parametrize("waits", [False, True])
async def test_a_load_that_another_administrator_calls_off_is_refused(
    store: Path, later: Path, executor: ThreadPoolExecutor, gate: Gate, waits: bool
) -> None:
    """Covers a load that still waits for the version of another name."""
    operated = Operated(store, executor)
    appear(later, store, 2)
    operated.before_restore = gate.before(lambda: None)
    other = asyncio.create_task(operated.admin.load("shop@2")) if waits else None
    await until(lambda: gate.threads or not waits)
    loading = asyncio.create_task(operated.admin.load("shop"))
    await until(lambda: queued(operated) == 2 if waits else gate.threads)
    shutil.rmtree(store / "shop" / "2")
    assert await operated.admin.load("shop") == 1
    await until(loading.done)
    why = "it was called off" if waits else "1 was requested"
    with pytest.raises(RefusedError, match=f"^shop version 2 is not loaded: {why} meanwhile$"):
        await loading
    gate.opened.set()
    assert other is None or await other == 2
    assert operated.served() == ({"shop": 1, "shop@2": 2} if waits else {"shop": 1})


def wanted(operated: Operated) -> int:
    target = operated.rollout.target("shop")
    return 0 if target is None else target.wanted


def queued(operated: Operated) -> int:
    target = operated.rollout.target("shop")
    return 0 if target is None else target.queued


async def test_a_load_waits_for_the_one_before_it(
    store: Path, later: Path, executor: ThreadPoolExecutor
) -> None:
    operated = Operated(store, executor)
    for number in (2, 3):
        appear(later, store, number)
    operated.failures[2] = StoreError("no room")
    names = ("shop@2", "shop@3")
    two, three = await asyncio.gather(*map(operated.admin.load, names), return_exceptions=True)
    assert (str(two), three) == ("shop@2 version 2 stays out: no room", 3)
    assert operated.served() == {"shop": 1, "shop@3": 3}


@pytest.mark.parametrize("fails", [True, False])
async def test_a_load_that_another_load_replaces_ends(
    store: Path,
    later: Path,
    executor: ThreadPoolExecutor,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
    fails: bool,
) -> None:
    """Checks that the second load clears the failure of the first."""
    operated = Operated(store, executor)
    appear(later, store, 2)
    if fails:
        operated.failures[2] = StoreError("no room")
    operated.before_restore = gate.before(lambda: None)
    first = asyncio.create_task(operated.admin.load("shop"))
    await until(lambda: gate.threads)
    appear(later, store, 3)
    commands = remember(monkeypatch, operated)
    second = asyncio.create_task(operated.admin.load("shop"))
    await until(lambda: commands)
    await asyncio.sleep(0)  # the coordinator receives it in the next iteration
    gate.opened.set()
    assert await second == 3
    if fails:
        with pytest.raises(RefusedError, match=r"^shop version 2 (stays out|is not loaded): "):
            await first
    else:
        assert await first == 2
    assert operated.served() == {"shop": 3}


@pytest.mark.parametrize("is_new", [False, True])
async def test_a_load_of_a_name_that_is_unloaded_meanwhile_ends(
    store: Path, later: Path, executor: ThreadPoolExecutor, gate: Gate, is_new: bool
) -> None:
    operated = Operated(store, executor)
    assert await operated.admin.load("shop@1") == 1
    appear(later, store, 2)
    operated.before_restore = gate.before(lambda: None)
    name = "shop@2" if is_new else "shop"
    loading = asyncio.create_task(operated.admin.load(name))
    await until(lambda: gate.threads)
    if is_new:  # it was activated and removed between two polls
        operated.rollout.apply(Desired({}))
    else:
        await operated.admin.unload(name)
    with pytest.raises(RefusedError, match=f"^{name} was unloaded meanwhile$"):
        await asyncio.wait_for(loading, WAIT_S_MAX)
    gate.opened.set()


async def test_tables_that_workers_share_are_not_copied_again(
    store: Path,
    later: Path,
    executor: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checks that the version is rejected before its tables fill the memory of a worker."""
    operated, opened = Operated(store, executor), list[object]()
    settings = replace(operated.settings, tables="resident", workers=2)
    monkeypatch.setattr(version_resolver, "make_resident_and_verify", opened.append)
    resolver = VersionResolver(settings)
    appear(later, store, 2)
    said = "^what is served changes at a start only: a version that comes while workers run "
    with pytest.raises(RefusedError, match=said):
        await AdminService(resolver, operated.rollout, lambda command: None).load("shop")
    with pytest.raises(StoreError, match=said):
        resolver.open_number("shop", 2)
    assert opened == []


async def test_a_version_without_the_shards_part_is_told_from_faults(
    store: Path, executor: ThreadPoolExecutor
) -> None:
    operated = Operated(store, executor)
    resolver = VersionResolver(replace(operated.settings, part="0/2"))
    with pytest.raises(RefusedError, match="so it has no parts") as caught:
        await AdminService(resolver, operated.rollout, lambda command: None).load("shop")
    assert isinstance(caught.value.__cause__, NoSuchPartError)


async def test_a_reload_looks_at_all_that_is_served(
    store: Path, later: Path, executor: ThreadPoolExecutor
) -> None:
    operated = Operated(store, executor)
    appear(later, store, 2)
    operated.failures[2] = StoreError("no room")
    operated.admin.reload()
    await until(lambda: operated.shown()[1])
    del operated.failures[2]
    operated.admin.reload()
    await until(lambda: operated.rollout.number("shop") == 2)


async def test_what_is_loaded_after_a_reload_is_not_behind(
    store: Path, later: Path, executor: ThreadPoolExecutor
) -> None:
    operated = Operated(store, executor)
    metrics = operated.pipeline.metrics.models["shop"]
    operated.admin.reload()
    await until(lambda: metrics.wanted_version == 1)
    appear(later, store, 2)
    assert await operated.admin.load("shop") == 2
    await asyncio.sleep(0)
    assert (metrics.wanted_version, metrics.behind_seconds()) == (2, 0.0)


async def test_a_reload_that_finds_nothing_new_says_so(
    store: Path, later: Path, executor: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    operated = Operated(store, executor)
    admin, nothing = operated.admin, "polled the store on request: nothing new"
    for times in (1, 2):
        admin.reload()
        await until(lambda: caplog.messages == [nothing] * times)  # noqa: B023
    appear(later, store, 2)
    admin.reload()
    await until(lambda: operated.rollout.number("shop") == 2)
    assert caplog.messages.count(nothing) == 2
    (store / "shop").rename(store / "gone")
    admin.reload()
    await until(lambda: caplog.messages[-1] == f"{nothing}; it cannot tell of shop")
