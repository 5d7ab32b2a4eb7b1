"""Pipelines over fake engines, also for processes without a client in the test."""

from collections import Counter
from concurrent.futures import Executor

from server.fake_engine import FakeEngine

from embedserve.access.authenticator import Authenticator
from embedserve.batching.batcher import Batcher
from embedserve.config import Limits
from embedserve.metrics.metrics import Metrics
from embedserve.metrics.request_metrics import ProtocolMetrics
from embedserve.metrics.shared_counters import WorkerCounters
from embedserve.models.model_registry import ModelRegistry
from embedserve.pipeline import RequestPipeline
from embedserve.shared_memory.region_registry import RegionRegistry

IN_THREAD = Limits(inline_bytes_max=0)
"""Limits with which every batch runs in the thread, where a fake engine may be slow."""


def make_pipeline(
    *engines: FakeEngine,
    executor: Executor,
    limits: Limits | None = None,
    default_model: str | None = None,
    counters: WorkerCounters | None = None,
    authenticator: Authenticator | None = None,
    shared_memory: RegionRegistry | None = None,
) -> RequestPipeline:
    """Builds a pipeline as a server does of restored engines; the first is the default."""
    limits = limits or Limits()
    metrics = Metrics([engine.model for engine in engines], counters)
    default = engines[0].model.name if default_model is None else default_model
    models = ModelRegistry(default, limits)
    pipeline = RequestPipeline(models, metrics, authenticator, shared_memory=shared_memory)
    for engine in engines:
        name = engine.model.served_as
        batcher = Batcher(engine, engine.model, limits, metrics.models[name], executor)
        models.activate(name, batcher)
    return pipeline


def outcomes_of(metrics: ProtocolMetrics) -> Counter[str]:
    """Returns the number of requests by outcome, of the only process that counts."""
    metrics.requests.flush()
    return +Counter({name: int(count) for name, count in metrics.requests.total().items()})
