"""Counters of how the vectors of a shadow version differ from those of the served version."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embedserve.metrics.families import Sample
from embedserve.metrics.shared_counters import Cells, WorkerCounters
from embedserve.model_info import ModelInfo

BATCH_OUTCOMES = ("compared", "skipped", "failed")
"""Outcomes of a batch sampled for the shadow. "skipped": the previous comparison was still
running."""
KEY_SUMS = (
    "embedserve_shadow_vectors",
    "embedserve_shadow_cosine_distance",
    "embedserve_shadow_squared_difference",
    "embedserve_shadow_squares",
    "embedserve_shadow_empty",
)
"""Families of the sums for each key, in the order of Differences.sums."""
COMPARED = ("shadow", "served")
"""The two versions that ids without a row are counted in, by feature."""


@dataclass(frozen=True)
class Differences:
    """Differences between the results of two versions for the same requests, for the keys that both
    have.

    Attributes:
        keys: index of each compared key among the keys of the shadow version.
        sums: float64 [5, keys]: number of vectors; sum of their cosine distances 1 - cos; sum of
            squared differences; sum of squares of the served version's values; number of pairs of
            zero vectors, which are not counted as vectors.
        unknown_ids: int64 [F], ids without a row in the shadow version.
        served_unknown_ids: int64 [F], ids without a row in the served version, by the features of
            the shadow version.
        refused: number of requests that the shadow version would have rejected.
    """

    keys: NDArray[np.int64]
    sums: NDArray[np.float64]
    unknown_ids: NDArray[np.int64]
    served_unknown_ids: NDArray[np.int64]
    refused: int


class ShadowMetrics:
    """Comparison counters of a version that runs as a shadow of another."""

    def __init__(self, model: ModelInfo, counters: WorkerCounters, columns_max: int) -> None:
        self._model = model
        self._columns_max = columns_max
        self._counters = counters.allocate_keyed()
        self._allocate(self.against)

    def _allocate(self, against: int) -> None:
        counters, columns_max = self._counters, self._columns_max
        counters.claim(against)
        self._batches = counters.allocate(len(BATCH_OUTCOMES))
        self._refused = counters.allocate(1)
        self._per_key = counters.allocate(len(KEY_SUMS) * columns_max)
        self._unknown_ids = counters.allocate(len(COMPARED) * columns_max)

    @property
    def against(self) -> int:
        """Number of the version that this one is compared with; 0 for none."""
        return int(self._counters.key)

    def begin(self, against: int) -> None:
        """Starts a comparison with version ``against``, from zero unless it is already compared
        with it."""
        if self.against != against:
            self._allocate(against)

    def count(self, outcome: str) -> None:
        """Counts a sampled batch; ``outcome`` is one of BATCH_OUTCOMES."""
        self._batches.own[BATCH_OUTCOMES.index(outcome)] += 1

    def add(self, differences: Differences) -> None:
        """Adds the differences of one compared batch."""
        own = self._per_key.own.reshape(len(KEY_SUMS), -1)
        own[:, differences.keys] += differences.sums
        unknown = self._unknown_ids.own.reshape(len(COMPARED), -1)
        features = len(differences.unknown_ids)
        unknown[0, :features] += differences.unknown_ids
        unknown[1, :features] += differences.served_unknown_ids
        self._refused.own[0] += differences.refused
        self.count("compared")

    def batches(self) -> dict[str, float]:
        """Returns batches by outcome, summed over the workers that compare with the same
        version."""
        return dict(zip(BATCH_OUTCOMES, self._batches.total().tolist(), strict=True))

    def per_key(self) -> Cells:
        """Returns float64 [5, keys], with the rows of Differences.sums."""
        return self._per_key.total().reshape(len(KEY_SUMS), -1)[:, : len(self._model.keys)]

    def samples(self, version_labels: Sequence[str]) -> Iterator[Sample]:
        """Yields the samples; there are none without a comparison."""
        if not self.against:
            return
        model, labels = self._model, [*version_labels, str(self.against)]
        for outcome, count in self.batches().items():
            yield "embedserve_shadow_batches", [*labels, outcome], count
        yield "embedserve_shadow_refused", labels, float(self._refused.total()[0])
        tables = [column.table.name for column in model.manifest.columns]
        for family, sums in zip(KEY_SUMS, self.per_key().tolist(), strict=True):
            for table, key, value in zip(tables, model.keys, sums, strict=True):
                yield family, [*labels, table, key], value
        unknown = self._unknown_ids.total().reshape(len(COMPARED), -1)
        for which, counts in zip(COMPARED, unknown.tolist(), strict=True):
            for feature, count in zip(model.features, counts, strict=False):
                yield "embedserve_shadow_unknown_ids", [*labels, feature, which], count
