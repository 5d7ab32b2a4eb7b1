"""A process that follows its store with fake engines, and the store's versions."""

import asyncio
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from server.fake_engine import FakeEngine, make_request
from server.fake_models import served_of
from server.live import make_pipeline
from server.pending_requests import submit_to
from server.waiting import until

from embedserve.batching.lookup_engine import LookupEngine
from embedserve.config import ServeSettings
from embedserve.daemon_threads import is_any_running
from embedserve.processes.open_store import open_folder
from embedserve.processes.rollout.messages import LoadState, NameStatus, Target, TargetPhase
from embedserve.processes.rollout.version_manager import Restored, VersionManager
from embedserve.processes.rollout.version_resolver import VersionResolver
from embedserve.processes.single_process import start_rollouts
from embedserve_store import ModelStore, ModelVersion

PUBLISH = """
import sys, torch
from embedserve_store import TableSpec, publish
for value in (1, 2, 3):
    weight = torch.full((7, 4), float(value))
    tables = [TableSpec("t_user", 7, 4, ("user",), "sum", "float32")]
    publish({"embedding_bags.t_user.weight": weight}, sys.argv[1], model="shop", tables=tables)
"""


def add_version(store: Path, number: int) -> None:
    """Publishes a version that the fixture ``unpublished`` has, beside ``store``."""
    version = f"shop/{number}"
    (store.parent / "unpublished" / version).rename(store / version)


def before_open(monkeypatch: pytest.MonkeyPatch, change: Callable[[str], object]) -> None:
    """Calls ``change`` with the name before the watcher opens a version for it."""
    open_number = VersionResolver.open_number

    def change_and_open(self: VersionResolver, name: str, number: int) -> ModelVersion:
        change(name)
        return open_number(self, name, number)

    monkeypatch.setattr(VersionResolver, "open_number", change_and_open)


class FollowingProcess:
    """A process that serves a store with fake engines, and polls it when the test says so."""

    def __init__(
        self,
        store: Path | str,
        executor: ThreadPoolExecutor,
        model: str = "shop",
        follow: str = "latest",
    ) -> None:
        self.store = Path(store)
        self.name = model
        self.settings = ServeSettings(str(store), model=(model,), follow=follow, follow_s=3600)
        first = ModelStore(store).load("shop", model.partition("@")[2] or None)
        self.attempts: list[int] = []
        self.failures: dict[int, Exception] = {}
        self.before_restore: Callable[[], None] = lambda: None
        target = Target(0, "", 0, TargetPhase.SERVE)
        restored = self._restore(model, first, target, (), lambda: None)
        self.attempts.clear()
        assert isinstance(restored[1], FakeEngine)
        self.pipeline = make_pipeline(restored[1], executor=executor)
        self.rollout = VersionManager(
            self.pipeline,
            {model: restored},
            executor,
            1,
            lambda name, target: open_folder(target.path),
            self._restore,
        )
        self.stop = asyncio.Event()

    def _restore(
        self,
        name: str,
        version: ModelVersion,
        target: Target,
        serving: Collection[LookupEngine],
        mark_warming: Callable[[], None],
    ) -> Restored:
        manifest = version.manifest
        self.attempts.append(manifest.version)
        self.before_restore()
        if manifest.version in self.failures:
            raise self.failures[manifest.version]
        info = replace(served_of(manifest, version.translator), served_name=name)
        return version, FakeEngine(info, seed=manifest.version), info

    def next_version_status(self) -> tuple[dict[str, Any] | None, bool]:
        """Returns (the next version in /models, whether the metrics show that it has failed)."""
        models, metrics = self.pipeline.models, self.pipeline.metrics
        status = models.status(models.model(self.name))
        metrics.flush()
        values = {name: value for name, _, value in metrics.models[self.name].samples()}
        return status["next"], bool(values["embedserve_model_refused"])

    def add_version(self, number: int) -> None:
        add_version(self.store, number)

    def start(self) -> None:
        """Follows the store until ``stop`` is set."""
        self.agent = start_rollouts(self.settings, self.rollout, self.stop)

    async def poll(self) -> int:
        """Polls the store; returns the served version once all loads have ended."""
        if not hasattr(self, "agent"):
            self.start()
            await self.wait_for_loads()
        await self.agent._watcher.poll()
        await self.wait_for_loads()
        return await self.served_version()

    async def wait_for_loads(self) -> None:
        """Waits until all loads have ended, also those of the poll at the start."""
        for _ in range(2):
            for _ in range(10):  # events that the loop has yet to deliver
                await asyncio.sleep(0)
            await until(
                lambda: (
                    not self.agent._watcher._openings
                    and not is_any_running()
                    and all(one.state is LoadState.IDLE for one in self._names())
                )
            )

    def _names(self) -> Iterable[NameStatus]:
        return self.rollout.status().names.values()

    async def served_version(self) -> int:
        result = await submit_to(self.pipeline.models, make_request({"user": [[1]]}))
        return result.model.version
