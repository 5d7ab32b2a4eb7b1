"""Tests of the version manager: a process switches from one version of a model to the next, and
keeps the former if that fails."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mapped import map_tables, mapped_kb
from server.fake_engine import Bags, FakeEngine, make_request, model_info
from server.gate import Gate
from server.live import make_pipeline
from server.pending_requests import submit_to
from server.thread_limit import refuse_thread
from server.waiting import until

from embedserve.batching.batcher import Batcher
from embedserve.batching.lookup_engine import LookupEngine
from embedserve.config import Limits
from embedserve.errors import UnknownModelError
from embedserve.metrics.model_metrics import COLUMNS_MIN, NAMES_SPARE
from embedserve.model_info import ModelInfo
from embedserve.processes.rollout.messages import (
    AliasSettings,
    Desired,
    Failure,
    LoadState,
    NameStatus,
    Target,
    TargetPhase,
    WorkerStatus,
)
from embedserve.processes.rollout.version_manager import Restored, VersionManager
from embedserve_store import Manifest, ModelVersion, StoreError
from embedserve_store.errors import UnreachableError
from embedserve_store.format.tables_file import TablesFile
from embedserve_store.memory.mapped_tables import populate

USER: Bags = {"user": [[1, 2]]}
IN_THREAD = Limits(inline_bytes_max=0)


def engine_of(number: int) -> FakeEngine:
    """Returns an engine of that version of "shop", with rows of its own."""
    info = model_info()
    manifest = replace(info.manifest, version=number)
    return FakeEngine(replace(info, manifest=manifest), seed=number)


COPIED = TablesFile(Path("tables"), np.empty(0, np.uint8), {}, {})


def version_of(manifest: Manifest, tables: TablesFile = COPIED) -> ModelVersion:
    """Returns a version with the attributes that a rollout uses: its manifest and its location."""
    path = Path(f"store/shop/{manifest.version}")
    return ModelVersion(path, manifest, plan=None, tables=tables, id_maps={})  # type: ignore[arg-type]


def nothing(number: int) -> None:
    return None


class Moving:
    """A process that serves version 7, and others that can be restored."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self.engines = {number: engine_of(number) for number in (7, 8, 9)}
        self.pipeline = make_pipeline(self.engines[7], executor=executor, limits=IN_THREAD)
        self.restored_numbers: list[int] = []
        self.restored: Callable[[int], None] = nothing
        self._executor = executor
        versions = {"shop": self.version(7)}
        engines = {"shop": self.engines[7]}
        self.opened: dict[int, ModelVersion] = {}
        self.reports: list[WorkerStatus] = []
        self.rollout = VersionManager(
            self.pipeline, versions, engines, self._open, self._restore, self._make_batcher
        )
        self.rollout.report = self.reports.append
        self._targets = {"shop": Target(7, "", 0, TargetPhase.SERVE)}
        self._generation = 0

    def desire(self, name: str = "shop", **fields: Any) -> None:
        """Changes the target of a name; a version to prepare gets another generation."""
        before = self._targets.get(name, Target(0, "", 0, TargetPhase.SERVE))
        if fields.get("phase") is TargetPhase.PREPARE:
            self._generation += 1
            fields["generation"] = self._generation
        self._targets[name] = replace(before, **fields)
        self.rollout.apply(Desired(dict(self._targets)))

    def prepare(self, number: int, name: str = "shop") -> None:
        self.desire(name, version=number, phase=TargetPhase.PREPARE, failure=None)

    async def prepared(self, number: int, name: str = "shop") -> None:
        self.prepare(number, name)
        await until(lambda: self.state(name).state is LoadState.PREPARED)

    def activate(self, name: str = "shop") -> None:
        self.desire(name, phase=TargetPhase.SERVE)

    def reject(self, number: int, reason: str, serving: int = 7) -> None:
        failure = Failure(number, reason, True, 0)
        self.desire(version=serving, generation=0, phase=TargetPhase.SERVE, failure=failure)

    def remove(self, name: str) -> dict[str, Target]:
        """Removes a name; returns the remaining targets."""
        del self._targets[name]
        self.rollout.apply(Desired(dict(self._targets)))
        return self._targets

    def state(self, name: str = "shop") -> NameStatus:
        """Returns the last reported state."""
        return self.reports[-1].names[name]

    def _open(self, name: str, target: Target) -> ModelVersion:
        return self.opened.get(target.version) or self.version(target.version)

    def version(self, number: int) -> ModelVersion:
        return version_of(self.engines[number].model.manifest)

    def _restore(
        self,
        name: str,
        version: ModelVersion,
        target: Target,
        say_warming: Callable[[], None],
    ) -> Restored:
        assert threading.current_thread() is not threading.main_thread()
        self.restored_numbers.append(version.manifest.version)
        self.restored(version.manifest.version)
        engine = self.engines[version.manifest.version]
        say_warming()
        deltas: Any = None
        if target.memory:
            deltas = SimpleNamespace(memory=SimpleNamespace(generation=target.generation))
        return version, engine, replace(engine.model, served_name=name, deltas=deltas)

    def _make_batcher(self, engine: LookupEngine, info: ModelInfo) -> Batcher:
        metrics = self.pipeline.metrics.models[info.served_as]
        return Batcher(engine, info, self.pipeline.limits, metrics, self._executor)

    def coming(self) -> tuple[int, str, str] | None:
        coming = self.pipeline.models.pending_versions.get("shop")
        return None if coming is None else (coming.version, coming.state, coming.reason)

    def behind(self) -> tuple[bool, bool]:
        """Returns whether another version is desired, and whether it was rejected."""
        metrics = self.pipeline.metrics.models["shop"]
        return metrics.found_s is not None, metrics.is_refused

    async def check(self, number: int, name: str = "shop") -> None:
        """Checks that version ``number`` is served."""
        result = await submit_to(self.pipeline.models, make_request(USER, model=name))
        assert result.model.version == number
        assert np.array_equal(result.values, self.engines[number].expected(USER))


@pytest.fixture
def moving(executor: ThreadPoolExecutor) -> Moving:
    return Moving(executor)


async def test_it_moves_once_the_next_version_is_loaded_and_it_is_told_to(
    moving: Moving, gate: Gate
) -> None:
    moving.restored = gate.before(nothing)
    moving.desire(wanted=8)
    metrics = moving.pipeline.metrics.models["shop"]
    found_s = metrics.found_s
    assert moving.behind() == (True, False)
    moving.prepare(8)
    await until(lambda: gate.threads)
    assert moving.coming() == (8, "loading", "")
    assert moving.state() == NameStatus(7, 1, LoadState.LOADING)
    moving.desire(wanted=8)  # at the next poll
    assert metrics.found_s == found_s
    await moving.check(7)
    gate.opened.set()
    await until(lambda: moving.state() == NameStatus(7, 1, LoadState.PREPARED))
    await moving.check(7)
    moving.activate()
    await moving.check(8)
    assert moving.state() == NameStatus(8)
    assert moving.coming() is None
    assert (metrics.wanted_version, metrics.switches, metrics.model.version) == (8, 1, 8)
    assert moving.behind() == (False, False)
    assert metrics.load_seconds > 0
    assert moving.restored_numbers == [8]


async def test_one_that_follows_the_others_switches_once_it_has_loaded(
    moving: Moving, gate: Gate
) -> None:
    moving.restored = gate.before(nothing)
    moving.desire(version=8, generation=5, phase=TargetPhase.SERVE)
    await until(lambda: gate.threads)
    await moving.check(7)
    gate.opened.set()
    await until(lambda: moving.state() == NameStatus(8))
    await moving.check(8)


async def test_what_it_leaves_is_let_go(moving: Moving) -> None:
    engine = weakref.ref(moving.engines[7])
    waiting = submit_to(moving.pipeline.models, make_request(USER))
    await moving.prepared(8)
    moving.activate()
    await waiting
    del moving.engines[7], waiting
    gc.collect()  # frees asyncio's futures
    await until(lambda: engine() is None)
    await moving.check(8)


async def test_what_it_leaves_is_let_go_where_no_thread_is_left(
    moving: Moving, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = weakref.ref(moving.engines[7])
    await moving.prepared(8)
    refuse_thread(monkeypatch, "let go")
    moving.activate()
    assert moving.state() == NameStatus(8)
    await moving.prepared(9)
    refuse_thread(monkeypatch, "let go")
    moving.desire(version=8, generation=0, phase=TargetPhase.SERVE)  # 9 is no longer desired
    assert moving.state() == NameStatus(8)
    del moving.engines[7]
    gc.collect()  # frees asyncio's futures
    assert engine() is None
    await moving.check(8)


async def test_a_version_is_loaded_later_where_no_thread_is_left(
    moving: Moving, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_thread(monkeypatch, "load")
    moving.prepare(8)
    await until(lambda: moving.state().state is LoadState.FAILED)
    assert not moving.state().is_final
    assert "can't start new thread" in moving.state().reason
    await moving.prepared(8)


async def test_what_is_restored_and_not_wanted_is_let_go(moving: Moving) -> None:
    engine = weakref.ref(moving.engines[8])
    await moving.prepared(8)
    del moving.engines[8]
    moving.desire(version=7, generation=0, phase=TargetPhase.SERVE)
    gc.collect()  # frees asyncio's futures
    await until(lambda: engine() is None)
    assert moving.coming() is None
    await moving.check(7)


async def test_its_rows_are_let_go_in_pieces(moving: Moving, tmp_path: Path) -> None:
    """Guards against unmapping the rows in one call, which stalls all threads that map memory
    meanwhile."""
    tables = map_tables(tmp_path / "rows", 1 << 20)
    moving.opened[8] = version_of(moving.engines[8].model.manifest, tables)
    populate(moving.opened[8], 1 << 30)
    for number in (8, 9):
        await moving.prepared(number)
        assert mapped_kb(tmp_path / "rows") == 1 << 10
        moving.activate()
    await until(lambda: not mapped_kb(tmp_path / "rows"))
    await moving.check(9)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (StoreError("tables.safetensors: damaged"), "tables.safetensors: damaged"),
        (MemoryError("no room"), "MemoryError: no room"),
    ],
)
async def test_a_version_that_cannot_be_loaded_stays_out(
    moving: Moving, error: Exception, reason: str
) -> None:
    def fail(number: int) -> None:
        raise error

    moving.restored = fail
    moving.desire(wanted=8)
    moving.prepare(8)
    await until(lambda: moving.state().state is LoadState.FAILED)
    assert moving.state() == NameStatus(7, 1, LoadState.FAILED, reason)
    moving.reject(8, reason)
    assert moving.coming() == (8, "failed", reason)
    assert moving.behind() == (True, True)
    assert moving.state() == NameStatus(7)
    await moving.check(7)
    moving.desire(wanted=7, failure=None)  # 8 may be tried again afterwards
    assert moving.coming() is None
    assert moving.behind() == (False, False)
    moving.restored = nothing
    await moving.prepared(8)
    moving.activate()
    await moving.check(8)


@pytest.mark.parametrize(
    ("error", "is_final"),
    [
        (UnreachableError("manifest.json: cannot be read: Stale file handle"), False),
        (StoreError("plan.json: damaged"), True),
    ],
)
async def test_a_version_that_cannot_be_opened_now_may_be_loaded_later(
    moving: Moving, monkeypatch: pytest.MonkeyPatch, error: StoreError, is_final: bool
) -> None:
    def fail(name: str, target: Target) -> ModelVersion:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(moving.rollout, "open_version", fail)
        moving.prepare(8)
        await until(lambda: moving.state().state is LoadState.FAILED)
    assert moving.state() == NameStatus(7, 1, LoadState.FAILED, str(error), is_final)
    await moving.prepared(8)


async def test_a_failure_that_is_told_anew_is_shown_since_its_beginning(moving: Moving) -> None:
    moving.reject(8, "is cut")
    shown = moving.pipeline.models.pending_versions["shop"]
    shown.since = "then"
    for reason in ("is cut", "is cut still"):
        moving.reject(8, reason)
        shown = moving.pipeline.models.pending_versions["shop"]
        assert (shown.reason, shown.since) == (reason, "then")


async def test_what_is_refused_while_it_is_loaded_is_not_kept(moving: Moving, gate: Gate) -> None:
    moving.restored = gate.before(nothing)
    moving.prepare(8)
    await until(lambda: gate.threads)
    moving.reject(8, "another worker cannot load it")
    gate.opened.set()
    await moving.prepared(9)
    assert moving.restored_numbers == [8, 9]
    assert {one.names["shop"].state for one in moving.reports} == {
        LoadState.LOADING,
        LoadState.ACTIVE,
        LoadState.PREPARED,
    }
    moving.activate()
    await moving.check(9)


async def test_a_repeated_attempt_is_loaded_again(moving: Moving) -> None:
    for attempt in (1, 2):
        await moving.prepared(8)
        assert moving.state().generation == attempt
    assert moving.restored_numbers == [8, 8]


async def test_a_version_that_serves_anew_is_loaded_for_its_changed_rows(moving: Moving) -> None:
    """Covers a worker that starts late, with the version of before a rollout and its rollback."""
    moving.desire(version=7, generation=2, memory="/memory/2")
    await until(lambda: moving.reports and moving.state() == NameStatus(7, rows_generation=2))
    assert moving.restored_numbers == [7]
    moving.desire(failure=Failure(8, "damaged", True, 1))  # the same memory
    assert moving.coming() == (8, "failed", "damaged")
    assert moving.restored_numbers == [7]


async def test_versions_are_loaded_one_at_a_time(moving: Moving, gate: Gate) -> None:
    """Checks that loads do not overlap, because one thread builds what torchrec builds and torch.fx
    traces."""
    begun: list[int] = []
    moving.restored = gate.before(begun.append)
    moving.prepare(8)
    await until(lambda: gate.threads)
    moving.prepare(9)  # another is desired meanwhile
    await asyncio.sleep(0.05)
    assert len(gate.threads) == 1
    gate.opened.set()
    await until(lambda: moving.state() == NameStatus(7, 2, LoadState.PREPARED))
    assert begun == [8, 9]
    moving.activate()
    await moving.check(9)


async def test_a_version_with_more_features_than_are_counted_is_refused(moving: Moving) -> None:
    many = model_info("shop", {f"f{i}": (2, 1) for i in range(COLUMNS_MIN + 1)})
    moving.opened[8] = version_of(replace(many.manifest, version=8))
    moving.prepare(8)
    await until(lambda: moving.state().state is LoadState.FAILED)
    said = "has 1025 features or keys, and this server has room to count 1024"
    assert said in moving.state().reason
    assert moving.restored_numbers == []


async def test_a_name_that_there_is_no_room_to_count_is_refused(moving: Moving) -> None:
    for i in range(NAMES_SPARE):
        await moving.prepared(8, f"shop@spare{i}")
        moving.activate(f"shop@spare{i}")
    restored = len(moving.restored_numbers)
    moving.prepare(8, "shop@more")
    await until(lambda: moving.state("shop@more").state is LoadState.FAILED)
    said = "shop@more: this server has room to count 17 names since its start: restart it"
    assert moving.state("shop@more").reason == said
    assert len(moving.restored_numbers) == restored
    moving.remove("shop@more")
    moving.remove("shop@spare0")
    await moving.prepared(8, "shop@more")
    moving.activate("shop@more")
    await moving.check(8, "shop@more")


async def test_a_name_is_added_and_removed(moving: Moving) -> None:
    rollout = moving.rollout
    said = r"^version is 'canary': the versions of shop are 7$"
    with pytest.raises(UnknownModelError, match=said):
        await moving.check(8, "shop@canary")
    assert rollout.number("shop@canary") is None
    await moving.prepared(8, "shop@canary")
    assert moving.restored_numbers == [8]
    moving.activate("shop@canary")
    for name, number in (("shop", 7), ("shop@canary", 8), ("shop@7", 7), ("shop@8", 8)):
        await moving.check(number, name)
    assert moving.pipeline.metrics.models["shop@canary"].wanted_version == 0  # no worker watches it
    said = r"^version is 9: the versions of shop are 7, 8 \(canary\)$"
    with pytest.raises(UnknownModelError, match=said):
        await moving.check(9, "shop@9")
    engine = weakref.ref(moving.engines.pop(8))
    targets = moving.remove("shop@canary")
    await until(lambda: engine() is None)
    assert "shop@canary" not in moving.pipeline.metrics.models
    with pytest.raises(UnknownModelError):
        await moving.check(8, "shop@canary")
    await moving.check(7)
    assert set(moving.reports[-1].names) == set(targets)


async def test_the_last_name_serves_until_another_one_does(moving: Moving) -> None:
    """Covers a worker that started before the names changed."""
    moving.prepare(8, "shop@canary")
    moving.remove("shop")
    await moving.check(7)
    moving.activate("shop@canary")
    await until(lambda: set(moving.rollout.versions) == {"shop@canary"})
    await moving.check(8)


async def test_a_version_that_leaves_is_told_until_it_has_answered(moving: Moving) -> None:
    models = moving.pipeline.models
    moving.engines[7].hold()
    waiting = submit_to(models, make_request(USER))
    await until(lambda: moving.engines[7].lookups)
    since = models.status(models.model("shop"))["since"]
    await moving.prepared(8)
    moving.activate()
    status = models.status(models.model("shop"))
    assert status["leaving"] == [7]
    assert status["since"] >= since
    moving.engines[7].release()
    assert (await waiting).model.version == 7
    await until(lambda: not models.status(models.model("shop"))["leaving"])


@pytest.fixture
async def canary(moving: Moving) -> Moving:
    """Returns a process that serves version 8 as the canary."""
    await moving.prepared(8, "shop@canary")
    moving.activate("shop@canary")
    return moving


def share(moving: Moving, version: int, traffic: float, shadow: float = 0.0) -> None:
    moving.desire("shop@canary", alias_settings=AliasSettings(version, traffic, shadow))


def shares(moving: Moving) -> tuple[float, float]:
    """Returns (share, shadow) of the version that serves the canary."""
    models = moving.pipeline.models
    status = models.status(models.model("shop@canary"))
    return status["share"], status["shadow"]


async def test_a_share_begins_with_its_version_and_not_before(canary: Moving) -> None:
    share(canary, 9, 50.0, 20.0)
    assert shares(canary) == (0.0, 0.0)
    await canary.prepared(9, "shop@canary")
    assert shares(canary) == (0.0, 0.0)
    canary.activate("shop@canary")
    assert shares(canary) == (50.0, 20.0)
    share(canary, 9, 10.0)
    assert shares(canary) == (10.0, 0.0)


async def test_a_version_that_cannot_be_loaded_gives_its_share_to_no_other(canary: Moving) -> None:
    """Covers a bad canary without a share, whose next version, with half of the requests, cannot be
    loaded."""
    share(canary, 8, 0.0)
    share(canary, 9, 50.0)
    canary.desire("shop@canary", wanted=9, failure=Failure(9, "it cannot be read", True, 0))
    for _ in range(50):
        await canary.check(7)
    share(canary, 8, 5.0)  # the alias is set back
    assert shares(canary) == (5.0, 0.0)


async def test_a_share_that_waits_goes_with_its_alias(canary: Moving) -> None:
    share(canary, 8, 30.0)
    share(canary, 9, 50.0)
    assert shares(canary) == (30.0, 0.0)
    share(canary, 0, 0.0)
    assert shares(canary) == (0.0, 0.0)
    await canary.prepared(9, "shop@canary")
    canary.activate("shop@canary")
    assert shares(canary) == (0.0, 0.0)
