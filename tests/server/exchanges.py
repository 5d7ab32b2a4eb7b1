"""Exchanges over fake engines; for processes that need no client of theirs, too."""

from __future__ import annotations

from concurrent.futures import Executor

from server.fake_engine import FakeEngine

from embedserve.access.access import Access
from embedserve.batching.batcher import Batcher
from embedserve.config import Limits
from embedserve.exchange import Exchange
from embedserve.metrics.metrics import Metrics
from embedserve.metrics.slots import Slot
from embedserve.models.served_models import ServedModels
from embedserve.shared_memory.regions import SharedMemory

IN_THREAD = Limits(inline_bytes_max=0)
"""Every batch runs in the thread, where a fake engine may be slow."""


def make_exchange(
    *engines: FakeEngine,
    executor: Executor,
    limits: Limits | None = None,
    default_model: str | None = None,
    slot: Slot | None = None,
    access: Access | None = None,
    shared_memory: SharedMemory | None = None,
) -> Exchange:
    """What server.build_exchange makes of restored engines; the first is the default."""
    limits = limits or Limits()
    metrics = Metrics([engine.model for engine in engines], slot)
    batchers = {
        engine.model.served_as: Batcher(
            engine, engine.model, limits, metrics.models[engine.model.served_as], executor
        )
        for engine in engines
    }
    default = engines[0].model.name if default_model is None else default_model
    models = ServedModels(batchers, default, limits)
    return Exchange(models, metrics, access, shared_memory=shared_memory)
