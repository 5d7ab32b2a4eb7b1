"""A process moves from one version of a model to the next, and stays where that fails."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mapped import map_tables, mapped_kb
from server.callers import submit_to
from server.fake_engine import Bags, FakeEngine, make_request, model_info
from server.gate import Gate
from server.live import make_pipeline
from server.waiting import until

from embedserve.batching.batcher import Batcher
from embedserve.batching.lookup_engine import LookupEngine
from embedserve.config import Limits
from embedserve.errors import UnknownModelError
from embedserve.metrics.model_metrics import COLUMNS_MIN
from embedserve.model_info import ModelInfo
from embedserve.processes.version_manager import Restored, VersionManager
from embedserve_store import Manifest, ModelVersion, StoreError
from embedserve_store.format.tables_file import TablesFile
from embedserve_store.memory.mapped_tables import populate

USER: Bags = {"user": [[1, 2]]}
IN_THREAD = Limits(inline_bytes_max=0)


def engine_of(number: int) -> FakeEngine:
    """Of that version of "shop", with rows of its own."""
    info = model_info()
    manifest = replace(info.manifest, version=number)
    return FakeEngine(replace(info, manifest=manifest), seed=number)


COPIED = TablesFile(Path("tables"), np.empty(0, np.uint8), {}, {})


def version_of(manifest: Manifest, tables: TablesFile = COPIED) -> ModelVersion:
    """What a rollout asks of a version: what it is, and where it lies."""
    path = Path(f"store/shop/{manifest.version}")
    return ModelVersion(path, manifest, plan=None, tables=tables, id_maps={})  # type: ignore[arg-type]


def nothing(number: int) -> None:
    return None


class Moving:
    """A process that answers with version 7, and others that can be restored."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self.engines = {number: engine_of(number) for number in (7, 8, 9)}
        self.pipeline = make_pipeline(self.engines[7], executor=executor, limits=IN_THREAD)
        self.prepared: list[int] = []
        self.restored: Callable[[int], None] = nothing
        self._executor = executor
        versions = {"shop": self.version(7)}
        engines = {"shop": self.engines[7]}
        self.rollout = VersionManager(
            self.pipeline, versions, engines, self._restore, self._make_batcher
        )

    def version(self, number: int) -> ModelVersion:
        return version_of(self.engines[number].model.manifest)

    def _restore(
        self,
        name: str,
        version: ModelVersion,
        say_warming: Callable[[], None],
    ) -> Restored:
        assert threading.current_thread() is not threading.main_thread()
        self.prepared.append(version.manifest.version)
        self.restored(version.manifest.version)
        engine = self.engines[version.manifest.version]
        say_warming()
        return engine, replace(engine.model, served_name=name)

    def _make_batcher(self, engine: LookupEngine, info: ModelInfo) -> Batcher:
        metrics = self.pipeline.metrics.models[info.served_as]
        return Batcher(engine, info, self.pipeline.limits, metrics, self._executor)

    def coming(self) -> tuple[int, str, str] | None:
        coming = self.pipeline.models.pending.get("shop")
        return None if coming is None else (coming.version, coming.state, coming.reason)

    def behind(self) -> tuple[bool, bool]:
        """Whether another version is to answer, and whether it was refused."""
        metrics = self.pipeline.metrics.models["shop"]
        return metrics.found_s is not None, metrics.is_refused

    async def check(self, number: int, name: str = "shop") -> None:
        """That version ``number`` answers."""
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
    moving.rollout.set_desired("shop", 8)
    metrics = moving.pipeline.metrics.models["shop"]
    found_s = metrics.found_s
    assert moving.behind() == (True, False)
    preparing = asyncio.create_task(moving.rollout.prepare("shop", moving.version(8)))
    await until(lambda: gate.threads)
    assert moving.coming() == (8, "loading", "")
    moving.rollout.set_desired("shop", 8)  # at the next look
    assert metrics.found_s == found_s
    await moving.check(7)
    assert not moving.rollout.activate("shop", 8)
    gate.opened.set()
    assert await preparing
    await moving.check(7)
    assert not moving.rollout.activate("shop", 9)
    assert moving.rollout.activate("shop", 8)
    await moving.check(8)
    assert moving.rollout.number("shop") == 8
    assert moving.coming() is None
    assert (metrics.wanted_version, metrics.switches, metrics.model.version) == (8, 1, 8)
    assert moving.behind() == (False, False)
    assert metrics.load_seconds > 0
    assert moving.prepared == [8]


async def test_what_it_leaves_is_let_go(moving: Moving) -> None:
    engine = weakref.ref(moving.engines[7])
    waiting = submit_to(moving.pipeline.models, make_request(USER))
    await moving.rollout.prepare("shop", moving.version(8))
    moving.rollout.activate("shop", 8)
    await waiting
    del moving.engines[7], waiting
    gc.collect()  # of asyncio's futures
    await until(lambda: engine() is None)
    await moving.check(8)


async def test_its_rows_are_let_go_in_pieces(moving: Moving, tmp_path: Path) -> None:
    """Not all at once, as where they are unmapped, which stops all who map memory meanwhile."""
    tables = map_tables(tmp_path / "rows", 1 << 20)
    version = version_of(moving.engines[8].model.manifest, tables)
    populate(version, 1 << 30)
    for number, one in ((8, version), (9, moving.version(9))):
        await moving.rollout.prepare("shop", one)
        assert mapped_kb(tmp_path / "rows") == 1 << 10
        assert moving.rollout.activate("shop", number)
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
    with pytest.raises(StoreError, match=f"^{reason}$"):
        await moving.rollout.prepare("shop", moving.version(8))
    moving.rollout.reject("shop", 8, reason)
    assert moving.coming() == (8, "failed", reason)
    assert moving.behind()[1]
    assert moving.rollout.rejected("shop") == 8
    assert not moving.rollout.activate("shop", 8)
    await moving.check(7)
    moving.rollout.set_desired("shop", 8)
    assert moving.rollout.rejected("shop") == 8
    moving.rollout.set_desired("shop", 7)  # another is wanted: 8 may be tried again afterwards
    assert moving.rollout.rejected("shop") is None
    assert moving.behind() == (False, False)
    moving.restored = nothing
    moving.rollout.set_desired("shop", 8)
    assert await moving.rollout.prepare("shop", moving.version(8))
    assert moving.rollout.activate("shop", 8)
    await moving.check(8)


async def test_what_is_refused_while_it_is_loaded_is_not_kept(moving: Moving, gate: Gate) -> None:
    moving.restored = gate.before(nothing)
    preparing = asyncio.create_task(moving.rollout.prepare("shop", moving.version(8)))
    await until(lambda: gate.threads)
    moving.rollout.reject("shop", 8, "another worker cannot load it")
    gate.opened.set()
    assert not await preparing
    assert not moving.rollout.activate("shop", 8)
    assert moving.coming() == (8, "failed", "another worker cannot load it")
    assert await moving.rollout.prepare("shop", moving.version(9))
    assert moving.rollout.activate("shop", 9)


async def test_one_that_cannot_be_opened_ends_no_load_of_the_same(
    moving: Moving, gate: Gate
) -> None:
    """As where an operator had it opened, before or since."""
    rollout = moving.rollout
    rollout.set_desired("shop", 8)
    assert rollout.report_unopened("shop", 8, "is cut")
    assert (rollout.rejected("shop"), moving.coming()) == (None, (8, "failed", "is cut"))
    moving.restored = gate.before(nothing)
    loading = asyncio.create_task(rollout.prepare("shop", moving.version(8)))
    await until(lambda: gate.threads)
    assert not rollout.report_unopened("shop", 8, "is cut")
    gate.opened.set()
    assert await loading
    assert rollout.activate("shop", 8)
    assert moving.behind() == (False, False)
    await moving.check(8)


async def test_versions_are_loaded_one_at_a_time(moving: Moving, gate: Gate) -> None:
    """What torchrec builds, and torch.fx traces, is built by one thread."""
    begun: list[int] = []
    moving.restored = gate.before(begun.append)
    first, second = (
        asyncio.create_task(moving.rollout.prepare("shop", moving.version(number)))
        for number in (8, 9)
    )
    await until(lambda: gate.threads)
    await asyncio.sleep(0.05)
    assert len(gate.threads) == 1
    gate.opened.set()
    assert not await first  # another was wanted meanwhile
    assert await second
    assert begun == [8, 9]
    assert moving.rollout.activate("shop", 9)
    await moving.check(9)


async def test_a_version_with_more_features_than_are_counted_is_refused(moving: Moving) -> None:
    many = model_info("shop", {f"f{i}": (2, 1) for i in range(COLUMNS_MIN + 1)})
    version = version_of(replace(many.manifest, version=8))
    said = "has 1025 features or keys, and this server has room to count 1024"
    with pytest.raises(StoreError, match=said):
        await moving.rollout.prepare("shop", version)
    assert moving.prepared == []


async def test_a_name_is_added_and_removed(moving: Moving) -> None:
    rollout = moving.rollout
    said = r"^version is 'canary': the versions of shop are 7$"
    with pytest.raises(UnknownModelError, match=said):
        await moving.check(8, "shop@canary")
    assert rollout.number("shop@canary") is None
    assert await rollout.prepare("shop@canary", moving.version(8))
    assert moving.prepared == [8]
    assert rollout.activate("shop@canary", 8)
    for name, number in (("shop", 7), ("shop@canary", 8), ("shop@7", 7), ("shop@8", 8)):
        await moving.check(number, name)
    said = r"^version is 9: the versions of shop are 7, 8 \(canary\)$"
    with pytest.raises(UnknownModelError, match=said):
        await moving.check(9, "shop@9")
    engine = weakref.ref(moving.engines.pop(8))
    assert rollout.remove("shop@canary")
    assert not rollout.remove("shop@canary")
    await until(lambda: engine() is None)
    assert "shop@canary" not in moving.pipeline.metrics.models
    with pytest.raises(UnknownModelError):
        await moving.check(8, "shop@canary")
    await moving.check(7)


async def test_a_version_that_leaves_is_told_until_it_has_answered(moving: Moving) -> None:
    models = moving.pipeline.models
    moving.engines[7].hold()
    waiting = submit_to(models, make_request(USER))
    await until(lambda: moving.engines[7].lookups)
    since = models.status(models.model("shop"))["since"]
    assert await moving.rollout.prepare("shop", moving.version(8))
    assert moving.rollout.activate("shop", 8)
    status = models.status(models.model("shop"))
    assert status["leaving"] == [7]
    assert status["since"] >= since
    moving.engines[7].release()
    assert (await waiting).model.version == 7
    await until(lambda: not models.status(models.model("shop"))["leaving"])


async def with_canary(moving: Moving) -> VersionManager:
    """The rollout, once version 8 answers for the canary."""
    assert await moving.rollout.prepare("shop@canary", moving.version(8))
    assert moving.rollout.activate("shop@canary", 8)
    return moving.rollout


def shares(moving: Moving) -> tuple[float, float]:
    """(share, shadow) of what answers for the canary."""
    models = moving.pipeline.models
    status = models.status(models.model("shop@canary"))
    return status["share"], status["shadow"]


async def test_a_share_begins_with_its_version_and_not_before(moving: Moving) -> None:
    rollout = await with_canary(moving)
    rollout.share("shop@canary", 9, 50.0, 20.0)
    assert shares(moving) == (0.0, 0.0)
    assert await rollout.prepare("shop@canary", moving.version(9))
    assert shares(moving) == (0.0, 0.0)
    assert rollout.activate("shop@canary", 9)
    assert shares(moving) == (50.0, 20.0)
    rollout.share("shop@canary", 9, 10.0, 0.0)
    assert shares(moving) == (10.0, 0.0)


async def test_a_version_that_cannot_be_loaded_gives_its_share_to_no_other(moving: Moving) -> None:
    """A bad canary has no share. Another is to have half of all requests, and cannot be loaded."""
    rollout = await with_canary(moving)
    rollout.share("shop@canary", 8, 0.0, 0.0)
    rollout.set_desired("shop@canary", 9)
    rollout.share("shop@canary", 9, 50.0, 0.0)
    rollout.reject("shop@canary", 9, "it cannot be read")
    for _ in range(50):
        await moving.check(7)
    rollout.share("shop@canary", 8, 5.0, 0.0)  # the alias is set back
    assert shares(moving) == (5.0, 0.0)


async def test_a_share_that_waits_goes_with_its_alias(moving: Moving) -> None:
    rollout = await with_canary(moving)
    rollout.share("shop@canary", 8, 30.0, 0.0)
    rollout.share("shop@canary", 9, 50.0, 0.0)
    assert shares(moving) == (30.0, 0.0)
    rollout.share("shop@canary", None, 0.0, 0.0)
    assert shares(moving) == (0.0, 0.0)
    assert await rollout.prepare("shop@canary", moving.version(9))
    assert rollout.activate("shop@canary", 9)
    assert shares(moving) == (0.0, 0.0)
