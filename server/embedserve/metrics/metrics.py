"""The Prometheus metrics of the server. families.py has the table of names and help texts.

Values are collected in plain lists and integers on the event loop's thread, flushed into this
worker's row of shared cells, and turned into samples only when /metrics is read. Recording a value
costs an append, with no lock and no lookup of a label set. Exported values are sums over all
workers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from embedserve.config import ServeSettings
from embedserve.errors import ServedVersion
from embedserve.metrics.caller_metrics import CallerMetrics
from embedserve.metrics.families import Sample, collect_families
from embedserve.metrics.model_metrics import NAMES_SPARE, ModelMetrics, columns_max_of, name_cells
from embedserve.metrics.process import ConnectionMetrics, ProcessMetrics
from embedserve.metrics.request_metrics import ProtocolMetrics
from embedserve.metrics.shard_metrics import (
    NEXT,
    SERVED,
    RoutedVersions,
    ShardMetrics,
    parts_max_of,
    shard_cells,
)
from embedserve.metrics.shared_counters import (
    CELLS,
    KeyedCounters,
    KeyedTable,
    WorkerCounters,
    key_of,
    single_worker_counters,
)
from embedserve.metrics.tls import TlsMetrics
from embedserve.model_info import ModelInfo
from embedserve_store.errors import StoreError
from embedserve_store.model_version import ModelVersion

PROTOCOLS = ("rest", "grpc")


class CounterRoom(NamedTuple):
    """Sizes that the cells of a worker are allocated for.

    Attributes:
        names: number of served names at the start; in a shard at least those of all versions that
            it may hold later.
        columns_max: most features or keys of a version.
        parts: number of parts that a router counts; 0 in other servers.
    """

    names: int
    columns_max: int
    parts: int = 0

    @classmethod
    def of(
        cls, versions: Collection[ModelInfo | ModelVersion], settings: ServeSettings
    ) -> CounterRoom:
        """Returns the room of a server that starts with ``versions``."""
        parts = parts_max_of(one.plan for one in versions) if settings.shards else 0
        each = settings.versions_held if settings.part else 1  # of a model, each by its own name
        names = max(len(versions), each * len({one.manifest.model for one in versions}))
        return cls(names, columns_max_of(one.manifest for one in versions), parts)

    @property
    def cells(self) -> int:
        """Number of cells that one worker needs."""
        names = self.names + NAMES_SPARE
        return CELLS + shard_cells(self.parts, names) + names * (1 + name_cells(self.columns_max))


class Metrics(Collector):
    """All metrics of one server, as a prometheus_client collector.

    Attributes:
        workers: number of worker processes, ready or not.
        tables: how the server holds its tables, "mapped" or "resident".
        connections: metrics of clients' connections.
        tls: metrics of TLS handshakes and of the certificate.
        shards: metrics of a router's calls to the parts.
    """

    def __init__(
        self,
        models: Iterable[ModelInfo],
        counters: WorkerCounters | None = None,
        tables: str = "mapped",
        room: CounterRoom | None = None,
    ) -> None:
        """``room`` is what ``counters`` were allocated for, if that is not what ``models`` need."""
        models = list(models)
        room = room or CounterRoom(len(models), columns_max_of(one.manifest for one in models))
        counters = counters or single_worker_counters(room.cells)
        names, self.columns_max = room.names + NAMES_SPARE, room.columns_max
        self._counters = counters
        self._process = ProcessMetrics(counters)
        self.connections = ConnectionMetrics(counters)
        self.tls = TlsMetrics(counters)
        self.workers = counters.workers
        self.tables = tables
        self.protocols = {name: ProtocolMetrics(counters, name) for name in PROTOCOLS}
        self.callers = CallerMetrics(counters)
        self.shards = ShardMetrics(counters, room.parts, names)
        self._names = KeyedTable(counters, names, name_cells(self.columns_max))
        self._names.keep(model.served_as for model in models)
        self.models: dict[str, ModelMetrics] = {}
        for model in models:
            self.add(model)

    def add(self, model: ModelInfo) -> ModelMetrics:
        """Returns the counters of the name that ``model`` is served by, and exports them from now
        on.

        Raises:
            StoreError: there is no room for another name.
        """
        name = model.served_as
        counters = self._entry(name)
        counters.claim(key_of(name))
        metrics = self.models[name] = ModelMetrics(model, counters, self.columns_max)
        return metrics

    def check_room(self, name: str) -> None:
        """Raises StoreError if there is no room for the counters of ``name``."""
        if name not in self.models:
            self._entry(name)

    def _entry(self, name: str) -> KeyedCounters:
        i = self._names.find(name)
        if i is None:
            count = len(self._names.entries)
            raise StoreError(
                f"{name}: this server has room to count {count} names since its start: restart it"
            )
        return self._names.entries[i]

    def count_outcome(self, model: ServedVersion | None, outcome: str, seconds: float) -> None:
        """Counts a request that ``model`` did not answer.

        A request is not counted if no version was chosen for it (``model`` is None), or if another
        version has taken over its name since.
        """
        metrics = None if model is None else self.models.get(model.served_as)
        if metrics is not None and model is not None and metrics.model.version == model.version:
            metrics.version.requests.count_outcome(outcome, seconds)

    def remove(self, name: str) -> None:
        """Removes the counts of ``name`` from the exported metrics."""
        del self.models[name]
        self._names.keep(self.models)

    def registry(self) -> CollectorRegistry:
        """Returns a registry of these metrics, the platform's and the garbage collector's.

        The garbage collector's metrics are left out with several workers. They exist once per
        process, cannot be read from another process, and a scrape would show those of an arbitrary
        worker.
        """
        registry = CollectorRegistry()
        PlatformCollector(registry=registry)
        if self.workers == 1:
            GCCollector(registry=registry)
        registry.register(self)
        return registry

    def flush(self) -> None:
        """Writes the values recorded since the last flush to the cells that other workers read."""
        self._process.flush()
        self.connections.flush()
        self.tls.flush()
        for protocol in self.protocols.values():
            protocol.flush()
        self.callers.flush()
        self.shards.flush(self._routed_versions())
        for model in self.models.values():
            model.flush()

    def _routed_versions(self) -> RoutedVersions:
        """Returns the versions whose replicas a router counts: those that serve names, and those
        that the store names."""
        served = {(one.model.name, one.model.version): SERVED for one in self.models.values()}
        named = {(one.model.name, one.store_version): NEXT for one in self.models.values()}
        return named | served

    def collect(self) -> Iterator[Metric]:
        self.flush()
        return collect_families(self.samples())

    def samples(self) -> Iterator[Sample]:
        """Yields all samples over all workers, in the order of their classes."""
        counters = self._counters
        # The process that serves probes while the models load is no worker.
        yield "embedserve_workers", (), counters.ready_workers() if self.models else 0
        yield "embedserve_worker_restarts", (), counters.restarts()
        yield "embedserve_worker_hangs", (), counters.hangs()
        yield from self._process.samples()
        yield from self.connections.samples()
        yield from self.tls.samples()
        yield from self.callers.samples()
        for protocol in self.protocols.values():
            yield from protocol.samples()
        yield from self.shards.samples(self._routed_versions())
        for model in self.models.values():
            yield from model.samples()
