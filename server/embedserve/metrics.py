"""The Prometheus metrics: every name, help text and bucket is written here, once.

Values are gathered in plain lists and numpy arrays on the event loop's thread and turned into
samples only when /metrics is read: recording costs an append, not a lock and a search.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from embedserve.types import ModelInfo

SECONDS_BUCKETS = tuple(
    round(step * scale, 6)
    for scale in (0.0001, 0.001, 0.01, 0.1, 1.0)
    for step in (1, 1.5, 2, 3, 5, 7.5)
)
"""100 microseconds to 7.5 seconds, six a decade."""

LOOKUP_SECONDS_BUCKETS = (0.00001, 0.00002, 0.00003, 0.00005, 0.000075, *SECONDS_BUCKETS)
COUNT_BUCKETS = tuple(float(2**i) for i in range(21))
PENDING_MAX = 4096


class Histogram:
    """Counts in fixed buckets; observations wait in a list until there are many or a scrape."""

    def __init__(self, buckets: Sequence[float]) -> None:
        self.buckets = tuple(buckets)
        self._bounds = np.array(buckets)
        self._counts = np.zeros(len(buckets) + 1, np.int64)
        self._sum = 0.0
        self._pending: list[float] = []

    def observe(self, value: float) -> None:
        self._pending.append(value)
        if len(self._pending) >= PENDING_MAX:
            self._flush()

    def observe_many(self, values: Iterable[float]) -> None:
        self._pending.extend(values)
        if len(self._pending) >= PENDING_MAX:
            self._flush()

    def _flush(self) -> None:
        values = np.array(self._pending)
        self._pending.clear()
        # "le" buckets: a value equal to a bound belongs to it.
        positions = np.searchsorted(self._bounds, values, side="left")
        self._counts += np.bincount(positions, minlength=self._counts.size)
        self._sum += float(values.sum())

    def samples(self) -> tuple[list[tuple[str, float]], float]:
        """([(bound, cumulative count), …, ("+Inf", count)], sum of all values)."""
        self._flush()
        cumulative = np.cumsum(self._counts).tolist()
        bounds = [str(bound) for bound in self.buckets] + ["+Inf"]
        return list(zip(bounds, cumulative, strict=True)), self._sum


class ProtocolMetrics:
    """What one protocol (rest or grpc) answered."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.seconds = Histogram(SECONDS_BUCKETS)
        self.response_bytes = 0

    def answered(self, seconds: float, response_bytes: int) -> None:
        self.outcomes["OK"] += 1
        self.seconds.observe(seconds)
        self.response_bytes += response_bytes

    def failed(self, code: str, seconds: float) -> None:
        """``code`` is an EmbedServeError's, or CANCELLED for a client that went away."""
        self.outcomes[code] += 1
        self.seconds.observe(seconds)


class ModelMetrics:
    """What one model's batcher did."""

    def __init__(self, model: ModelInfo) -> None:
        self.model = model
        self.queued_requests = 0
        self.queued_examples = 0
        self.wait_seconds = Histogram(SECONDS_BUCKETS)
        self.batch_examples = Histogram(COUNT_BUCKETS)
        self.batch_ids = Histogram(COUNT_BUCKETS)
        self.lookup_seconds = Histogram(LOOKUP_SECONDS_BUCKETS)
        self.unknown_ids = np.zeros(len(model.features), np.int64)


class Metrics(Collector):
    """All metrics of one server, as a prometheus_client collector."""

    def __init__(self, models: Iterable[ModelInfo]) -> None:
        self.protocols = {"rest": ProtocolMetrics(), "grpc": ProtocolMetrics()}
        self.models = {model.name: ModelMetrics(model) for model in models}

    def registry(self) -> CollectorRegistry:
        """A registry of these metrics, and of the process and the garbage collector."""
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        registry.register(self)
        return registry

    def collect(self) -> Iterator[Metric]:
        yield from self._collect_protocols()
        yield from self._collect_batchers()
        yield self._collect_unknown_ids()
        yield from self._collect_models()

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
            for outcome, count in protocol.outcomes.items():
                requests.add_metric([name, outcome], count)
            seconds.add_metric([name], *protocol.seconds.samples())
            response_bytes.add_metric([name], protocol.response_bytes)
        yield requests
        yield seconds
        yield response_bytes

    def _collect_batchers(self) -> Iterator[Metric]:
        models = self.models.items()
        yield _gauge(
            "embedserve_queue_requests",
            "Requests waiting for a batch.",
            {name: model.queued_requests for name, model in models},
        )
        yield _gauge(
            "embedserve_queue_examples",
            "Examples of the requests waiting for a batch.",
            {name: model.queued_examples for name, model in models},
        )
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
            counts = zip(metrics.model.features, metrics.unknown_ids.tolist(), strict=True)
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
