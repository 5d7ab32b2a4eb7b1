"""Counters of how the vectors of a shadow version differ from those of the served version."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embedserve.metrics.shared_counters import Cells, WorkerCounters
from embedserve.model_info import ModelInfo

BATCH_OUTCOMES = ("compared", "skipped", "failed")
"""Outcomes of a batch sampled for the shadow. "skipped": the previous comparison was still
running."""
PER_KEY = 5
"""Sums per key: vectors, cosine distances, squared differences, squares of the served version's
values, and pairs of zero vectors."""
PER_FEATURE = 2
"""Counts per feature: ids without a row in the shadow version, and in the served version."""


def shadow_cells(columns_max: int) -> int:
    """Returns the number of cells needed for a version with up to ``columns_max`` keys and
    features."""
    return 1 + len(BATCH_OUTCOMES) + 1 + (PER_KEY + PER_FEATURE) * columns_max


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
    """Comparison counters of a version that runs as a shadow of another.

    Attributes:
        against: number of the version that it is compared with; 0 for none.
    """

    def __init__(self, model: ModelInfo, counters: WorkerCounters, columns_max: int) -> None:
        self._model = model
        self._against = counters.allocate(1)
        self._batches = counters.allocate(len(BATCH_OUTCOMES))
        self._refused = counters.allocate(1)
        self._per_key = counters.allocate(PER_KEY * columns_max)
        self._per_feature = counters.allocate(PER_FEATURE * columns_max)
        self._columns_max = columns_max

    @property
    def against(self) -> int:
        return int(self._against.own[0])

    def begin(self, against: int) -> None:
        """Starts a comparison with version ``against``, from zero unless it is already compared
        with it."""
        if self.against != against:
            self._against.own[0] = 0
            for cells in (self._batches, self._refused, self._per_key, self._per_feature):
                cells.own[:] = 0
            self._against.own[0] = against

    def leave(self) -> None:
        for cells in (self._batches, self._refused, self._per_key, self._per_feature):
            cells.detach()

    def count(self, outcome: str) -> None:
        """Counts a sampled batch; ``outcome`` is one of BATCH_OUTCOMES."""
        self._batches.own[BATCH_OUTCOMES.index(outcome)] += 1

    def add(self, differences: Differences) -> None:
        """Adds the differences of one compared batch."""
        own = self._per_key.own.reshape(PER_KEY, -1)
        own[:, differences.keys] += differences.sums
        unknown = self._per_feature.own.reshape(PER_FEATURE, -1)
        features = len(differences.unknown_ids)
        unknown[0, :features] += differences.unknown_ids
        unknown[1, :features] += differences.served_unknown_ids
        self._refused.own[0] += differences.refused
        self.count("compared")

    def _with_it(self, of: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Returns the workers in ``of`` that compare with the same version as this worker."""
        with_it: NDArray[np.bool_] = of & (self._against.every[:, 0] == self._against.own[0])
        return with_it

    def batches(self, of: NDArray[np.bool_]) -> dict[str, float]:
        """Returns batches by outcome, summed over the workers for which ``of`` is True."""
        counts = self._batches.total(self._with_it(of)).tolist()
        return dict(zip(BATCH_OUTCOMES, counts, strict=True))

    def refused(self, of: NDArray[np.bool_]) -> float:
        return float(self._refused.total(self._with_it(of))[0])

    def per_key(self, of: NDArray[np.bool_]) -> Cells:
        """Returns float64 [5, keys], with the rows of Differences.sums."""
        total = self._per_key.total(self._with_it(of)).reshape(PER_KEY, -1)
        return total[:, : len(self._model.keys)]

    def unknown_ids(self, of: NDArray[np.bool_]) -> Cells:
        """Returns float64 [2, F]: ids without a row in the shadow version, and in the served
        version."""
        total = self._per_feature.total(self._with_it(of)).reshape(PER_FEATURE, -1)
        return total[:, : len(self._model.features)]
