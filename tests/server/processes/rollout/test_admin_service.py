"""Tests of the admin service of one process: commands are done, or rejected with the reason."""

import asyncio
import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from server.gate import Gate
from server.processes.rollout.following_process import FollowingProcess
from server.waiting import WAIT_S_MAX, until

from embedserve.errors import ConflictError
from embedserve.processes.rollout import admin_service, version_resolver
from embedserve.processes.rollout.admin_service import AdminService
from embedserve.processes.rollout.messages import AdminCommand, Desired
from embedserve.processes.rollout.version_resolver import VersionResolver
from embedserve_store import StoreError, set_alias
from embedserve_store.errors import NoSuchPartError


def record_commands(
    monkeypatch: pytest.MonkeyPatch, process: "AdministeredProcess"
) -> list[AdminCommand]:
    """Returns a list that collects the commands from now on."""
    commands, send = list[AdminCommand](), process.admin._send

    def record(command: AdminCommand) -> None:
        commands.append(command)
        send(command)

    monkeypatch.setattr(process.admin, "_send", record)
    return commands


class AdministeredProcess(FollowingProcess):
    """A process with an admin service, which follows no names by itself."""

    def __init__(self, store: Path, executor: ThreadPoolExecutor) -> None:
        super().__init__(store, executor, follow="none")
        self.start()
        self.admin = self.agent.admin

    def served_versions(self) -> dict[str, int]:
        return {model.served_as: model.version for model in self.pipeline.models.models()}


@pytest.fixture
async def process(store: Path, executor: ThreadPoolExecutor) -> AdministeredProcess:
    return AdministeredProcess(store, executor)


async def test_names_are_loaded_and_unloaded(process: AdministeredProcess) -> None:
    admin = process.admin
    process.add_version(2)
    set_alias(process.store, "shop", "canary", 2)
    assert await admin.load("shop@canary") == 2
    assert await admin.load("shop@1") == 1
    assert process.served_versions() == {"shop": 1, "shop@canary": 2, "shop@1": 1}
    assert await admin.load("shop") == 2  # replaces the version before
    assert process.served_versions() == {"shop": 2, "shop@canary": 2, "shop@1": 1}
    await admin.unload("shop")
    assert process.served_versions() == {"shop@canary": 2, "shop@1": 1}
    assert await process.served_version() == 2  # the model's next version
    await admin.unload("shop@canary")
    with pytest.raises(ConflictError, match=r"^model is 'shop@1', and nothing else is served$"):
        await admin.unload("shop@1")
    with pytest.raises(ConflictError, match=r"^model is 'shop': this server has shop@1$"):
        await admin.unload("shop")


async def test_second_of_two_unloads_is_rejected_if_nothing_else_is_served(
    process: AdministeredProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_service, "UNLOAD_S_MAX", WAIT_S_MAX)
    assert await process.admin.load("shop@1") == 1
    unloads = [asyncio.create_task(process.admin.unload(name)) for name in ("shop", "shop@1")]
    await unloads[0]
    with pytest.raises(ConflictError, match=r"^model is 'shop@1', and nothing else is served$"):
        await unloads[1]
    assert process.served_versions() == {"shop@1": 1}


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
async def test_load_of_unknown_or_invalid_name_is_rejected(
    process: AdministeredProcess, name: str, problem: str
) -> None:
    with pytest.raises(ConflictError, match=problem) as caught:
        await process.admin.load(name)
    assert (caught.value.http_status, caught.value.field) == (409, "model")
    assert process.served_versions() == {"shop": 1}


async def test_load_of_unservable_version_is_rejected_and_may_be_retried(
    process: AdministeredProcess,
) -> None:
    process.add_version(2)
    process.failures[2] = StoreError("no room")
    for _ in range(2):
        with pytest.raises(ConflictError, match=r"^shop version 2 stays out: no room$"):
            await process.admin.load("shop")
    assert process.served_versions() == {"shop": 1}
    del process.failures[2]
    assert await process.admin.load("shop") == 2


async def test_load_ignores_failure_of_the_load_before(
    process: AdministeredProcess, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks a command that the coordinator receives after that failure."""
    process.add_version(2)
    process.failures[2] = StoreError("no room")
    process.before_restore = gate.before(lambda: None)
    first = asyncio.create_task(process.admin.load("shop"))
    await until(lambda: gate.threads)
    commands, send = list[AdminCommand](), process.admin._send
    monkeypatch.setattr(process.admin, "_send", commands.append)
    second = asyncio.create_task(process.admin.load("shop"))
    await until(lambda: commands)
    gate.opened.set()
    with pytest.raises(ConflictError, match=r"^shop version 2 stays out: no room$"):
        await first
    del process.failures[2]
    send(commands[0])
    assert await second == 2


async def test_failed_load_of_new_name_leaves_no_state(process: AdministeredProcess) -> None:
    process.add_version(2)
    process.failures[2] = StoreError("no room")
    with pytest.raises(ConflictError, match=r"^shop@2 version 2 stays out: no room$"):
        await process.admin.load("shop@2")
    await until(lambda: process.rollout.target("shop@2") is None)
    assert process.pipeline.models.pending_versions == {}
    assert await process.admin.load("shop@1") == 1


async def test_load_is_rejected_if_store_gets_newer_version_meanwhile(
    process: AdministeredProcess, gate: Gate
) -> None:
    process.add_version(2)
    process.before_restore = gate.before(lambda: None)
    loading = asyncio.create_task(process.admin.load("shop"))
    await until(lambda: gate.threads)
    process.add_version(3)
    process.admin.reload()
    with pytest.raises(ConflictError, match=r"^shop version 2 is not loaded: the store names 3 "):
        await loading
    gate.opened.set()
    await until(lambda: process.served_versions() == {"shop": 3})


async def test_load_is_rejected_if_store_rolls_back_meanwhile(
    process: AdministeredProcess, gate: Gate
) -> None:
    process.admin.reload()
    await until(lambda: desired_version(process) == 1)
    process.add_version(2)
    process.before_restore = gate.before(lambda: None)
    loading = asyncio.create_task(process.admin.load("shop"))
    await until(lambda: gate.threads)
    shutil.rmtree(process.store / "shop" / "2")
    process.admin.reload()
    await until(loading.done)
    with pytest.raises(ConflictError, match=r"^shop version 2 is not loaded: the store names 1 "):
        await loading
    gate.opened.set()
    assert process.served_versions() == {"shop": 1}


@pytest.mark.parametrize("waits", [False, True])
async def test_load_is_rejected_if_another_load_cancels_it(
    process: AdministeredProcess, gate: Gate, waits: bool
) -> None:
    """Covers a load that still waits for the version of another name."""
    process.add_version(2)
    process.before_restore = gate.before(lambda: None)
    other = asyncio.create_task(process.admin.load("shop@2")) if waits else None
    await until(lambda: gate.threads or not waits)
    loading = asyncio.create_task(process.admin.load("shop"))
    await until(lambda: queued_version(process) == 2 if waits else gate.threads)
    shutil.rmtree(process.store / "shop" / "2")
    assert await process.admin.load("shop") == 1
    await until(loading.done)
    why = "it was called off" if waits else "1 was requested"
    with pytest.raises(ConflictError, match=f"^shop version 2 is not loaded: {why} meanwhile$"):
        await loading
    gate.opened.set()
    assert other is None or await other == 2
    assert process.served_versions() == ({"shop": 1, "shop@2": 2} if waits else {"shop": 1})


def desired_version(process: AdministeredProcess) -> int:
    target = process.rollout.target("shop")
    return 0 if target is None else target.store_version


def queued_version(process: AdministeredProcess) -> int:
    target = process.rollout.target("shop")
    return 0 if target is None else target.queued


async def test_load_waits_for_the_previous_load(process: AdministeredProcess) -> None:
    for number in (2, 3):
        process.add_version(number)
    process.failures[2] = StoreError("no room")
    names = ("shop@2", "shop@3")
    two, three = await asyncio.gather(*map(process.admin.load, names), return_exceptions=True)
    assert (str(two), three) == ("shop@2 version 2 stays out: no room", 3)
    assert process.served_versions() == {"shop": 1, "shop@3": 3}


@pytest.mark.parametrize("fails", [True, False])
async def test_load_replaced_by_another_load_ends(
    process: AdministeredProcess, gate: Gate, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Checks that the second load clears the failure of the first."""
    process.add_version(2)
    if fails:
        process.failures[2] = StoreError("no room")
    process.before_restore = gate.before(lambda: None)
    first = asyncio.create_task(process.admin.load("shop"))
    await until(lambda: gate.threads)
    process.add_version(3)
    commands = record_commands(monkeypatch, process)
    second = asyncio.create_task(process.admin.load("shop"))
    await until(lambda: commands)
    await asyncio.sleep(0)  # the coordinator receives it in the next iteration
    gate.opened.set()
    assert await second == 3
    if fails:
        with pytest.raises(ConflictError, match=r"^shop version 2 (stays out|is not loaded): "):
            await first
    else:
        assert await first == 2
    assert process.served_versions() == {"shop": 3}


@pytest.mark.parametrize("is_new", [False, True])
async def test_load_ends_if_its_name_is_unloaded_meanwhile(
    process: AdministeredProcess, gate: Gate, is_new: bool
) -> None:
    assert await process.admin.load("shop@1") == 1
    process.add_version(2)
    process.before_restore = gate.before(lambda: None)
    name = "shop@2" if is_new else "shop"
    loading = asyncio.create_task(process.admin.load(name))
    await until(lambda: gate.threads)
    if is_new:  # it was activated and removed between two polls
        process.rollout.apply(Desired({}, command_handled=2))
    else:
        await process.admin.unload(name)
    with pytest.raises(ConflictError, match=f"^{name} was unloaded meanwhile$"):
        await asyncio.wait_for(loading, WAIT_S_MAX)
    gate.opened.set()


async def test_load_is_rejected_if_workers_share_resident_tables(
    process: AdministeredProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that the load is rejected before the tables fill the memory of a worker."""
    opened = list[object]()
    settings = replace(process.settings, tables="resident", workers=2)
    monkeypatch.setattr(version_resolver, "make_resident_and_verify", opened.append)
    resolver = VersionResolver(settings)
    process.add_version(2)
    message = "^what is served changes at a start only: a version that comes while workers run "
    with pytest.raises(ConflictError, match=message):
        await AdminService(resolver, process.rollout, lambda command: None).load("shop")
    with pytest.raises(StoreError, match=message):
        resolver.open_number("shop", 2)
    assert opened == []


async def test_load_of_version_without_parts_has_no_such_part_error_as_cause(
    process: AdministeredProcess,
) -> None:
    resolver = VersionResolver(replace(process.settings, part="0/2"))
    with pytest.raises(ConflictError, match="so it has no parts") as caught:
        await AdminService(resolver, process.rollout, lambda command: None).load("shop")
    assert isinstance(caught.value.__cause__, NoSuchPartError)


async def test_reload_polls_served_names_and_retries_failures(process: AdministeredProcess) -> None:
    process.add_version(2)
    process.failures[2] = StoreError("no room")
    process.admin.reload()
    await until(lambda: process.next_version_status()[1])
    del process.failures[2]
    process.admin.reload()
    await until(lambda: process.rollout.number("shop") == 2)


async def test_version_loaded_after_a_reload_is_not_counted_as_behind(
    process: AdministeredProcess,
) -> None:
    metrics = process.pipeline.metrics.models["shop"]
    process.admin.reload()
    await until(lambda: metrics.store_version == 1)
    process.add_version(2)
    assert await process.admin.load("shop") == 2
    await asyncio.sleep(0)
    assert (metrics.store_version, metrics.behind_seconds()) == (2, 0.0)


async def test_reload_without_new_versions_is_logged(
    process: AdministeredProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    admin, nothing = process.admin, "polled the store on request: nothing new"
    for times in (1, 2):
        admin.reload()
        await until(lambda: caplog.messages == [nothing] * times)  # noqa: B023
    process.add_version(2)
    admin.reload()
    await until(lambda: process.rollout.number("shop") == 2)
    assert caplog.messages.count(nothing) == 2
    (process.store / "shop").rename(process.store / "gone")
    admin.reload()
    await until(lambda: caplog.messages[-1] == f"{nothing}; it cannot tell of shop")
