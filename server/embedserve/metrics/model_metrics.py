"""What is counted of the served versions, in a slot's cells; metrics.py makes samples of it."""

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
"""Alias: what --model has behind the "@"; empty, and so no label to Prometheus, where it has
none."""
VERSION_LABELS = (*NAME_LABELS, "version")
"""Of what is counted from zero for each version: its series go with it."""
COLUMNS_MIN = 1024
"""Features, or keys, that a later version of a model may have; memory that is not written costs
nothing."""
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
"""Places for names that are served after the start."""


def columns_most(models: Iterable[Manifest]) -> int:
    """How many features, or keys, any version may have, given the first ones."""
    return max(COLUMNS_MIN, *map(columns_of, models), 0)


def columns_of(model: Manifest) -> int:
    """Features, or keys where there are more."""
    return max(len(model.features), len(model.keys))


def place_cells(columns_max: int) -> int:
    """Of the place of one name in a slot."""
    buckets = sum(map(histogram_cells, VERSION_BUCKETS.values()))
    of_version = 1 + columns_max + lookup_cells(columns_max) + shadow_cells(columns_max) + buckets
    return 1 + len(MODEL_GAUGES) + 1 + of_version + REQUEST_CELLS


def name_labels(model: ModelInfo) -> list[str]:
    """The values of NAME_LABELS."""
    return [model.name, model.tag]


def version_labels(model: ModelInfo) -> list[str]:
    """The values of VERSION_LABELS."""
    return [model.name, model.tag, str(model.version)]


class ModelCounterTable:
    """Where the names that are served are counted: places in a slot, each with the same name for
    all workers."""

    def __init__(self, counters: WorkerCounters, count: int, columns_max: int) -> None:
        """Takes ``count`` places of ``slot``, for versions of up to ``columns_max`` features or
        keys."""
        self.columns_max = columns_max
        self._slot = counters
        self._starts = []
        self._owners = []
        for _ in range(count):
            self._starts.append(counters.taken)
            self._owners.append(counters.allocate(1))
            counters.allocate(place_cells(columns_max) - 1)

    def take(self, name: str) -> WorkerCounters:
        """The place of ``name``: the one that another worker counts it in, or this one did before
        it was restarted, or a free one.

        Raises:
            StoreError: all are taken.
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
        """Has nothing counted for ``name`` any more."""
        self._empty(lambda owner: owner == _owner(name))

    def clear_others(self, names: Iterable[str]) -> None:
        """Of what a worker before this one counted, keeps only that of ``names``."""
        kept = set(map(_owner, names))
        self._empty(lambda owner: owner not in kept)

    def _empty(self, is_gone: Callable[[float], bool]) -> None:
        """The places of this worker whose owners are."""
        for start, owners in zip(self._starts, self._owners, strict=True):
            if is_gone(owners.own[0]):
                self._slot.empty(start, start + place_cells(self.columns_max))


def _owner(name: str) -> float:
    """Of a place; 0 of none."""
    return float(crc32(name.encode()) + 1)


class VersionMetrics:
    """What the batcher of one version did; where it is replaced, the next one takes its cells.

    Attributes:
        model: the version.
        unknown_ids: int64 [F], counted by this process.
        lookups: what was read of its tables.
        shadow: how its answers differ from another version's, where it runs in its shadow.
        requests: those that it was handed, by outcome, and their times.
    """

    def __init__(self, model: ModelInfo, counters: WorkerCounters, columns_max: int) -> None:
        """Goes on where the cells of ``slot`` were left, if they are of the same version."""
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
            self._number.own[0] = 0  # of no version, while they are emptied
            counters.empty(start, counters.taken)
            self._number.own[0] = model.version
        self._unknown_before = self._unknown.own[: len(model.features)].copy()

    def leave(self) -> None:
        """What it counts from now on is not shown."""
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
        """Bool [workers]: all change together, but not in the same instant."""
        of: NDArray[np.bool_] = self._number.every[:, 0] == self.model.version
        return of

    def samples(self, name: str) -> tuple[list[tuple[str, float]], float]:
        """Of the histogram ``name``, of all workers."""
        return self._histograms[name].samples(self.of_this_version())

    def total_requests(self) -> dict[str, float]:
        """By outcome, of all workers; zeros among them."""
        return self.requests.total(self.of_this_version())

    def total_request_seconds(self) -> tuple[float, float]:
        """(of answered, of failed) requests, of all workers."""
        return self.requests.total_seconds(self.of_this_version())

    def request_seconds(self) -> tuple[list[tuple[str, float]], float]:
        """As ``samples``, of requests."""
        return self.requests.seconds.samples(self.of_this_version())

    def total_unknown_ids(self) -> list[float]:
        """[F] of all workers."""
        unknown: list[float] = self._total_unknown(self.of_this_version()).tolist()
        return unknown

    def total_asked_ids(self) -> list[float]:
        """[F] of all workers."""
        requested: list[float] = self.lookups.total_asked(self.of_this_version()).tolist()
        return requested

    def reads(self) -> AccessCounts:
        """Rows, of all workers."""
        of = self.of_this_version()
        return self.lookups.reads(of, self._total_unknown(of))

    def _total_unknown(self, of: NDArray[np.bool_]) -> Cells:
        return self._unknown.total(of)[: self.unknown_ids.size]


class ModelMetrics:
    """What is counted of what one name is answered by, version after version.

    Attributes:
        version: what the version that answers did.
        count_queue: gives the requests, and their examples, that wait in this process.
        is_damaged: its files were changed under the server.
        wanted_version: what the store says is to be served; 0 where this process does not ask it.
        load_seconds: what it took to load the version that answers, from when it was found; 0 for
            the one that was there at the start.
        found_s: perf_counter when another version was found that is to answer; None for none.
        is_refused: that version cannot be served.
        switches: how often another version took over.
        columns_max: how many features, or keys, a later version may have.
    """

    def __init__(
        self,
        model: ModelInfo,
        counters: WorkerCounters | None = None,
        columns_max: int = COLUMNS_MIN,
    ) -> None:
        """``slot`` begins with the place of the name."""
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
        """The version that answers."""
        return self.version.model

    def switch(self, model: ModelInfo, load_seconds: float) -> None:
        """Another version, ``model``, takes over, and counts from zero."""
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
        """(sum, maximum) over all workers that are ready, by MODEL_GAUGES."""
        ready = self._gauges.of_ready(self._of_this_name())
        if not len(ready):
            ready = np.zeros((1, len(MODEL_GAUGES)))
        sums, most = ready.sum(axis=0).tolist(), ready.max(axis=0).tolist()
        return dict(zip(MODEL_GAUGES, sums, strict=True)), dict(
            zip(MODEL_GAUGES, most, strict=True)
        )

    def most_switches(self) -> float:
        """Of any worker: all switch together, and one that was replaced has missed some."""
        return float(self._switches.every[self._of_this_name()].max(initial=0.0))

    def _of_this_name(self) -> NDArray[np.bool_]:
        """Bool [workers]: which of them serve it."""
        of: NDArray[np.bool_] = self._owner.every[:, 0] == self._owner.own[0]
        return of
