"""Reconciles the versions that a process serves with the desired state.

The next version is loaded in a thread while the current one serves: opened, restored and warmed.
``Engine.warm_up`` compares it with its goldens; ``--verify`` compares only checksums. Once it is to
be activated, new requests switch to it between two event-loop iterations. The previous version
completes its queued requests, and is released together with its rows. A version that fails to load
is not served.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from threading import Thread
from time import perf_counter

from embedserve.batching.batcher import Batcher
from embedserve.batching.lookup_engine import LookupEngine
from embedserve.daemon_threads import run_in_daemon_thread
from embedserve.metrics.model_metrics import ModelMetrics, columns_of
from embedserve.model_info import ModelInfo, PendingVersion, now_iso
from embedserve.pipeline import RequestPipeline
from embedserve.processes.rollout.messages import (
    REASON_CHARACTERS_MAX,
    AliasSettings,
    Desired,
    LoadState,
    NameStatus,
    Target,
    TargetPhase,
    WorkerStatus,
)
from embedserve_store import ModelVersion, StoreError
from embedserve_store.errors import TRANSIENT
from embedserve_store.memory.mapped_tables import drop_version_pages

logger = logging.getLogger(__name__)

Restored = tuple[ModelVersion, LookupEngine, ModelInfo]
Restore = Callable[
    [str, ModelVersion, Target, Collection[LookupEngine], Callable[[], None]], Restored
]
"""Returns the warm engine of the version of a target for a name, and the version as the engine
reads it, while other engines serve. Runs in a thread; calls back when it warms up."""


@dataclass(eq=False)
class _Load:
    """A version that a process loads, or has loaded next to the current one.

    Attributes:
        pending: what /models shows of it.
        found_s: perf_counter when it was found in the store.
        is_final: False if a later attempt may load it, in the state FAILED.
    """

    target: Target
    pending: PendingVersion
    found_s: float
    state: LoadState = LoadState.LOADING
    reason: str = ""
    is_final: bool = True
    prepared: Restored | None = None

    def mark_warming(self) -> None:
        self.pending.state = "warming"

    def release(self) -> None:
        if self.prepared is not None:
            version, engine, _ = self.prepared
            references: list[object] = [engine, version]
            self.prepared = None
            del version, engine  # these are the last references
            _release_in_background(references)


async def _do_nothing() -> None:
    return None


class VersionManager:
    """The versions that a process serves and loads, by their served names.

    Attributes:
        versions, engines: current versions and their engines; replaced when other versions take
            over.
        open_version: as in the constructor; replaced by start_rollouts in a single process, which
            has opened the version already.
        report: function that reports what this process serves and loads, when that has changed. Set
            by the RolloutAgent.
        why_not_yet: function that returns why an opened version cannot be served yet, "" if it can.
            Set for routers, whose shards have to hold it first.
        start: coroutine function that starts what the engines need on the running event loop,
            before the process listens. Set for routers.
    """

    def __init__(
        self,
        pipeline: RequestPipeline,
        restored: Mapping[str, Restored],
        executor: Executor,
        threads: int,
        open_version: Callable[[str, Target], ModelVersion],
        restore: Restore,
    ) -> None:
        """Makes the versions of the start the current ones.

        Args:
            restored: these versions, by served name; ``pipeline`` has their metrics.
            executor, threads: as for Batcher.
            open_version: opens the version of a target for a name. Runs in a thread.
        """
        self.versions: dict[str, ModelVersion] = {}
        self.engines: dict[str, LookupEngine] = {}
        self.open_version = open_version
        self.report: Callable[[WorkerStatus], None] = lambda status: None
        self.why_not_yet: Callable[[ModelVersion], str] = lambda version: ""
        self.start: Callable[[], Awaitable[None]] = _do_nothing
        self._models = pipeline.models
        self._metrics = pipeline.metrics
        self._restore = restore
        self._executor, self._threads = executor, threads
        self._desired = Desired()
        self._loads: dict[str, _Load] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._one_at_a_time = asyncio.Lock()  # one thread at a time builds and traces torchrec
        self._reported: WorkerStatus | None = None
        self._changed = asyncio.Event()
        for name, one in restored.items():
            self._serve(name, *one)

    @property
    def metrics(self) -> Mapping[str, ModelMetrics]:
        """Metrics of the served names, which count the requests of all workers."""
        return self._metrics.models

    def number(self, name: str) -> int | None:
        """Returns the number of the version that serves ``name``, or None."""
        version = self.versions.get(name)
        return None if version is None else version.manifest.version

    def target(self, name: str) -> Target | None:
        """Returns the desired state of ``name``, or None."""
        return self._desired.names.get(name)

    @property
    def command_handled(self) -> int:
        """Serial number of this process's last command that the desired state accounts for."""
        return self._desired.command_handled

    async def wait_for_change(self) -> None:
        """Waits for another desired state, or for progress towards it."""
        await self._changed.wait()

    def status(self) -> WorkerStatus:
        """Returns what this process serves and loads."""
        names = {name: self._serving_status(name) for name in (*self.versions, *self._loads)}
        for name, load in self._loads.items():
            names[name] = replace(
                names[name],
                generation=load.target.generation,
                state=load.state,
                reason=load.reason,
                is_final=load.is_final,
            )
        return WorkerStatus(names)

    def _serving_status(self, name: str) -> NameStatus:
        """Returns which version of ``name`` serves, and which changed rows it reads."""
        number = self.number(name)
        if number is None:
            return NameStatus(0)
        deltas = self._models.model(name).deltas
        generation = 0 if deltas is None else deltas.live.memory.generation
        return NameStatus(number, rows_generation=generation)

    def apply(self, desired: Desired) -> None:
        """Adopts ``desired`` as the state to reconcile with."""
        self._desired = desired
        self._reconcile()

    def _reconcile(self) -> None:
        """Begins, drops and activates versions so that this process serves what is desired."""
        names = self._desired.names
        for name, target in names.items():
            self._reconcile_name(name, target)
        for name in [one for one in self._loads if one not in names]:
            self._loads.pop(name).release()
        for name in [one for one in self.versions if one not in names]:
            if len(self.versions) > 1:  # the last one serves until another has been loaded
                self._remove(name)
        for name in [one for one in self._models.pending_versions if one not in names]:
            del self._models.pending_versions[name]
        self._changed.set()
        self._changed = asyncio.Event()
        status = self.status()
        if status != self._reported:
            self._reported = status
            self.report(status)

    def _reconcile_name(self, name: str, target: Target) -> None:
        load = self._loads.get(name)
        is_due = target.version != 0 and not self._serving_status(name).is_serving(target)
        if load is not None and not (is_due and load.target.generation == target.generation):
            self._loads.pop(name).release()
            load = None
        if is_due and load is None:
            load = self._begin_load(name, target)
        if load is not None and target.phase is TargetPhase.SERVE and load.prepared is not None:
            self._activate(name, load, load.prepared)
        if target.alias_settings is not None:
            self.apply_alias_settings(name, target.alias_settings)
        self._show_pending(name, target)
        self._update_metrics(name, target)

    def apply_alias_settings(self, name: str, alias_settings: AliasSettings) -> None:
        """Applies ``alias_settings`` if their version serves. Until then the previous version keeps
        its own, permanently if the new version cannot be loaded."""
        if alias_settings.version in (0, self.number(name)):
            self._models.set_share(name, alias_settings.share)
            self._models.set_shadow(name, alias_settings.shadow)

    def _show_pending(self, name: str, target: Target) -> None:
        """Shows in /models which other version is loading, or has failed."""
        load, failure = self._loads.get(name), target.failure
        pending = self._models.pending_versions
        before = pending.pop(name, None)
        if load is not None:
            pending[name] = load.pending
        elif failure is not None:
            since = now_iso()
            if before is not None and (before.version, before.state) == (failure.version, "failed"):
                since = before.since
            pending[name] = PendingVersion(failure.version, "failed", failure.reason, since)

    def _update_metrics(self, name: str, target: Target) -> None:
        """Sets which version is desired and whether it has failed. While another version is
        desired than serves, ``found_s`` is the time when it was found."""
        metrics = self._metrics.models.get(name)
        if metrics is None:
            return
        is_behind = name in self._models.pending_versions
        is_behind = is_behind or target.store_version not in (0, self.number(name))
        if not is_behind or target.store_version not in (0, metrics.store_version):
            metrics.found_s = None
        if is_behind and metrics.found_s is None:
            metrics.found_s = perf_counter()
        metrics.store_version = target.store_version
        metrics.is_refused = name not in self._loads and target.failure is not None

    def _begin_load(self, name: str, target: Target) -> _Load:
        metrics = self._metrics.models.get(name)
        found_s = None
        if metrics is not None and metrics.store_version == target.version:
            found_s = metrics.found_s
        pending = PendingVersion(target.version, "loading", "", now_iso())
        load = self._loads[name] = _Load(target, pending, found_s or perf_counter())
        task = asyncio.create_task(self._load(name, load))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return load

    async def _load(self, name: str, load: _Load) -> None:
        try:
            async with self._one_at_a_time:
                if self._loads.get(name) is not load:
                    return
                self._metrics.check_room(name)
                load.prepared = await run_in_daemon_thread(
                    "load", partial(self._prepare, name, load)
                )
            load.state = LoadState.PREPARED
        except (StoreError, OSError, ValueError) as error:
            load.state, load.reason = LoadState.FAILED, str(error)[:REASON_CHARACTERS_MAX]
            load.is_final = not isinstance(error, TRANSIENT)
        except Exception as error:  # any error: the coordinator waits for the result
            logger.exception("%s version %d cannot be loaded", name, load.target.version)
            reason = f"{type(error).__name__}: {error}"
            load.state, load.reason = LoadState.FAILED, reason[:REASON_CHARACTERS_MAX]
        if self._loads.get(name) is load:
            self._reconcile()
        else:  # another version became desired meanwhile
            load.release()

    def _prepare(self, name: str, load: _Load) -> Restored:
        """Returns the loaded version of ``load``. Runs in a thread."""
        version = self.open_version(name, load.target)
        columns, most = columns_of(version.manifest), self._metrics.columns_max
        if columns > most:
            raise StoreError(
                f"{version.path}: has {columns} features or keys, and this server has room "
                f"to count {most} since its start: restart it"
            )
        serving = tuple(self.engines.values())
        return self._restore(name, version, load.target, serving, load.mark_warming)

    def _activate(self, name: str, load: _Load, prepared: Restored) -> None:
        """Switches to the prepared version."""
        version, engine, info = prepared
        metrics = self._metrics.models.get(name)
        if metrics is None:
            self._metrics.add(info)
        else:
            metrics.switch(info, perf_counter() - load.found_s)
        references: list[object] = [self.engines.get(name), self.versions.get(name)]
        before = self._serve(name, version, engine, info)
        del self._loads[name]
        if before is not None:
            self._retire(before, references)

    def _serve(
        self, name: str, version: ModelVersion, engine: LookupEngine, info: ModelInfo
    ) -> Batcher | None:
        """Makes a version the current one; returns the batcher of the version before."""
        limits, metrics = self._models.limits, self._metrics.models[info.served_as]
        batcher = Batcher(engine, info, limits, metrics, self._executor, self._threads)
        before = self._models.activate(name, batcher)
        self.engines[name], self.versions[name] = engine, version
        return before

    def _remove(self, name: str) -> None:
        """Stops serving ``name``."""
        before = self._models.remove(name)
        self._metrics.remove(name)
        self._retire(before, [self.engines.pop(name), self.versions.pop(name)])

    def _retire(self, batcher: Batcher, references: list[object]) -> None:
        """Drains ``batcher``; then drops ``references``, the last ones to its version."""
        draining = batcher.model.served_as, batcher.model.version
        self._models.draining.append(draining)

        def end() -> None:
            self._models.draining.remove(draining)
            _release_in_background(references)

        batcher.retire(end)


def _release_in_background(references: list[object]) -> None:
    """Drops the last ``references``, in a background thread, because unmapping is slow.
    Drops them here if no thread can be started."""
    thread = Thread(target=_release, args=(references,), name="release", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        _release(references)


def _release(references: list[object]) -> None:
    while references:
        one = references.pop()
        if isinstance(one, ModelVersion):
            drop_version_pages(one)
