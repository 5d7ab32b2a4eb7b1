"""The Prometheus metrics: every name and help text but a process's is written here, once.

Values are gathered in plain lists and integers on the event loop's thread, flushed into the cells
of this worker's slot, and turned into samples only when /metrics is read: recording costs an
append, not a lock and a search. What is read is the sum over all workers.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from zlib import crc32

import numpy as np
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from embedserve.errors import EmbedServeError
from embedserve.metrics.histogram import (
    COUNT_BUCKETS,
    LOOKUP_SECONDS_BUCKETS,
    SECONDS_BUCKETS,
    Histogram,
    histogram_cells,
)
from embedserve.metrics.process import PROCESS_CELLS, ProcessMetrics
from embedserve.metrics.quiet_log import QuietLog
from embedserve.metrics.slots import Slot, lone_slot
from embedserve.types import ModelInfo

logger = logging.getLogger("embedserve.requests")

_ERRORS: list[type[EmbedServeError]] = [EmbedServeError, *EmbedServeError.__subclasses__()]
OUTCOMES = ("OK", "CANCELLED", *sorted({error.code for error in _ERRORS}))
"""Of a request: answered, its client went away, or the code of its error."""
PROTOCOLS = ("rest", "grpc")


PROTOCOL_CELLS = len(OUTCOMES) + 1 + histogram_cells(SECONDS_BUCKETS)


class ProtocolMetrics:
    """What one protocol (rest or grpc) answered, and refused.

    Attributes:
        outcomes, response_bytes: of this process alone.
        log: what is said of requests that failed.
    """

    def __init__(self, slot: Slot | None = None) -> None:
        slot = slot or lone_slot(PROTOCOL_CELLS)
        self.log = QuietLog(logger)
        self.outcomes: Counter[str] = Counter()
        self.response_bytes = 0
        self._cells = slot.take(len(OUTCOMES) + 1)
        self._before = self._cells.own.copy()
        self.seconds = Histogram(SECONDS_BUCKETS, slot)

    def answered(self, seconds: float, response_bytes: int) -> None:
        self.outcomes["OK"] += 1
        self.seconds.observe(seconds)
        self.response_bytes += response_bytes

    def refused(self, code: str, message: str, seconds: float) -> None:
        """``code`` and ``message`` are an EmbedServeError's."""
        self.outcomes[code] += 1
        self.seconds.observe(seconds)
        self.log.say(logging.INFO, f"refused with {code}", message)

    def cancelled(self, seconds: float) -> None:
        """Its client went away."""
        self.outcomes["CANCELLED"] += 1
        self.seconds.observe(seconds)

    def flush(self) -> None:
        counts = [self.outcomes[outcome] for outcome in OUTCOMES]
        self._cells.own[:] = self._before + [*counts, self.response_bytes]
        self.seconds.flush()

    def total(self) -> tuple[dict[str, float], float]:
        """(requests by outcome, where there were any; bytes of answers) of all workers."""
        *counts, response_bytes = self._cells.total().tolist()
        named = zip(OUTCOMES, counts, strict=True)
        return {outcome: count for outcome, count in named if count}, response_bytes


FEATURE_CELLS_MIN = 1024
"""Of a model, so that a later version of it may have more features; memory that is not written
costs nothing."""
MODEL_GAUGES = ("queued_requests", "queued_examples", "damaged", "wanted_version", "load_seconds")


def feature_cells(models: Iterable[tuple[str, int]]) -> dict[str, int]:
    """How many features each version of a model may have, by the model's name, of how many the
    first one has."""
    return {name: max(features, FEATURE_CELLS_MIN) for name, features in models}


def model_cells(features_max: int) -> int:
    buckets = (SECONDS_BUCKETS, COUNT_BUCKETS, COUNT_BUCKETS, LOOKUP_SECONDS_BUCKETS)
    return len(MODEL_GAUGES) + 2 + features_max + sum(map(histogram_cells, buckets))


class ModelMetrics:
    """What the batchers of one model did, version after version.

    Attributes:
        model: the version that answers.
        count_queue: gives the requests, and their examples, that wait in this process.
        is_damaged: its files were changed under the server.
        unknown_ids: int64 [F], counted by this process.
        wanted_version: what the store says is to be served; 0 where this process does not ask it.
        load_seconds: what it took to load the version that answers, from when it was found; 0 for
            the one that was there at the start.
        switches: how often another version took over.
        features_max: how many features a later version may have.
    """

    def __init__(
        self, model: ModelInfo, slot: Slot | None = None, features_max: int = FEATURE_CELLS_MIN
    ) -> None:
        slot = slot or lone_slot(model_cells(features_max))
        self.features_max = features_max
        self.count_queue: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self.is_damaged = False
        self.wanted_version = 0
        self.load_seconds = 0.0
        self._gauges = slot.take(len(MODEL_GAUGES))
        self._switches = slot.take(1)
        self.switches = int(self._switches.own[0])
        self._features = slot.take(1)
        self._unknown = slot.take(self.features_max)
        self.model = model
        self._count_features(model)
        self.wait_seconds = Histogram(SECONDS_BUCKETS, slot)
        self.batch_examples = Histogram(COUNT_BUCKETS, slot)
        self.batch_ids = Histogram(COUNT_BUCKETS, slot)
        self.lookup_seconds = Histogram(LOOKUP_SECONDS_BUCKETS, slot)

    def switch(self, model: ModelInfo, load_seconds: float) -> None:
        """Another version, ``model``, takes over. Where its features are others, their unknown ids
        are counted from zero."""
        if model.features != self.model.features:
            self._count_features(model)
        self.model = model
        self.is_damaged = False
        self.load_seconds = load_seconds
        self.switches += 1

    def _count_features(self, model: ModelInfo) -> None:
        """Goes on where the cells were left, if they are of the same features."""
        self.unknown_ids = np.zeros(len(model.features), np.int64)
        features = crc32("\0".join(model.features).encode())
        if self._features.own[0] != features:
            self._unknown.own[:] = 0
            self._features.own[0] = features
        self._unknown_before = self._unknown.own[: len(model.features)].copy()

    def flush(self) -> None:
        self._gauges.own[:] = (
            *self.count_queue(),
            self.is_damaged,
            self.wanted_version,
            self.load_seconds,
        )
        self._switches.own[:] = self.switches
        self._unknown.own[: self.unknown_ids.size] = self._unknown_before + self.unknown_ids
        for one in (self.wait_seconds, self.batch_examples, self.batch_ids, self.lookup_seconds):
            one.flush()

    def gauges(self) -> tuple[dict[str, float], dict[str, float]]:
        """(sum, maximum) over all workers that are ready, by MODEL_GAUGES."""
        ready = self._gauges.of_ready()
        if not len(ready):
            ready = np.zeros((1, len(MODEL_GAUGES)))
        sums, most = ready.sum(axis=0).tolist(), ready.max(axis=0).tolist()
        return dict(zip(MODEL_GAUGES, sums, strict=True)), dict(
            zip(MODEL_GAUGES, most, strict=True)
        )

    def most_switches(self) -> float:
        """Of any worker: all switch together, and one that was replaced has missed some."""
        return float(self._switches.every.max())

    def total_unknown_ids(self) -> list[float]:
        """[F] of all workers."""
        unknown: list[float] = self._unknown.total()[: self.unknown_ids.size].tolist()
        return unknown


def cells_per_worker(features_max: Iterable[int]) -> int:
    """Cells that the metrics of a server with such models take of a slot."""
    of_models = sum(map(model_cells, features_max))
    return PROCESS_CELLS + len(PROTOCOLS) * PROTOCOL_CELLS + of_models


class Metrics(Collector):
    """All metrics of one server, as a prometheus_client collector.

    Attributes:
        workers: the processes that the server has, ready or not.
        tables: how it holds its tables, "mapped" or "resident".
    """

    def __init__(
        self,
        models: Iterable[ModelInfo],
        slot: Slot | None = None,
        tables: str = "mapped",
        features_max: Mapping[str, int] | None = None,
    ) -> None:
        """
        Args:
            features_max: of each model, by its name; what ``slot`` was made for.
        """
        models = list(models)
        if features_max is None:
            features_max = feature_cells((model.name, len(model.features)) for model in models)
        slot = slot or lone_slot(cells_per_worker(features_max.values()))
        self._slot = slot
        self._process = ProcessMetrics(slot)
        self.workers = slot.workers
        self.tables = tables
        self.protocols = {name: ProtocolMetrics(slot) for name in PROTOCOLS}
        self.models = {
            model.name: ModelMetrics(model, slot, features_max[model.name]) for model in models
        }

    def registry(self) -> CollectorRegistry:
        """A registry of these metrics, and of the interpreter and its garbage collector.

        The collector's counts are left out where there are workers: each has its own, they cannot
        be asked for from another process, and a scrape would show those of whichever answered.
        """
        registry = CollectorRegistry()
        PlatformCollector(registry=registry)
        if self.workers == 1:
            GCCollector(registry=registry)
        registry.register(self)
        return registry

    def flush(self) -> None:
        """Writes what was recorded since the last time where other workers read it."""
        self._process.flush()
        for protocol in self.protocols.values():
            protocol.flush()
        for model in self.models.values():
            model.flush()

    def collect(self) -> Iterator[Metric]:
        self.flush()
        yield from self._process.collect()
        yield from self._collect_workers()
        yield from self._collect_protocols()
        yield from self._collect_batchers()
        yield self._collect_unknown_ids()
        yield from self._collect_models()

    def _collect_workers(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "embedserve_workers",
            "Processes of this server that are alive and ready.",
            self._slot.ready_workers(),
        )
        yield CounterMetricFamily(
            "embedserve_worker_restarts",
            "Processes of this server that ended and were replaced.",
            self._slot.restarts(),
        )
        yield CounterMetricFamily(
            "embedserve_worker_hangs",
            "Processes of this server that showed no sign of life and were ended.",
            self._slot.hangs(),
        )

    def _collect_protocols(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "embedserve_requests",
            "Requests answered, by protocol and outcome (OK, an error code, or CANCELLED).",
            labels=["protocol", "outcome"],
        )
        seconds = HistogramMetricFamily(
            "embedserve_request_seconds",
            "Seconds from a request's arrival to its encoded answer.",
            labels=["protocol"],
        )
        response_bytes = CounterMetricFamily(
            "embedserve_response_bytes", "Bytes of encoded answers.", labels=["protocol"]
        )
        for name, protocol in self.protocols.items():
            outcomes, nbytes = protocol.total()
            for outcome, count in outcomes.items():
                requests.add_metric([name, outcome], count)
            seconds.add_metric([name], *protocol.seconds.samples())
            response_bytes.add_metric([name], nbytes)
        yield requests
        yield seconds
        yield response_bytes

    def _collect_batchers(self) -> Iterator[Metric]:
        models = self.models.items()
        gauges = {name: model.gauges() for name, model in models}
        yield _gauge(
            "embedserve_queue_requests",
            "Requests waiting for a batch.",
            {name: sums["queued_requests"] for name, (sums, _) in gauges.items()},
        )
        yield _gauge(
            "embedserve_queue_examples",
            "Examples of the requests waiting for a batch.",
            {name: sums["queued_examples"] for name, (sums, _) in gauges.items()},
        )
        for gauge, help_text in (
            (
                "damaged",
                "1 where the model's rows are not what they were at the start: ready no more.",
            ),
            (
                "wanted_version",
                "The version that the store says is to be served; 0 where it is not followed.",
            ),
            (
                "load_seconds",
                "Seconds from when the served version was found until it answered; 0 for the one "
                "that was there at the start.",
            ),
        ):
            most_of_all = {name: most[gauge] for name, (_, most) in gauges.items()}
            yield _gauge(f"embedserve_model_{gauge}", help_text, most_of_all)
        switches = CounterMetricFamily(
            "embedserve_model_switches",
            "How often another version of the model took over.",
            labels=["model"],
        )
        for name, model in models:
            switches.add_metric([name], model.most_switches())
        yield switches
        for attribute, name, help_text in (
            ("wait_seconds", "embedserve_queue_wait_seconds", "Seconds a request waited."),
            ("batch_examples", "embedserve_batch_examples", "Examples of a batch."),
            ("batch_ids", "embedserve_batch_ids", "Ids of a batch."),
            ("lookup_seconds", "embedserve_lookup_seconds", "Seconds of a batch's lookup."),
        ):
            histogram = HistogramMetricFamily(name, help_text, labels=["model"])
            for model_name, model in models:
                histogram.add_metric([model_name], *getattr(model, attribute).samples())
            yield histogram

    def _collect_unknown_ids(self) -> Metric:
        family = CounterMetricFamily(
            "embedserve_unknown_ids",
            "Ids without a row that were left out or looked up as the default row, by feature.",
            labels=["model", "feature"],
        )
        for name, metrics in self.models.items():
            is_counted = ~metrics.model.refuses_unknown
            counts = zip(metrics.model.features, metrics.total_unknown_ids(), strict=True)
            for (feature, count), shown in zip(counts, is_counted, strict=True):
                if shown:
                    family.add_metric([name, feature], count)
        return family

    def _collect_models(self) -> Iterator[Metric]:
        infos = {name: metrics.model for name, metrics in self.models.items()}
        yield _gauge(
            "embedserve_model_version",
            "The served version of the model.",
            {name: info.version for name, info in infos.items()},
        )
        yield _gauge(
            "embedserve_model_replanned",
            "1 where the stored sharding plan did not fit this host and another was made.",
            {name: info.replanned for name, info in infos.items()},
        )
        table_bytes = GaugeMetricFamily(
            "embedserve_table_bytes", "Bytes of table rows on a rank.", labels=["model", "rank"]
        )
        for name, info in infos.items():
            for rank, nbytes in enumerate(info.bytes_per_rank):
                table_bytes.add_metric([name, str(rank)], nbytes)
        yield table_bytes


def _gauge(name: str, help_text: str, values: dict[str, float]) -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=["model"])
    for model, value in values.items():
        family.add_metric([model], value)
    return family
