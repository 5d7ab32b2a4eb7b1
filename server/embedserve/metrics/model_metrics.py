"""Counters of the served versions, in cells of shared memory; metrics.py turns them into
samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from embedserve.metrics.histogram import (
    COUNT_BUCKETS,
    LOOKUP_SECONDS_BUCKETS,
    SECONDS_BUCKETS,
    Histogram,
    histogram_cells,
)
from embedserve.metrics.lookup_metrics import LookupMetrics, lookup_cells
from embedserve.metrics.request_metrics import REQUEST_CELLS, RequestMetrics
from embedserve.metrics.shadow_metrics import ShadowMetrics, shadow_cells
from embedserve.metrics.shared_counters import Cells, WorkerCounters, single_worker_counters
from embedserve.model_info import ModelInfo
from embedserve_store.errors import StoreError
from embedserve_store.format.manifest import Manifest
from embedserve_store.plans.access_counts import AccessCounts

NAME_LABELS = ("model", "alias")
"""Labels of a served name. "alias" is the text behind the "@" of --model. Where there is none it is
empty, which Prometheus treats as no label."""
VERSION_LABELS = (*NAME_LABELS, "version")
"""Labels of values that start from zero for each version; their series end with the version."""
COLUMNS_MIN = 1024
"""Least number of features or keys reserved for later versions of a model. Memory that is never
written costs nothing."""
MODEL_GAUGES = (
    "queued_requests",
    "queued_examples",
    "damaged",
    "wanted_version",
    "load_seconds",
    "behind_seconds",
    "refused",
)
VERSION_BUCKETS = {
    "wait_seconds": SECONDS_BUCKETS,
    "batch_examples": COUNT_BUCKETS,
    "batch_ids": COUNT_BUCKETS,
    "lookup_seconds": LOOKUP_SECONDS_BUCKETS,
}


NAMES_SPARE = 16
"""Entries reserved for names that are first served after the start."""


def columns_most(models: Iterable[Manifest]) -> int:
    """Returns the most features or keys that any later version may have, given the initial
    ``models``."""
    return max(COLUMNS_MIN, *map(columns_of, models), 0)


def columns_of(model: Manifest) -> int:
    """Returns the number of features or of keys, whichever is larger."""
    return max(len(model.features), len(model.keys))


def place_cells(columns_max: int) -> int:
    """Returns the number of cells that the entry of one name takes in a worker's row."""
    buckets = sum(map(histogram_cells, VERSION_BUCKETS.values()))
    of_version = 1 + columns_max + lookup_cells(columns_max) + shadow_cells(columns_max) + buckets
    return 1 + len(MODEL_GAUGES) + 1 + of_version + REQUEST_CELLS


def name_labels(model: ModelInfo) -> list[str]:
    """Returns the values of NAME_LABELS for ``model``."""
    return [model.name, model.tag]


def version_labels(model: ModelInfo) -> list[str]:
    """Returns the values of VERSION_LABELS for ``model``."""
    return [model.name, model.tag, str(model.version)]


class ModelCounterTable:
    """Entries for the served names in a worker's row. An entry belongs to the same name in all
    workers."""

    def __init__(self, counters: WorkerCounters, count: int, columns_max: int) -> None:
        """Allocates ``count`` entries from ``counters``, for versions of up to ``columns_max``
        features or keys."""
        self.columns_max = columns_max
        self._slot = counters
        self._starts = []
        self._owners = []
        for _ in range(count):
            self._starts.append(counters.taken)
            self._owners.append(counters.allocate(1))
            counters.allocate(place_cells(columns_max) - 1)

    def take(self, name: str) -> WorkerCounters:
        """Returns the entry of ``name``: the entry that another worker or this worker's predecessor
        uses for it, or else a free entry.

        Raises:
            StoreError: no entry is free.
        """
        owner = _owner(name)
        taken = [(owners.every[:, 0] == owner).any() for owners in self._owners]
        free = [not owners.every.any() for owners in self._owners]
        i = next((i for found in (taken, free) for i, one in enumerate(found) if one), None)
        if i is None:
            raise StoreError(
                f"{name}: this server has room to count {len(free)} names since its start: "
                "restart it"
            )
        start = self._starts[i]
        if self._owners[i].own[0] != owner:
            self._slot.empty(start, start + place_cells(self.columns_max))
            self._owners[i].own[0] = owner
        return self._slot.rewind_to(start)

    def clear(self, name: str) -> None:
        """Zeroes and frees this worker's entry of ``name``."""
        self._empty(lambda owner: owner == _owner(name))

    def clear_others(self, names: Iterable[str]) -> None:
        """Zeroes the entries that this worker's predecessor left, except those of ``names``."""
        kept = set(map(_owner, names))
        self._empty(lambda owner: owner not in kept)

    def _empty(self, is_gone: Callable[[float], bool]) -> None:
        """Zeroes this worker's entries whose owner satisfies ``is_gone``."""
        for start, owners in zip(self._starts, self._owners, strict=True):
            if is_gone(owners.own[0]):
                self._slot.empty(start, start + place_cells(self.columns_max))


def _owner(name: str) -> float:
    """Returns the value of an entry's owner cell for ``name``; 0 marks a free entry."""
    return float(crc32(name.encode()) + 1)


class VersionMetrics:
    """Counters of one version. When the version is replaced, the next version reuses its cells.

    Attributes:
        model: the version.
        unknown_ids: int64 [F], ids without a row, counted by this process.
        lookups: access counts of the version's tables.
        shadow: comparison with another version, if this version runs as its shadow.
        requests: requests routed to this version, by outcome, and their latencies.
    """

    def __init__(self, model: ModelInfo, counters: WorkerCounters, columns_max: int) -> None:
        """Continues from the values in the cells if they belong to the same version; zeroes them
        otherwise."""
        self.model = model
        self.unknown_ids = np.zeros(len(model.features), np.int64)
        self._number = counters.allocate(1)
        start = counters.taken
        self._unknown = counters.allocate(columns_max)
        self.lookups = LookupMetrics(model, counters, columns_max)
        self.shadow = ShadowMetrics(model, counters, columns_max)
        self.requests = RequestMetrics(counters)
        self._histograms = {
            name: Histogram(buckets, counters) for name, buckets in VERSION_BUCKETS.items()
        }
        self.wait_seconds = self._histograms["wait_seconds"]
        self.batch_examples = self._histograms["batch_examples"]
        self.batch_ids = self._histograms["batch_ids"]
        self.lookup_seconds = self._histograms["lookup_seconds"]
        if self._number.own[0] != model.version:
            self._number.own[0] = 0  # the cells belong to no version while they are zeroed
            counters.empty(start, counters.taken)
            self._number.own[0] = model.version
        self._unknown_before = self._unknown.own[: len(model.features)].copy()

    def leave(self) -> None:
        """Detaches from shared memory: later counts are not exported."""
        self._unknown.detach()
        self.lookups.leave()
        self.shadow.leave()
        self.requests.leave()
        for one in self._histograms.values():
            one.leave()

    def flush(self) -> None:
        self._unknown.own[: self.unknown_ids.size] = self._unknown_before + self.unknown_ids
        self.lookups.flush(self.unknown_ids)
        self.requests.flush()
        for one in self._histograms.values():
            one.flush()

    def of_this_version(self) -> NDArray[np.bool_]:
        """Returns bool [workers]: the workers that serve this version. During a switch the workers
        change at slightly different moments."""
        of: NDArray[np.bool_] = self._number.every[:, 0] == self.model.version
        return of

    def samples(self, name: str) -> tuple[list[tuple[str, float]], float]:
        """Returns the samples of the histogram ``name``, over all workers that serve this
        version."""
        return self._histograms[name].samples(self.of_this_version())

    def total_requests(self) -> dict[str, float]:
        """Returns requests by outcome, zeros included, over all workers that serve this version."""
        return self.requests.total(self.of_this_version())

    def total_request_seconds(self) -> tuple[float, float]:
        """Returns the total seconds of (answered, failed) requests, over all workers that serve
        this version."""
        return self.requests.total_seconds(self.of_this_version())

    def request_seconds(self) -> tuple[list[tuple[str, float]], float]:
        """Returns the samples of the request latency histogram, as ``samples`` does."""
        return self.requests.seconds.samples(self.of_this_version())

    def total_unknown_ids(self) -> list[float]:
        """Returns [F], ids without a row, over all workers that serve this version."""
        unknown: list[float] = self._total_unknown(self.of_this_version()).tolist()
        return unknown

    def total_asked_ids(self) -> list[float]:
        """Returns [F], requested ids, over all workers that serve this version."""
        requested: list[float] = self.lookups.total_asked(self.of_this_version()).tolist()
        return requested

    def reads(self) -> AccessCounts:
        """Returns the rows read, over all workers that serve this version."""
        of = self.of_this_version()
        return self.lookups.reads(of, self._total_unknown(of))

    def _total_unknown(self, of: NDArray[np.bool_]) -> Cells:
        return self._unknown.total(of)[: self.unknown_ids.size]


class ModelMetrics:
    """Metrics of one served name, across its versions.

    Attributes:
        version: counters of the current version.
        count_queue: returns the number of requests queued in this process, and of their examples.
        is_damaged: whether the version's files were changed while it was served.
        wanted_version: version that the store says is to be served; 0 if this process does not
            watch the store.
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
        """``counters`` starts at the entry of the served name."""
        counters = counters or single_worker_counters(place_cells(columns_max))
        self.columns_max = columns_max
        self._owner = counters.allocate(1)
        self.count_queue: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self.is_damaged = False
        self.wanted_version = 0
        self.load_seconds = 0.0
        self.found_s: float | None = None
        self.is_refused = False
        self._gauges = counters.allocate(len(MODEL_GAUGES))
        self._switches = counters.allocate(1)
        self.switches = int(self._switches.own[0])
        self._slot = counters
        self._start = counters.taken
        self.version = VersionMetrics(model, counters, columns_max)

    @property
    def model(self) -> ModelInfo:
        """The current version."""
        return self.version.model

    def switch(self, model: ModelInfo, load_seconds: float) -> None:
        """Starts the counters of ``model``, the version that takes over, from zero."""
        self.version.leave()
        self.version = VersionMetrics(model, self._slot.rewind_to(self._start), self.columns_max)
        self.is_damaged = False
        self.load_seconds = load_seconds
        self.switches += 1

    def flush(self) -> None:
        self._gauges.own[:] = (
            *self.count_queue(),
            self.is_damaged,
            self.wanted_version,
            self.load_seconds,
            0.0 if self.found_s is None else perf_counter() - self.found_s,
            self.is_refused,
        )
        self._switches.own[:] = self.switches
        self.version.flush()

    def gauges(self) -> tuple[dict[str, float], dict[str, float]]:
        """Returns (sums, maxima) over all ready workers, by MODEL_GAUGES."""
        ready = self._gauges.of_ready(self._of_this_name())
        if not len(ready):
            ready = np.zeros((1, len(MODEL_GAUGES)))
        sums, most = ready.sum(axis=0).tolist(), ready.max(axis=0).tolist()
        return dict(zip(MODEL_GAUGES, sums, strict=True)), dict(
            zip(MODEL_GAUGES, most, strict=True)
        )

    def most_switches(self) -> float:
        """Returns the largest count of any worker: all workers switch together, and a replaced
        worker may have missed some switches."""
        return float(self._switches.every[self._of_this_name()].max(initial=0.0))

    def _of_this_name(self) -> NDArray[np.bool_]:
        """Returns bool [workers]: the workers that serve this name."""
        of: NDArray[np.bool_] = self._owner.every[:, 0] == self._owner.own[0]
        return of
