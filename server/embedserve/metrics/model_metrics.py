"""Metrics of the served names, in cells of shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from time import perf_counter

from embedserve.deltas.status import FULL, HELD, STALLED, SharedDeltaState
from embedserve.metrics.families import Sample
from embedserve.metrics.histogram import HistogramSamples
from embedserve.metrics.request_metrics import VersionMetrics
from embedserve.metrics.shared_counters import WorkerCounters, single_worker_counters
from embedserve.model_info import ModelInfo
from embedserve_store.format.manifest import Manifest

COLUMNS_MIN = 1024
"""Least number of features or keys reserved for later versions of a model. Memory that is never
written costs nothing."""
QUEUE_GAUGES = ("embedserve_queue_requests", "embedserve_queue_examples")
"""Gauges that are summed over the workers."""
MODEL_GAUGES: dict[str, Callable[[ModelMetrics], float]] = {
    "embedserve_model_damaged": lambda metrics: metrics.is_damaged,
    "embedserve_model_wanted_version": lambda metrics: metrics.store_version,
    "embedserve_model_load_seconds": lambda metrics: metrics.load_seconds,
    "embedserve_model_behind_seconds": lambda metrics: metrics.behind_seconds(),
    "embedserve_model_refused": lambda metrics: metrics.is_refused,
}
"""Gauges that are exported as the maximum over the workers, and this process's values of them."""
NAMES_SPARE = 16
"""Entries reserved for names that are first served after the start."""


def columns_max_of(initial: Iterable[Manifest]) -> int:
    """Returns the most features or keys that any later version may have, given the ``initial``
    versions."""
    return max(COLUMNS_MIN, *map(columns_of, initial), 0)


def columns_of(manifest: Manifest) -> int:
    """Returns the number of features or of keys, whichever is larger."""
    return max(len(manifest.features), len(manifest.keys))


def name_cells(columns_max: int) -> int:
    """Returns the number of cells of one served name, without its key. Of those for each column 9
    are allocated, and of the others about 9,400."""
    return 10 * columns_max + 10_000


class ModelMetrics:
    """Metrics of one served name, across its versions.

    Attributes:
        version: counters of the current version.
        count_queue: returns the number of requests queued in this process, and of their examples.
        is_damaged: whether the version's files were changed while it was served.
        store_version: version that the store says is to be served; 0 if no process watches the
            store, or none has polled it yet.
        load_seconds: seconds from finding the current version to serving it; 0 for the version
            served at the start.
        found_s: perf_counter when a pending version was found; None if there is none.
        is_refused: whether the pending version cannot be served.
        switches: number of switches to another version.
        columns_max: most features or keys that a later version may have.
    """

    def __init__(
        self,
        model: ModelInfo,
        counters: WorkerCounters | None = None,
        columns_max: int = COLUMNS_MIN,
    ) -> None:
        """``counters`` are those of the served name."""
        counters = counters or single_worker_counters(name_cells(columns_max))
        self.columns_max = columns_max
        self.count_queue: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self.is_damaged: bool = False
        self.store_version: int = 0
        self.load_seconds: float = 0.0
        self.found_s: float | None = None
        self.is_refused: bool = False
        self._queue_gauges = counters.allocate(len(QUEUE_GAUGES))
        self._gauges = counters.allocate(len(MODEL_GAUGES))
        self._switches = counters.allocate(1)
        self.switches = int(self._switches.own[0])
        self._version_counters = counters.allocate_keyed()
        self.version = VersionMetrics(model, self._version_counters, columns_max)

    @property
    def model(self) -> ModelInfo:
        """The current version."""
        return self.version.model

    def switch(self, model: ModelInfo, load_seconds: float) -> None:
        """Starts the counters of ``model``, the version that takes over, from zero."""
        self.version = VersionMetrics(model, self._version_counters, self.columns_max)
        self.is_damaged = False
        self.load_seconds = load_seconds
        self.switches += 1

    def behind_seconds(self) -> float:
        """Returns the seconds since a pending version was found; 0 if there is none."""
        return 0.0 if self.found_s is None else perf_counter() - self.found_s

    def flush(self) -> None:
        self._queue_gauges.own[:] = self.count_queue()
        self._gauges.own[:] = [value(self) for value in MODEL_GAUGES.values()]
        self._switches.own[:] = self.switches
        self.version.flush()

    def samples(self) -> Iterator[Sample]:
        """Yields the samples over all workers that serve this name, those of its version among
        them."""
        model = self.model
        labels = [model.name, model.tag]
        queues = self._queue_gauges.ready_rows().sum(axis=0)
        gauges = self._gauges.ready_rows().max(axis=0, initial=0.0)
        yield from zip(QUEUE_GAUGES, repeat(labels), queues.tolist(), strict=False)
        yield from zip(MODEL_GAUGES, repeat(labels), gauges.tolist(), strict=False)
        # The maximum: all workers switch together, and a replaced worker may have missed some.
        yield "embedserve_model_switches", labels, float(self._switches.rows().max(initial=0.0))
        yield "embedserve_model_version", labels, model.version
        yield "embedserve_model_replanned", labels, model.replanned
        if model.deltas is not None:
            yield from delta_samples(labels, model.deltas)
        # While workers switch, one after the other, none has the counts of all: a counter would
        # become smaller, which looks like a restart.
        if self._version_counters.is_key_common():
            yield from self.version.samples()


def delta_samples(labels: Sequence[str], shared: SharedDeltaState) -> Iterator[Sample]:
    """Yields the samples of the deltas that a model follows, from memory that the applier writes.

    There is one applier for all workers, so these values are not summed over workers. On a GPU the
    last delta is that of the worker that is scraped.

    Args:
        labels: labels of the served name.
    """
    now = shared.read()
    values: dict[str, float | HistogramSamples] = {
        "seq": now.applied.seq,
        "wanted_seq": max(now.wanted_seq, now.applied.seq),
        "lag_seconds": now.lag_s(),
        "look_age_seconds": now.look_age_s(),
        "stalled": now.state == STALLED,
        "full": now.state == FULL,
        "held": now.state == HELD,
        "rows_changed": now.rows_changed,
        "ids_changed": now.ids_changed,
        "memory_bytes": now.memory_bytes,
        "rows": now.rows,
        "bytes": now.nbytes,
        "undo": now.undos,
        "refused": now.refused,
        "apply_seconds": now.apply_seconds.samples(),
        "freshness_seconds": now.freshness_seconds.samples(),
    }
    if shared.broker_connected is not None:
        values["notify_connected"] = shared.broker_connected.is_set
    for name, value in values.items():
        yield f"embedserve_delta_{name}", labels, value
