"""Restores the next version of a served name while the current one serves, in a server or router.

Also describes an engine and its version to the rest of the server (``model_info``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


def model_info(
    engine: AnyEngine,
    name: str,
    deltas: SharedDeltaState | None = None,
    shards: Shards | None = None,
) -> ModelInfo:
    """Returns the description of a restored model, as served under ``name``. ``shards`` are those
    of a router."""
    return ModelInfo(
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


def attach_rows_reader(engine: Engine, shared: SharedDeltaState, worker: int) -> None:
    """Makes lookups of ``engine`` in this worker read the rows that change.

    Raises:
        StoreError: they cannot change in its plan.
    """
    upload = None if engine.spare_rows is None else engine.spare_rows.upload
    engine.rows_reader = RowsReader(shared.live, worker, engine.plan, upload)
    if not engine.rounds_codes:
        engine.live_goldens = LiveGoldens(shared.goldens, engine.rows_reader, engine.manifest)


def restorer(
    settings: ServeSettings,
    engines: Iterable[AnyEngine],
    worker: int,
    serving: Callable[[], Iterable[LookupEngine]],
) -> Restore:
    """Returns the function that restores a version from its rows.

    Args:
        engines: engines that serve at the start.
        worker: number of this process among the workers.
        serving: returns the engines that serve at the time.
    """
    from embedserve.engine.programs import Programs

    programs = Programs(cast("Engine", engine) for engine in engines)

    def restore(
        name: str,
        version: ModelVersion,
        target: Target,
        mark_warming: Callable[[], None],
    ) -> Restored:
        beside = [cast("Engine", one) for one in serving()]
        for one in beside:
            check_may_switch(settings, one.device_type)
        populate(version, available_bytes())
        shared = None
        if target.memory:
            shared = open_shared_state(settings, version, target.memory, target.generation)
            version = shared.live.version
        engine = restore_one(settings, version, programs, beside, on_warming=mark_warming)
        if shared is not None:
            attach_rows_reader(engine, shared, worker)
        programs.add_warm(engine)
        return version, engine, model_info(engine, name, shared)

    return restore


def router_restorer(shards: Shards) -> Restore:
    """Returns the function that opens a version whose rows are in ``shards``."""

    def restore(
        name: str,
        version: ModelVersion,
        target: Target,
        mark_warming: Callable[[], None],
    ) -> Restored:
        engine = shards.open(version)
        mark_warming()
        engine.warm_up()
        return version, engine, model_info(engine, name, shards=shards)

    return restore
