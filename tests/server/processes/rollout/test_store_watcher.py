"""Tests of the store watcher: a process follows the versions and aliases of its store."""

import asyncio
import logging
import shutil
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from server.gate import Gate
from server.processes.rollout.following_process import FollowingProcess, add_version, before_open
from server.waiting import WAIT_S_MAX, until

from embedserve.config import ServeSettings
from embedserve.processes.rollout import version_resolver
from embedserve.processes.rollout.agent import RolloutAgent
from embedserve.processes.rollout.messages import (
    AliasSettings,
    Desired,
    Report,
    StoreEntry,
    StoreReport,
    Target,
    TargetPhase,
)
from embedserve.processes.rollout.store_watcher import StoreWatcher
from embedserve.processes.rollout.version_resolver import VersionResolver
from embedserve_store import ModelStore, ModelVersion, set_alias
from embedserve_store.errors import UnopenedError


async def test_latest_version_is_served(
    follower: FollowingProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert await follower.poll() == 1
    follower.add_version(3)
    assert await follower.poll() == 3
    follower.add_version(2)
    assert await follower.poll() == 3
    shutil.rmtree(follower.store / "shop" / "3")  # a deleted version is no longer served
    assert await follower.poll() == 2
    assert follower.attempts == [3, 2]
    assert caplog.messages == [
        "shop: switched to version 3 (before: 1)",
        "shop: switched to version 2 (before: 3)",
    ]


async def test_alias_is_followed_forward_and_back(
    store: Path, executor: ThreadPoolExecutor
) -> None:
    add_version(store, 2)
    set_alias(store, "shop", "stable", 1)
    for follow in ("alias", "latest"):
        process = FollowingProcess(store, executor, "shop@stable", follow)
        assert await process.poll() == 1
        for number in (2, 1, 2, 1):
            set_alias(store, "shop", "stable", number)
            assert await process.poll() == number


@pytest.mark.parametrize(
    ("model", "follow"), [("", "alias"), ("shop", "alias"), ("shop@1", "latest")]
)
async def test_version_that_is_not_followed_stays(
    store: Path, executor: ThreadPoolExecutor, model: str, follow: str
) -> None:
    process = FollowingProcess(store, executor, model, follow)
    add_version(store, 2)
    assert await process.poll() == 1
    assert process.attempts == []


async def test_only_the_latest_of_several_new_versions_is_loaded(
    follower: FollowingProcess,
) -> None:
    for number in (2, 3):
        follower.add_version(number)
    assert await follower.poll() == 3
    assert follower.attempts == [3]


@pytest.mark.parametrize(("moved_to", "loaded"), [(1, []), (3, [3])])
async def test_version_is_not_loaded_if_its_alias_moves_while_it_is_opened(
    store: Path,
    executor: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    moved_to: int,
    loaded: list[int],
) -> None:
    """Covers a pull that takes minutes, while an operator rolls back."""
    for number in (2, 3):
        add_version(store, number)
    set_alias(store, "shop", "stable", 1)
    process = FollowingProcess(store, executor, "shop@stable", "alias")
    assert await process.poll() == 1
    set_alias(store, "shop", "stable", 2)
    before_open(monkeypatch, lambda name: set_alias(store, "shop", "stable", moved_to))
    assert await process.poll() == moved_to
    assert process.attempts == loaded


async def test_version_is_released_if_its_name_is_unloaded_while_it_is_opened(
    follower: FollowingProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await follower.poll() == 1
    loop, admin = asyncio.get_running_loop(), follower.agent.admin
    assert await admin.load("shop@1") == 1
    follower.add_version(2)

    def unload(name: str) -> None:
        asyncio.run_coroutine_threadsafe(admin.unload(name), loop).result(WAIT_S_MAX)

    before_open(monkeypatch, unload)
    await follower.poll()
    assert list(follower.rollout.versions) == ["shop@1"]
    assert follower.agent._watcher._resolver._opened == {}


async def test_alias_settings_changed_while_a_version_opens_apply_to_it(
    store: Path, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_version(store, 2)
    set_alias(store, "shop", "canary", 1)
    process = FollowingProcess(store, executor, "shop@canary", "alias")
    assert await process.poll() == 1
    set_alias(store, "shop", "canary", 2, shadow=20)
    before_open(monkeypatch, lambda name: set_alias(store, "shop", "canary", 2, shadow=0))
    assert await process.poll() == 2
    models = process.pipeline.models
    assert models.status(models.model("shop@canary"))["shadow"] == 0


async def test_a_remote_store_is_followed(
    store: Path, executor: ThreadPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"file://{store}"
    set_alias(url, "shop", "stable", 1)
    process = FollowingProcess(url, executor, "shop@stable")
    assert await process.poll() == 1
    add_version(store, 2)
    for number in (2, 1):
        set_alias(url, "shop", "stable", number)
        assert await process.poll() == number
    served_path = process.rollout.versions["shop@stable"].path
    assert served_path.is_relative_to(tmp_path / "cache")


async def test_store_is_polled_until_the_stop(follower: FollowingProcess) -> None:
    follower.settings = replace(follower.settings, follow_s=0.1)
    follower.start()
    follower.add_version(2)
    await until(lambda: follower.rollout.number("shop") == 2)
    follower.stop.set()
    await follower.wait_for_loads()  # a poll in flight may end
    follower.add_version(3)
    await asyncio.sleep(5 * follower.settings.follow_s)
    assert await follower.served_version() == 2


async def test_new_watcher_repeats_the_requested_poll(
    store: Path, executor: ThreadPoolExecutor
) -> None:
    process, sent = FollowingProcess(store, executor, follow="none"), list[Report]()
    agent = RolloutAgent(process.settings, process.rollout, sent.append, process.stop)
    agent.apply(Desired({"shop": Target(1, "", 0, TargetPhase.SERVE)}, watches_store=True))
    await asyncio.sleep(0.05)
    assert not any(isinstance(one, StoreReport) for one in sent)
    agent = RolloutAgent(process.settings, process.rollout, sent.append, process.stop)
    targets = {"shop": Target(1, "", 0, TargetPhase.SERVE)}
    agent.apply(Desired(targets, watches_store=True, polls_requested=1))
    await until(lambda: sent[-1] == StoreReport({}, poll_completed=1))
    assert sent[-2] == StoreReport({"shop": StoreEntry(1, AliasSettings(1))})
    process.stop.set()


class FakeManager:
    """Serves version 1 of names, and loads nothing."""

    def __init__(self, *names: str) -> None:
        self.versions = dict.fromkeys(names)

    def number(self, name: str) -> int:
        return 1

    def target(self, name: str) -> Target:
        return Target(1, "", 0, TargetPhase.SERVE)


def opened_paths(name: str, sent: list[Report]) -> list[str]:
    """Returns the folders of the versions that were opened for ``name``."""
    reports = [one.names for one in sent if isinstance(one, StoreReport)]
    return [names[name].path for names in reports if name in names and names[name].path]


async def test_slow_open_of_one_name_does_not_delay_other_names(
    store: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    """Covers the version of a canary, whose pull takes minutes."""
    add_version(store, 2)
    for alias, number in (("canary", 2), ("stable", 1)):
        set_alias(store, "shop", alias, number)
    manager: Any = FakeManager("shop@canary", "shop@stable")
    settings, sent, stop = ServeSettings(str(store), follow="none"), list[Report](), asyncio.Event()
    watcher = StoreWatcher(settings, VersionResolver(settings), manager, sent.append, stop)
    wait = gate.before(lambda: None)
    before_open(monkeypatch, lambda name: wait() if name == "shop@canary" else None)
    watcher.apply(Desired(watches_store=True, polls_requested=1))
    await until(lambda: gate.threads)
    set_alias(store, "shop", "stable", 2)
    watcher.apply(Desired(watches_store=True, polls_requested=2))
    await until(lambda: opened_paths("shop@stable", sent))
    assert not opened_paths("shop@canary", sent)
    assert not any(isinstance(one, StoreReport) and one.poll_completed for one in sent)
    gate.opened.set()
    await until(lambda: sent[-1] == StoreReport({}, poll_completed=2))
    assert len(opened_paths("shop@canary", sent)) == len(gate.threads) == 1
    stop.set()


async def test_concurrently_opened_versions_are_read_into_memory_one_by_one(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against concurrent reads, which would both find the same memory free."""
    add_version(store, 2)
    inside, concurrent_counts, is_concurrent = list[str](), list[int](), threading.Event()

    def make(settings: object, versions: dict[str, ModelVersion], **_: object) -> object:
        inside.extend(versions)
        concurrent_counts.append(len(inside))
        if len(inside) > 1:
            is_concurrent.set()
        is_concurrent.wait(0.1)
        for name in versions:
            inside.remove(name)
        return versions

    monkeypatch.setattr(version_resolver, "make_resident_and_verify", make)
    resolver = VersionResolver(ServeSettings(str(store), tables="resident"))
    names = ("shop@canary", "shop@stable")
    await asyncio.gather(*(asyncio.to_thread(resolver.open_number, name, 2) for name in names))
    assert concurrent_counts == [1, 1]


def test_only_one_version_is_kept_open_for_a_name(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_version(store, 2)
    resolver = VersionResolver(ServeSettings(str(store)))
    opened = weakref.ref(resolver.open_number("shop", 1))
    load = ModelStore.load

    def load_after_release(*arguments: Any) -> ModelVersion:
        assert opened() is None
        return load(*arguments)

    monkeypatch.setattr(ModelStore, "load", load_after_release)
    taken = weakref.ref(resolver.take_opened("shop", 2))
    assert taken() is None


def test_version_that_cannot_be_served_yet_is_not_kept(store: Path) -> None:
    resolver = VersionResolver(ServeSettings(str(store)), lambda version: f"wait: {version.path}")
    with pytest.raises(UnopenedError, match=r"^wait: .*/shop/1$"):
        resolver.open_number("shop", 1)


async def test_shard_polls_the_store_while_it_loads_a_version(store: Path) -> None:
    """Checks that a poll completes during the load, and that another update follows the load."""
    updates, loaded = list[int](), asyncio.Event()

    class FakeShardVersions:
        async def update(self) -> None:
            updates.append(len(updates))
            await loaded.wait()

    shard_versions: Any = FakeShardVersions()
    manager: Any = FakeManager("shop@1")
    settings, sent, stop = ServeSettings(str(store), follow="none"), list[Report](), asyncio.Event()
    resolver = VersionResolver(settings)
    watcher = StoreWatcher(settings, resolver, manager, sent.append, stop, shard_versions)
    for polls in (1, 2):
        watcher.apply(Desired(watches_store=True, polls_requested=polls))
        await until(lambda: sent and sent[-1] == StoreReport({}, poll_completed=polls))  # noqa: B023
    assert updates == [0]
    loaded.set()
    await until(lambda: updates == [0, 1])
    stop.set()
