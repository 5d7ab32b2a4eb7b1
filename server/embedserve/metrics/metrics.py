"""The Prometheus metrics of the server. Names and help texts of most metrics are defined here;
those of processes, TLS, lookups and shadows are in process.py, tls.py, lookup_samples.py and
shadow_samples.py.

Values are collected in plain lists and integers on the event loop's thread, flushed into this
worker's row of shared cells, and turned into samples only when /metrics is read. Recording a value
costs an append, with no lock and no look-up of a label set. Exported values are sums over all
workers.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from embedserve.errors import ServedVersion
from embedserve.metrics.caller_metrics import CallerMetrics, caller_cells
from embedserve.metrics.histogram import PENDING_MAX, SECONDS_BUCKETS, Histogram, histogram_cells
from embedserve.metrics.lookup_samples import collect_lookups
from embedserve.metrics.model_metrics import (
    NAME_LABELS,
    NAMES_SPARE,
    VERSION_LABELS,
    ModelCounterTable,
    ModelMetrics,
    columns_most,
    name_labels,
    place_cells,
    version_labels,
)
from embedserve.metrics.process import PROCESS_CELLS, ProcessMetrics
from embedserve.metrics.rate_limited_logger import Fields, RateLimitedLogger
from embedserve.metrics.request_metrics import OUTCOMES
from embedserve.metrics.shadow_samples import collect_shadows
from embedserve.metrics.shared_counters import WorkerCounters, single_worker_counters
from embedserve.metrics.tls import TLS_CELLS, TlsMetrics
from embedserve.model_info import ModelInfo

logger = logging.getLogger("embedserve.requests")


PROTOCOLS = ("rest", "grpc")
LINES_MAX = 10
"""Log lines of requests rejected with one error code, in a period of RateLimitedLogger."""


PROTOCOL_CELLS = len(OUTCOMES) + 1 + histogram_cells(SECONDS_BUCKETS)


class ProtocolMetrics:
    """Requests of one protocol (rest or grpc), answered and rejected.

    Attributes:
        protocol: name of the protocol.
        outcomes, response_bytes: counts of this process alone.
        log: rate-limited log of requests that failed.
    """

    def __init__(self, counters: WorkerCounters | None = None, protocol: str = "rest") -> None:
        counters = counters or single_worker_counters(PROTOCOL_CELLS)
        self.protocol = protocol
        self.log = RateLimitedLogger(logger, LINES_MAX)
        self.response_bytes = 0
        self._ended: Counter[str] = Counter()
        self._answered: list[float] = []  # seconds of requests not yet in _ended or the histogram
        self._cells = counters.allocate(len(OUTCOMES) + 1)
        self._before = self._cells.own.copy()
        self.seconds = Histogram(SECONDS_BUCKETS, counters)

    @property
    def outcomes(self) -> Counter[str]:
        return self._ended + Counter(OK=len(self._answered))

    def answered(self, seconds: float, response_bytes: int) -> None:
        """Counts an answered request. It is called for every request and costs an append and an
        addition."""
        answered = self._answered
        answered.append(seconds)
        self.response_bytes += response_bytes
        if len(answered) >= PENDING_MAX:
            self._count_answered()

    def _count_answered(self) -> None:
        self._ended["OK"] += len(self._answered)
        self.seconds.observe_many(self._answered)
        self._answered.clear()

    def refused(
        self, code: str, message: str, seconds: float, fields: Callable[[], Fields] | None = None
    ) -> None:
        """Counts and logs a rejected request.

        Args:
            code, message: those of the EmbedServeError.
            fields: returns further named values for the log line.
        """
        self._ended[code] += 1
        self.seconds.observe(seconds)
        self.log.log(logging.INFO, f"refused with {code}", message, fields=fields)

    def cancelled(self, seconds: float) -> None:
        """Counts a request whose client disconnected before its response."""
        self._ended["CANCELLED"] += 1
        self.seconds.observe(seconds)

    def flush(self) -> None:
        self._count_answered()
        counts = [self._ended[outcome] for outcome in OUTCOMES]
        self._cells.own[:] = self._before + [*counts, self.response_bytes]
        self.seconds.flush()

    def total(self) -> tuple[dict[str, float], float]:
        """Returns (requests by outcome, bytes of responses) of all workers; outcomes without
        requests are left out."""
        *counts, response_bytes = self._cells.total().tolist()
        named = zip(OUTCOMES, counts, strict=True)
        return {outcome: count for outcome, count in named if count}, response_bytes


def cells_per_worker(names: int, columns_max: int) -> int:
    """Returns the cells that one worker needs for a server that starts with ``names`` served
    names."""
    of_names = (names + NAMES_SPARE) * place_cells(columns_max)
    of_protocols = len(PROTOCOLS) * PROTOCOL_CELLS + caller_cells(OUTCOMES)
    return PROCESS_CELLS + TLS_CELLS + of_protocols + of_names


class Metrics(Collector):
    """All metrics of one server, as a prometheus_client collector.

    Attributes:
        workers: number of worker processes, ready or not.
        tables: how the server holds its tables, "mapped" or "resident".
        tls: metrics of TLS handshakes and of the certificate.
    """

    def __init__(
        self,
        models: Iterable[ModelInfo],
        counters: WorkerCounters | None = None,
        tables: str = "mapped",
        names: int = 0,
        columns_max: int = 0,
    ) -> None:
        """
        Args:
            names, columns_max: sizes that ``counters`` was allocated for, where they differ from
                those of ``models``.
        """
        models = list(models)
        names = names or len(models)
        columns_max = columns_max or columns_most(model.manifest for model in models)
        counters = counters or single_worker_counters(cells_per_worker(names, columns_max))
        self._slot = counters
        self._process = ProcessMetrics(counters)
        self.tls = TlsMetrics(counters)
        self.workers = counters.workers
        self.tables = tables
        self.protocols = {name: ProtocolMetrics(counters, name) for name in PROTOCOLS}
        self.callers = CallerMetrics(counters, OUTCOMES)
        self.columns_max = columns_max
        self._places = ModelCounterTable(counters, names + NAMES_SPARE, columns_max)
        self._places.clear_others(model.served_as for model in models)
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
        metrics = ModelMetrics(model, self._places.take(name), self.columns_max)
        self.models[name] = metrics
        return metrics

    def ended(self, model: ServedVersion | None, outcome: str, seconds: float) -> None:
        """Counts a request that ``model`` did not answer.

        A request is not counted if no version was chosen for it (``model`` is None), or if another
        version has taken over its name since.
        """
        metrics = None if model is None else self.models.get(model.served_as)
        if metrics is not None and model is not None and metrics.model.version == model.version:
            metrics.version.requests.ended(outcome, seconds)

    def remove(self, name: str) -> None:
        """Removes the counts of ``name`` from the exported metrics."""
        self.models.pop(name).version.leave()
        self._places.clear(name)

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
        self.tls.flush()
        for protocol in self.protocols.values():
            protocol.flush()
        self.callers.flush()
        for model in self.models.values():
            model.flush()

    def collect(self) -> Iterator[Metric]:
        self.flush()
        yield from self._process.collect()
        yield from self._collect_workers()
        yield from self._collect_protocols()
        yield self._collect_callers()
        yield from self._collect_requests()
        yield from self.tls.collect()
        yield from self._collect_batchers()
        yield self._collect_unknown_ids()
        yield from self._collect_models()
        versions = [metrics.version for metrics in self.models.values()]
        yield from collect_lookups(versions)
        yield from collect_shadows(versions)

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

    def _collect_callers(self) -> Metric:
        requests = CounterMetricFamily(
            "embedserve_caller_requests",
            "Embed requests of each caller whose token or certificate has a name, by outcome.",
            labels=["caller", "outcome"],
        )
        for name, outcome, count in self.callers.total():
            requests.add_metric([name, outcome], count)
        return requests

    def _collect_requests(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "embedserve_model_requests",
            "Requests of the version that they were handed to, by outcome (OK, an error code, or "
            "CANCELLED); those refused before, such as for an unknown model, are of none.",
            labels=[*VERSION_LABELS, "outcome"],
        )
        seconds = HistogramMetricFamily(
            "embedserve_model_request_seconds",
            "Seconds from the arrival of such a request to its encoded answer, or its error.",
            labels=VERSION_LABELS,
        )
        for metrics in self.models.values():
            labels = version_labels(metrics.model)
            for outcome, count in metrics.version.total_requests().items():
                if count or outcome == "OK":
                    requests.add_metric([*labels, outcome], count)
            seconds.add_metric(labels, *metrics.version.request_seconds())
        yield requests
        yield seconds

    def _collect_batchers(self) -> Iterator[Metric]:
        models = list(self.models.values())
        gauges = [model.gauges() for model in models]
        for gauge, name, help_text in (
            ("queued_requests", "queue_requests", "Requests waiting for a batch."),
            (
                "queued_examples",
                "queue_examples",
                "Examples of the requests waiting for a batch.",
            ),
        ):
            yield self._gauge(name, help_text, [sums[gauge] for sums, _ in gauges])
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
            (
                "behind_seconds",
                "Seconds since another version was found that is to answer, and does not yet; 0 "
                "where it does.",
            ),
            (
                "refused",
                "1 where the version that is to answer cannot be served, and the one before goes "
                "on: the log and /models say why.",
            ),
        ):
            yield self._gauge(f"model_{gauge}", help_text, [most[gauge] for _, most in gauges])
        switches = CounterMetricFamily(
            "embedserve_model_switches",
            "How often another version of the model took over.",
            labels=NAME_LABELS,
        )
        for model in models:
            switches.add_metric(name_labels(model.model), model.most_switches())
        yield switches
        for attribute, name, help_text in (
            ("wait_seconds", "embedserve_queue_wait_seconds", "Seconds a request waited."),
            ("batch_examples", "embedserve_batch_examples", "Examples of a batch."),
            ("batch_ids", "embedserve_batch_ids", "Ids of a batch."),
            ("lookup_seconds", "embedserve_lookup_seconds", "Seconds of a batch's lookup."),
        ):
            histogram = HistogramMetricFamily(name, help_text, labels=VERSION_LABELS)
            for model in models:
                histogram.add_metric(version_labels(model.model), *model.version.samples(attribute))
            yield histogram

    def _collect_unknown_ids(self) -> Metric:
        family = CounterMetricFamily(
            "embedserve_unknown_ids",
            "Ids without a row that were left out or looked up as the default row, by feature.",
            labels=[*VERSION_LABELS, "feature"],
        )
        for metrics in self.models.values():
            model = metrics.model
            is_counted = ~model.rejects_unknown
            counts = zip(model.features, metrics.version.total_unknown_ids(), strict=True)
            for (feature, count), shown in zip(counts, is_counted, strict=True):
                if shown:
                    family.add_metric([*version_labels(model), feature], count)
        return family

    def _collect_models(self) -> Iterator[Metric]:
        infos = [metrics.model for metrics in self.models.values()]
        yield self._gauge(
            "model_version", "The served version of the model.", [info.version for info in infos]
        )
        yield self._gauge(
            "model_replanned",
            "1 where the stored sharding plan did not fit this host and another was made.",
            [info.replanned for info in infos],
        )
        table_bytes = GaugeMetricFamily(
            "embedserve_table_bytes",
            "Bytes of table rows on a rank; of replicas, of each.",
            labels=[*VERSION_LABELS, "rank"],
        )
        for info in infos:
            for rank, nbytes in enumerate(info.bytes_per_rank):
                table_bytes.add_metric([*version_labels(info), str(rank)], nbytes)
        yield table_bytes

    def _gauge(self, name: str, help_text: str, values: Sequence[float]) -> Metric:
        """Returns a gauge with one value for each served name, in the order of ``models``."""
        family = GaugeMetricFamily(f"embedserve_{name}", help_text, labels=NAME_LABELS)
        for metrics, value in zip(self.models.values(), values, strict=True):
            family.add_metric(name_labels(metrics.model), value)
        return family
