"""Tests of the store watcher: a process follows its store, and survives any fault of the store."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from server.fake_engine import FakeEngine, make_request
from server.fake_models import served_of
from server.gate import Gate
from server.live import make_pipeline
from server.pending_requests import submit_to
from server.python import run_warm_python
from server.thread_limit import refuse_thread
from server.waiting import until

from embedserve.batching.batcher import Batcher
from embedserve.batching.lookup_engine import LookupEngine
from embedserve.config import ServeSettings
from embedserve.model_info import ModelInfo
from embedserve.processes import single_process
from embedserve.processes.holding import open_folder
from embedserve.processes.rollout import store_watcher, version_resolver
from embedserve.processes.rollout.agent import RolloutAgent
from embedserve.processes.rollout.messages import (
    AliasSettings,
    Desired,
    LoadState,
    NameStatus,
    Report,
    StoreEntry,
    StoreReport,
    Target,
    TargetPhase,
)
from embedserve.processes.rollout.store_watcher import StoreWatcher, apply_initial_alias_settings
from embedserve.processes.rollout.version_manager import Restored, VersionManager
from embedserve.processes.rollout.version_resolver import VersionResolver
from embedserve.processes.single_process import run_single_process, start_rollouts
from embedserve.processes.startup.ports import claim_ports
from embedserve.processes.threads import is_any_running
from embedserve_store import ModelStore, ModelVersion, StoreError, set_alias
from embedserve_store.errors import UnopenedError

PUBLISH = """
import sys, torch
from embedserve_store import TableSpec, publish
for value in (1, 2, 3):
    weight = torch.full((7, 4), float(value))
    tables = [TableSpec("t_user", 7, 4, ("user",), "sum", "float32")]
    publish({"embedding_bags.t_user.weight": weight}, sys.argv[1], model="shop", tables=tables)
"""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a store with versions 1, 2 and 3 of "shop"."""
    store = tmp_path_factory.mktemp("versions") / "store"
    done = run_warm_python("-c", PUBLISH, store)
    assert done.returncode == 0, done.stderr
    return store


@pytest.fixture
def later(published: Path, tmp_path: Path) -> Path:
    """Returns the folder of the versions that are yet to appear in ``store``."""
    return shutil.copytree(published, tmp_path / "later")


@pytest.fixture
def store(later: Path, tmp_path: Path) -> Path:
    """Returns a store with version 1 only."""
    (tmp_path / "store" / "shop").mkdir(parents=True)
    (later / "shop" / "1").rename(tmp_path / "store" / "shop" / "1")
    return tmp_path / "store"


def appear(later: Path, store: Path, number: int) -> None:
    move(later / "shop" / str(number), store / "shop" / str(number))


def move(one: Path, other: Path) -> Path:
    return one.rename(other)


def before_open(monkeypatch: pytest.MonkeyPatch, change: Callable[[str], object]) -> None:
    """Calls ``change`` with the name before the watcher opens a version for it."""
    open_number = VersionResolver.open_number

    def change_and_open(self: VersionResolver, name: str, number: int) -> ModelVersion:
        change(name)
        return open_number(self, name, number)

    monkeypatch.setattr(VersionResolver, "open_number", change_and_open)


class Serving:
    """A process that serves a store with fake engines, and polls it when the test says so."""

    def __init__(
        self,
        store: Path | str,
        executor: ThreadPoolExecutor,
        model: str = "shop",
        follow: str = "latest",
    ) -> None:
        self.name = model
        self.settings = ServeSettings(str(store), model=(model,), follow=follow, follow_s=3600)
        first = ModelStore(store).load("shop", model.partition("@")[2] or None)
        self.attempts: list[int] = []
        self.failures: dict[int, Exception] = {}
        self.before_restore: Callable[[], None] = lambda: None
        target = Target(0, "", 0, TargetPhase.SERVE)
        _, engine, _ = self._restore(model, first, target, lambda: None)
        self.attempts.clear()
        assert isinstance(engine, FakeEngine)
        self.pipeline = make_pipeline(engine, executor=executor)
        self._executor = executor
        versions = {model: first}
        self.rollout = VersionManager(
            self.pipeline,
            versions,
            {model: engine},
            lambda name, target: open_folder(target.path),
            self._restore,
            self._make_batcher,
        )
        self.stop = asyncio.Event()

    def _restore(
        self,
        name: str,
        version: ModelVersion,
        target: Target,
        say_warming: Callable[[], None],
    ) -> Restored:
        manifest = version.manifest
        self.attempts.append(manifest.version)
        self.before_restore()
        if manifest.version in self.failures:
            raise self.failures[manifest.version]
        info = replace(served_of(manifest, version.translator), served_name=name)
        return version, FakeEngine(info, seed=manifest.version), info

    def _make_batcher(self, engine: LookupEngine, info: ModelInfo) -> Batcher:
        metrics = self.pipeline.metrics.models[info.served_as]
        return Batcher(engine, info, self.pipeline.limits, metrics, self._executor)

    def shown(self) -> tuple[dict[str, Any] | None, bool]:
        """Returns (the next version in /models, whether the metrics show it as rejected)."""
        models, metrics = self.pipeline.models, self.pipeline.metrics
        status = models.status(models.model(self.name))
        metrics.flush()
        values = {name: value for name, _, value in metrics.models[self.name].samples()}
        return status["next"], bool(values["embedserve_model_refused"])

    def start(self) -> None:
        """Follows the store until ``stop`` is set."""
        self.agent = start_rollouts(self.settings, self.rollout, self.stop)

    async def look(self) -> int:
        """Polls the store; returns the served version once all loads have ended."""
        if not hasattr(self, "agent"):
            self.start()
            await self.settled()
        await self.agent._watcher.poll()
        await self.settled()
        return await self.answering()

    async def settled(self) -> None:
        """Waits until all loads have ended, also those of the poll at the start."""
        for _ in range(2):
            for _ in range(10):  # events that the loop has yet to deliver
                await asyncio.sleep(0)
            await until(
                lambda: (
                    not self.agent._watcher._openings
                    and not is_any_running()
                    and all(one.state is LoadState.ACTIVE for one in self._names())
                )
            )

    def _names(self) -> Iterable[NameStatus]:
        return self.rollout.status().names.values()

    async def answering(self) -> int:
        result = await submit_to(self.pipeline.models, make_request({"user": [[1]]}))
        return result.model.version


async def test_the_latest_version_answers(
    store: Path, later: Path, executor: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    serving = Serving(store, executor)
    assert await serving.look() == 1
    appear(later, store, 3)
    assert await serving.look() == 3
    appear(later, store, 2)
    assert await serving.look() == 3
    shutil.rmtree(store / "shop" / "3")  # a deleted version is no longer served
    assert await serving.look() == 2
    assert serving.attempts == [3, 2]
    assert caplog.messages == [
        "shop: switched to version 3 (before: 1)",
        "shop: switched to version 2 (before: 3)",
    ]


async def test_an_alias_is_followed_there_and_back(
    store: Path, later: Path, executor: ThreadPoolExecutor
) -> None:
    appear(later, store, 2)
    set_alias(store, "shop", "stable", 1)
    for follow in ("alias", "latest"):
        serving = Serving(store, executor, "shop@stable", follow)
        assert await serving.look() == 1
        for number in (2, 1, 2, 1):
            set_alias(store, "shop", "stable", number)
            assert await serving.look() == number


@pytest.mark.parametrize(
    ("model", "follow"), [("", "alias"), ("shop", "alias"), ("shop@1", "latest")]
)
async def test_what_is_not_followed_stays(
    store: Path, later: Path, executor: ThreadPoolExecutor, model: str, follow: str
) -> None:
    serving = Serving(store, executor, model, follow)
    appear(later, store, 2)
    assert await serving.look() == 1
    assert serving.attempts == []


async def test_a_version_that_fails_is_tried_once_and_said_once(
    store: Path, later: Path, executor: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    serving = Serving(store, executor)
    serving.failures[2] = StoreError("its goldens are answered otherwise")
    appear(later, store, 2)
    for _ in range(3):
        assert await serving.look() == 1
    assert serving.attempts == [2]
    assert caplog.messages == ["shop: version 2 stays out: its goldens are answered otherwise"]
    assert serving.pipeline.models.pending_versions[serving.name].state == "failed"
    appear(later, store, 3)
    assert await serving.look() == 3
    assert serving.pipeline.models.pending_versions == {}


async def test_one_that_the_shards_do_not_answer_is_tried_at_each_look_and_said_once(
    store: Path, later: Path, executor: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    serving = Serving(store, executor)
    serving.failures[2] = UnopenedError("its goldens were not answered")
    appear(later, store, 2)
    for _ in range(3):
        assert await serving.look() == 1
    assert serving.attempts[:3] == [2, 2, 2]
    assert caplog.messages == ["shop: version 2 stays out: its goldens were not answered"]
    assert serving.pipeline.models.pending_versions[serving.name].state == "failed"
    serving.failures.clear()
    assert await serving.look() == 2
    assert serving.shown() == (None, False)


async def test_one_that_no_thread_is_left_to_open_is_tried_again(
    store: Path,
    later: Path,
    executor: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serving = Serving(store, executor)
    assert await serving.look() == 1
    appear(later, store, 2)
    resolve = VersionResolver.resolve

    def resolve_and_refuse(*args: Any, **kwargs: Any) -> dict[str, StoreEntry]:
        if not kwargs["is_all"]:  # a poll; the next thread opens the version
            refuse_thread(monkeypatch, "follow")
        return resolve(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(VersionResolver, "resolve", resolve_and_refuse)
        assert await serving.look() == 1
    shown, _ = serving.shown()
    assert shown is not None
    assert "can't start new thread" in shown["reason"]
    assert await serving.look() == 2


async def test_one_that_has_not_come_whole_is_waited_for(
    store: Path, later: Path, executor: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    """Covers a folder that is copied into the store file by file."""
    caplog.set_level(logging.INFO)
    serving = Serving(store, executor)
    (store / "shop" / "2").mkdir()
    for name in ("goldens.safetensors", "plan.json", "manifest.json", "tables.safetensors"):
        for _ in range(2):
            assert await serving.look() == 1
        shutil.copy(later / "shop" / "2" / name, store / "shop" / "2")
    assert await serving.look() == 2
    assert serving.attempts == [2]
    *said, moved = caplog.messages
    assert len(said) == len(set(said)) == 2  # no manifest, then no tables
    assert all(line.startswith("shop: version 2 stays out: ") for line in said)
    assert moved.startswith("shop: switched to version 2")
    assert serving.shown() == (None, False)


def cut_tables(folder: Path) -> None:
    tables = folder / "tables.safetensors"
    tables.chmod(0o644)
    with tables.open("r+b") as file:
        file.truncate(tables.stat().st_size - 16)


def damage_goldens(folder: Path) -> None:
    goldens = folder / "goldens.safetensors"
    goldens.chmod(0o644)
    goldens.write_bytes(b"damaged")


@pytest.mark.parametrize(
    ("damage", "named"),
    [(cut_tables, "tables.safetensors"), (damage_goldens, "goldens.safetensors")],
)
async def test_one_that_cannot_be_opened_is_shown_with_why_and_tried_at_each_look(
    store: Path,
    later: Path,
    executor: ThreadPoolExecutor,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    named: str,
) -> None:
    serving = Serving(store, executor)
    whole = shutil.copytree(later / "shop" / "2", later / "whole")
    damage(later / "shop" / "2")
    appear(later, store, 2)
    seen = []
    for _ in range(3):
        assert await serving.look() == 1
        shown, is_refused = serving.shown()
        assert shown is not None
        assert (shown["version"], shown["state"], is_refused) == (2, "failed", True)
        assert named in shown["reason"]
        seen.append(shown)
    assert caplog.messages == [f"shop: version 2 stays out: {seen[0]['reason']}"]
    assert seen[0] == seen[2]
    shutil.rmtree(store / "shop" / "2")
    move(whole, store / "shop" / "2")
    assert await serving.look() == 2
    assert serving.shown() == (None, False)


async def test_a_pulled_one_without_room_is_shown_with_why(
    store: Path,
    later: Path,
    executor: ThreadPoolExecutor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Checks that the reason, in which the free bytes differ at each poll, is shown, but logged
    once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    serving = Serving(f"file://{store}", executor)
    appear(later, store, 2)
    usage = SimpleNamespace(total=1 << 30)
    for usage.free in (0, 77, 1_088):
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "disk_usage", lambda path: usage)
            assert await serving.look() == 1
        shown, is_refused = serving.shown()
        assert shown is not None
        assert (shown["version"], shown["state"], is_refused) == (2, "failed", True)
        assert f"{usage.free:,}" in shown["reason"]
    assert len(caplog.messages) == 1
    assert await serving.look() == 2
    assert serving.shown() == (None, False)


async def test_one_that_is_mended_and_answers_wrongly_is_tried_once(
    store: Path, later: Path, executor: ThreadPoolExecutor
) -> None:
    """Covers a version that opens and fails its goldens, also if it could not be opened at
    first."""
    serving = Serving(store, executor)
    serving.failures[2] = StoreError("its goldens are answered otherwise")
    whole = shutil.copytree(later / "shop" / "2", later / "whole")
    cut_tables(later / "shop" / "2")
    appear(later, store, 2)
    assert await serving.look() == 1
    shutil.rmtree(store / "shop" / "2")
    move(whole, store / "shop" / "2")
    for _ in range(3):
        assert await serving.look() == 1
    assert serving.attempts == [2]
    shown, is_refused = serving.shown()
    assert shown is not None
    assert (shown["reason"], is_refused) == ("its goldens are answered otherwise", True)


async def test_a_store_that_goes_away_and_comes_back(
    store: Path, later: Path, executor: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    serving = Serving(store, executor)
    away = move(store, store.parent / "away")
    for _ in range(3):
        assert await serving.look() == 1
    move(away, store)
    appear(later, store, 2)
    assert await serving.look() == 2
    gone, back, moved = caplog.messages
    assert gone.startswith("shop cannot be followed: ")
    assert "No such file" in gone
    assert back == "shop can be followed again"
    assert moved.startswith("shop: switched to version 2")


async def test_an_alias_to_nothing_or_that_is_removed_changes_nothing(
    store: Path, executor: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    set_alias(store, "shop", "stable", 1)
    serving = Serving(store, executor, "shop@stable")
    set_alias(store, "shop", "stable", None)
    for _ in range(2):
        assert await serving.look() == 1
    (said,) = caplog.messages
    assert "'stable' is no version and no alias" in said


async def test_of_several_that_appear_at_once_only_the_last_is_loaded(
    store: Path, later: Path, executor: ThreadPoolExecutor
) -> None:
    serving = Serving(store, executor)
    for number in (2, 3):
        appear(later, store, number)
    assert await serving.look() == 3
    assert serving.attempts == [3]


@pytest.mark.parametrize(("moved_to", "loaded"), [(1, []), (3, [3])])
async def test_a_version_that_the_alias_leaves_while_it_is_opened_is_not_loaded(
    store: Path,
    later: Path,
    executor: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    moved_to: int,
    loaded: list[int],
) -> None:
    """Covers a pull that takes minutes, while an operator rolls back."""
    for number in (2, 3):
        appear(later, store, number)
    set_alias(store, "shop", "stable", 1)
    serving = Serving(store, executor, "shop@stable", "alias")
    assert await serving.look() == 1
    set_alias(store, "shop", "stable", 2)
    before_open(monkeypatch, lambda name: set_alias(store, "shop", "stable", moved_to))
    assert await serving.look() == moved_to
    assert serving.attempts == loaded


async def test_a_version_begins_with_the_share_that_it_has_once_it_is_opened(
    store: Path, later: Path, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    appear(later, store, 2)
    set_alias(store, "shop", "canary", 1)
    serving = Serving(store, executor, "shop@canary", "alias")
    assert await serving.look() == 1
    set_alias(store, "shop", "canary", 2, shadow=20)
    before_open(monkeypatch, lambda name: set_alias(store, "shop", "canary", 2, shadow=0))
    assert await serving.look() == 2
    models = serving.pipeline.models
    assert models.status(models.model("shop@canary"))["shadow"] == 0


async def test_a_remote_store_is_followed(
    store: Path,
    later: Path,
    executor: ThreadPoolExecutor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"file://{store}"
    set_alias(url, "shop", "stable", 1)
    serving = Serving(url, executor, "shop@stable")
    assert await serving.look() == 1
    appear(later, store, 2)
    for number in (2, 1):
        set_alias(url, "shop", "stable", number)
        assert await serving.look() == number
    answering = serving.rollout.versions["shop@stable"].path
    assert answering.is_relative_to(tmp_path / "cache")


async def test_the_store_is_looked_at_until_the_stop(
    store: Path, later: Path, executor: ThreadPoolExecutor
) -> None:
    serving = Serving(store, executor)
    serving.settings = replace(serving.settings, follow_s=0.1)
    serving.start()
    appear(later, store, 2)
    await until(lambda: serving.rollout.number("shop") == 2)
    serving.stop.set()
    await serving.settled()  # a poll in flight may end
    appear(later, store, 3)
    await asyncio.sleep(5 * serving.settings.follow_s)
    assert await serving.answering() == 2


async def test_one_that_takes_over_repeats_the_look_that_was_asked_for(
    store: Path, executor: ThreadPoolExecutor
) -> None:
    serving, sent = Serving(store, executor, follow="none"), list[Report]()
    agent = RolloutAgent(serving.settings, serving.rollout, sent.append, serving.stop)
    agent.apply(Desired({"shop": Target(1, "", 0, TargetPhase.SERVE)}, watches_store=True))
    await asyncio.sleep(0.05)
    assert not any(isinstance(one, StoreReport) for one in sent)
    agent = RolloutAgent(serving.settings, serving.rollout, sent.append, serving.stop)
    targets = {"shop": Target(1, "", 0, TargetPhase.SERVE)}
    agent.apply(Desired(targets, watches_store=True, polls_requested=1))
    await until(lambda: sent[-1] == StoreReport({}, poll_completed=1))
    assert sent[-2] == StoreReport({"shop": StoreEntry(1, AliasSettings(1))})
    serving.stop.set()


class Manager:
    """Serves version 1 of names, and loads nothing."""

    def __init__(self, *names: str) -> None:
        self.versions = dict.fromkeys(names)

    def number(self, name: str) -> int:
        return 1

    def target(self, name: str) -> Target:
        return Target(1, "", 0, TargetPhase.SERVE)


def opened_for(name: str, sent: list[Report]) -> list[str]:
    """Returns the folders of the versions that were opened for ``name``."""
    reports = [one.names for one in sent if isinstance(one, StoreReport)]
    return [names[name].path for names in reports if name in names and names[name].path]


async def test_no_name_waits_for_the_version_of_another(
    store: Path, later: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    """Covers the version of a canary, whose pull takes minutes."""
    appear(later, store, 2)
    for alias, number in (("canary", 2), ("stable", 1)):
        set_alias(store, "shop", alias, number)
    manager: Any = Manager("shop@canary", "shop@stable")
    settings, sent, stop = ServeSettings(str(store), follow="none"), list[Report](), asyncio.Event()
    watcher = StoreWatcher(settings, VersionResolver(settings), manager, sent.append, stop)
    wait = gate.before(lambda: None)
    before_open(monkeypatch, lambda name: wait() if name == "shop@canary" else None)
    watcher.apply(Desired(watches_store=True, polls_requested=1))
    await until(lambda: gate.threads)
    set_alias(store, "shop", "stable", 2)
    watcher.apply(Desired(watches_store=True, polls_requested=2))
    await until(lambda: opened_for("shop@stable", sent))
    assert not opened_for("shop@canary", sent)
    assert not any(isinstance(one, StoreReport) and one.poll_completed for one in sent)
    gate.opened.set()
    await until(lambda: sent[-1] == StoreReport({}, poll_completed=2))
    assert len(opened_for("shop@canary", sent)) == len(gate.threads) == 1
    stop.set()


async def test_versions_that_are_opened_at_once_are_read_into_memory_one_by_one(
    store: Path, later: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against concurrent reads, which would both find the same memory free."""
    appear(later, store, 2)
    inside, most, meets = list[str](), list[int](), threading.Event()

    def make(settings: object, versions: dict[str, ModelVersion], **_: object) -> object:
        inside.extend(versions)
        most.append(len(inside))
        if len(inside) > 1:
            meets.set()
        meets.wait(0.1)
        for name in versions:
            inside.remove(name)
        return versions

    monkeypatch.setattr(version_resolver, "make_resident_and_verify", make)
    resolver = VersionResolver(ServeSettings(str(store), tables="resident"))
    names = ("shop@canary", "shop@stable")
    await asyncio.gather(*(asyncio.to_thread(resolver.open_number, name, 2) for name in names))
    assert most == [1, 1]


async def test_a_shard_is_polled_while_it_loads_a_version(store: Path) -> None:
    """Checks that a poll completes during the load, and that another update follows the load."""
    updates, loaded = list[int](), asyncio.Event()

    class Held:
        async def update(self) -> None:
            updates.append(len(updates))
            await loaded.wait()

    held: Any = Held()
    manager: Any = Manager("shop@1")
    settings, sent, stop = ServeSettings(str(store), follow="none"), list[Report](), asyncio.Event()
    resolver = VersionResolver(settings)
    watcher = StoreWatcher(settings, resolver, manager, sent.append, stop, held)
    for polls in (1, 2):
        watcher.apply(Desired(watches_store=True, polls_requested=polls))
        await until(lambda: sent and sent[-1] == StoreReport({}, poll_completed=polls))  # noqa: B023
    assert updates == [0]
    loaded.set()
    await until(lambda: updates == [0, 1])
    stop.set()


async def test_shares_begin_before_the_first_look(
    store: Path, executor: ThreadPoolExecutor
) -> None:
    set_alias(store, "shop", "canary", 1, shadow=20)
    serving = Serving(store, executor, "shop@canary", "alias")
    models = serving.pipeline.models
    await apply_initial_alias_settings(serving.settings, serving.rollout)
    assert models.status(models.model("shop@canary"))["shadow"] == 20


async def test_a_process_serves_once_it_has_the_shares(
    store: Path, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_alias(store, "shop", "canary", 1, shadow=20)
    serving = Serving(store, executor, "shop@canary", "alias")
    models = serving.pipeline.models
    shadows: list[float] = []

    async def run_server(*_: object) -> None:
        shadows.append(models.status(models.model("shop@canary"))["shadow"])

    monkeypatch.setattr(single_process, "run_server", run_server)
    ports = claim_ports("127.0.0.1", 0, 0)
    ports.close()
    await run_single_process(
        serving.pipeline, serving.rollout, serving.settings, ports, lambda: None, lambda: None
    )
    assert shadows == [20]


async def test_a_start_does_not_wait_for_shares_for_ever(
    store: Path,
    executor: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    set_alias(store, "shop", "canary", 1, shadow=20)
    serving = Serving(store, executor, "shop@canary", "alias")
    answers = threading.Event()
    monkeypatch.setattr(store_watcher, "SHARES_S_MAX", 0.05)
    monkeypatch.setattr(VersionResolver, "resolve", lambda *_: answers.wait() and {})
    await apply_initial_alias_settings(serving.settings, serving.rollout)
    answers.set()
    assert caplog.messages == [
        "the store did not return the shares within 0.05 s: they begin later"
    ]


async def test_a_start_does_not_end_where_the_shares_cannot_be_read(
    store: Path,
    executor: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Covers any exception of the store, after which the follower polls again."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("of a library")

    serving = Serving(store, executor, "shop@1", "alias")
    monkeypatch.setattr(VersionResolver, "resolve", fail)
    await apply_initial_alias_settings(serving.settings, serving.rollout)
    assert caplog.messages == ["the shares cannot be read: they begin later"]
