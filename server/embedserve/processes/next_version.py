"""Restores the next version of a served name while the current one serves, in a server or router.

Also describes an engine and its version to the rest of the server (``as_restored``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, cast

from embedserve.config import ServeSettings
from embedserve.deltas.delta_target import open_shared_state
from embedserve.deltas.rows_reader import RowsReader
from embedserve.deltas.shared_goldens import LiveGoldens
from embedserve.deltas.status import SharedDeltaState
from embedserve.model_info import ModelInfo
from embedserve.processes.example_request import example_features
from embedserve.processes.model_loading import check_may_switch, restore_one
from embedserve.processes.rollout.messages import Target
from embedserve.processes.rollout.version_manager import Restore, Restored
from embedserve_store import ModelVersion
from embedserve_store.memory.available_memory import available_bytes
from embedserve_store.memory.mapped_tables import populate

if TYPE_CHECKING:
    from embedserve.batching.lookup_engine import LookupEngine
    from embedserve.engine.engine import Engine
    from embedserve.fanout.router_engine import RouterEngine
    from embedserve.fanout.shards import Shards

    AnyEngine = Engine | RouterEngine
    """Engine of a version whose rows are here, or in shards."""


def as_restored(
    name: str,
    version: ModelVersion,
    engine: AnyEngine,
    deltas: SharedDeltaState | None = None,
    worker: int = 0,
    shards: Shards | None = None,
) -> Restored:
    """Returns ``engine`` with its version, and their description as served under ``name``.

    Args:
        deltas: rows that change, which lookups in this ``worker`` read from now on.
        shards: those of a router.

    Raises:
        StoreError: the rows cannot change in the plan of the engine.
    """
    if deltas is not None:
        _attach_rows_reader(cast("Engine", engine), deltas, worker)
    info = ModelInfo(
        manifest=engine.manifest,
        plan=engine.plan,
        translator=engine.translator,
        device_type=engine.device_type,
        replanned=engine.replanned,
        lookup_kind=engine.lookup_kind,
        replicas=engine.replicas,
        fingerprint=engine.fingerprint,
        part=engine.part,
        served_name=name,
        example=example_features(engine.manifest, engine.goldens().bags),
        deltas=deltas,
        shards=shards,
        local_tables=engine.local_tables,
    )
    return version, engine, info


def _attach_rows_reader(engine: Engine, shared: SharedDeltaState, worker: int) -> None:
    upload = None if engine.spare_rows is None else engine.spare_rows.upload
    engine.rows_reader = RowsReader(shared.live, worker, engine.plan, upload)
    if not engine.rounds_codes:
        engine.live_goldens = LiveGoldens(shared.goldens, engine.rows_reader, engine.manifest)


def restorer(settings: ServeSettings, engines: Iterable[LookupEngine], worker: int) -> Restore:
    """Returns the function that restores a version from its rows.

    Args:
        engines: engines that serve at the start.
        worker: number of this process among the workers.
    """
    from embedserve.engine.programs import Programs

    programs = Programs(cast("Engine", engine) for engine in engines)

    def restore(
        name: str,
        version: ModelVersion,
        target: Target,
        serving: Collection[LookupEngine],
        mark_warming: Callable[[], None],
    ) -> Restored:
        beside = [cast("Engine", one) for one in serving]
        for one in beside:
            check_may_switch(settings, one.device_type)
        populate(version, available_bytes())
        shared = None
        if target.memory:
            shared = open_shared_state(settings, version, target.memory, target.generation)
            version = shared.live.version
        engine = restore_one(settings, version, programs, beside, on_warming=mark_warming)
        restored = as_restored(name, version, engine, shared, worker)
        programs.add_warm(engine)
        return restored

    return restore


def router_restorer(shards: Shards) -> Restore:
    """Returns the function that opens a version whose rows are in ``shards``."""

    def restore(
        name: str,
        version: ModelVersion,
        target: Target,
        serving: Collection[LookupEngine],
        mark_warming: Callable[[], None],
    ) -> Restored:
        engine = shards.open(version)
        mark_warming()
        engine.warm_up()
        return as_restored(name, version, engine, shards=shards)

    return restore
