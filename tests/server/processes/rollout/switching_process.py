"""A process that switches between versions with fake engines."""

import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from server.fake_engine import Bags, FakeEngine, make_request, model_info
from server.live import make_pipeline
from server.pending_requests import submit_to
from server.waiting import until

from embedserve.batching.lookup_engine import LookupEngine
from embedserve.config import Limits
from embedserve.processes.rollout.messages import (
    Desired,
    Failure,
    LoadState,
    NameStatus,
    Target,
    TargetPhase,
    WorkerStatus,
)
from embedserve.processes.rollout.version_manager import Restored, VersionManager
from embedserve_store import Manifest, ModelVersion
from embedserve_store.format.tables_file import TablesFile

USER: Bags = {"user": [[1, 2]]}
IN_THREAD = Limits(inline_bytes_max=0)


def make_engine(number: int) -> FakeEngine:
    """Returns an engine of that version of "shop", with rows of its own."""
    info = model_info()
    manifest = replace(info.manifest, version=number)
    return FakeEngine(replace(info, manifest=manifest), seed=number)


EMPTY_TABLES = TablesFile(Path("tables"), np.empty(0, np.uint8), {}, {})


def make_version(manifest: Manifest, tables: TablesFile = EMPTY_TABLES) -> ModelVersion:
    """Returns a version with the attributes that a rollout uses: its manifest and its location."""
    path = Path(f"store/shop/{manifest.version}")
    return ModelVersion(path, manifest, plan=None, tables=tables, id_maps={})  # type: ignore[arg-type]


def do_nothing(number: int) -> None:
    return None


class SwitchingProcess:
    """A process that serves version 7, and others that can be restored."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self.engines = {number: make_engine(number) for number in (7, 8, 9)}
        self.pipeline = make_pipeline(self.engines[7], executor=executor, limits=IN_THREAD)
        self.restored_numbers: list[int] = []
        self.on_restore: Callable[[int], None] = do_nothing
        restored = {"shop": (self.version(7), self.engines[7], self.engines[7].model)}
        self.versions_to_open: dict[int, ModelVersion] = {}
        self.reports: list[WorkerStatus] = []
        self.rollout = VersionManager(
            self.pipeline, restored, executor, 1, self._open, self._restore
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

    async def prepare_and_wait(self, number: int, name: str = "shop") -> None:
        self.prepare(number, name)
        await until(lambda: self.state(name).state is LoadState.PREPARED)

    def activate(self, name: str = "shop") -> None:
        self.desire(name, phase=TargetPhase.SERVE)

    def fail(self, number: int, reason: str) -> None:
        failure = Failure(number, reason, True)
        self.desire(version=7, generation=0, phase=TargetPhase.SERVE, failure=failure)

    def remove(self, name: str) -> dict[str, Target]:
        """Removes a name; returns the remaining targets."""
        del self._targets[name]
        self.rollout.apply(Desired(dict(self._targets)))
        return self._targets

    def state(self, name: str = "shop") -> NameStatus:
        """Returns the last reported state."""
        return self.reports[-1].names[name]

    def _open(self, name: str, target: Target) -> ModelVersion:
        return self.versions_to_open.get(target.version) or self.version(target.version)

    def version(self, number: int) -> ModelVersion:
        return make_version(self.engines[number].model.manifest)

    def _restore(
        self,
        name: str,
        version: ModelVersion,
        target: Target,
        serving: Collection[LookupEngine],
        mark_warming: Callable[[], None],
    ) -> Restored:
        assert threading.current_thread() is not threading.main_thread()
        self.restored_numbers.append(version.manifest.version)
        self.on_restore(version.manifest.version)
        engine = self.engines[version.manifest.version]
        mark_warming()
        deltas: Any = None
        if target.memory:
            memory = SimpleNamespace(generation=target.generation)
            deltas = SimpleNamespace(live=SimpleNamespace(memory=memory))
        return version, engine, replace(engine.model, served_name=name, deltas=deltas)

    def pending_version(self) -> tuple[int, str, str] | None:
        pending = self.pipeline.models.pending_versions.get("shop")
        return None if pending is None else (pending.version, pending.state, pending.reason)

    def desired_and_failed(self) -> tuple[bool, bool]:
        """Returns whether another version is desired, and whether it has failed."""
        metrics = self.pipeline.metrics.models["shop"]
        return metrics.found_s is not None, metrics.is_refused

    async def check_served(self, number: int, name: str = "shop") -> None:
        """Checks that version ``number`` is served."""
        result = await submit_to(self.pipeline.models, make_request(USER, model=name))
        assert result.model.version == number
        assert np.array_equal(result.values, self.engines[number].expected(USER))
