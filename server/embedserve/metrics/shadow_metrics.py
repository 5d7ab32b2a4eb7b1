"""How the vectors of a version that runs in the shadow of another differ from those, in a slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embedserve.metrics.shared_counters import Cells, WorkerCounters
from embedserve.model_info import ModelInfo

BATCH_OUTCOMES = ("compared", "skipped", "failed")
"""Skipped: while the one before it was compared still."""
PER_KEY = 5
"""Vectors, their cosine distances, squared differences, the squares of the other version's, and
pairs of zeros."""
PER_FEATURE = 2
"""Ids without a row: of this version, and of the other."""


def shadow_cells(columns_max: int) -> int:
    """Of a version with up to so many keys and features."""
    return 1 + len(BATCH_OUTCOMES) + 1 + (PER_KEY + PER_FEATURE) * columns_max


@dataclass(frozen=True)
class Differences:
    """Between the answers of two versions to the same requests, of the keys that both have.

    Attributes:
        keys: where each stands among the keys of the version in the shadow.
        sums: float64 [5, keys]: vectors; of all of them the distances 1 - cos; the squared
            differences; the squares of the other version's; pairs of zeros, which are none of the
            vectors.
        unknown_ids: int64 [F] of the version in the shadow.
        served_unknown_ids: int64 [F], of the other, by the features of the one in the shadow.
        refused: requests that the version in the shadow would have refused.
    """

    keys: NDArray[np.int64]
    sums: NDArray[np.float64]
    unknown_ids: NDArray[np.int64]
    served_unknown_ids: NDArray[np.int64]
    refused: int


class ShadowMetrics:
    """What is counted of a version while it runs in the shadow of another.

    Attributes:
        against: the number of the other version; 0 for none.
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
        """Counts from zero unless it is compared with that version already."""
        if self.against != against:
            self._against.own[0] = 0
            for cells in (self._batches, self._refused, self._per_key, self._per_feature):
                cells.own[:] = 0
            self._against.own[0] = against

    def leave(self) -> None:
        for cells in (self._batches, self._refused, self._per_key, self._per_feature):
            cells.detach()

    def count(self, outcome: str) -> None:
        """A batch that was sampled ended so."""
        self._batches.own[BATCH_OUTCOMES.index(outcome)] += 1

    def add(self, differences: Differences) -> None:
        """Those of a batch."""
        own = self._per_key.own.reshape(PER_KEY, -1)
        own[:, differences.keys] += differences.sums
        unknown = self._per_feature.own.reshape(PER_FEATURE, -1)
        features = len(differences.unknown_ids)
        unknown[0, :features] += differences.unknown_ids
        unknown[1, :features] += differences.served_unknown_ids
        self._refused.own[0] += differences.refused
        self.count("compared")

    def _with_it(self, of: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Those ``of`` the workers that compare it with the same version."""
        with_it: NDArray[np.bool_] = of & (self._against.every[:, 0] == self._against.own[0])
        return with_it

    def batches(self, of: NDArray[np.bool_]) -> dict[str, float]:
        """By outcome, of the workers ``of`` which it is True."""
        counts = self._batches.total(self._with_it(of)).tolist()
        return dict(zip(BATCH_OUTCOMES, counts, strict=True))

    def refused(self, of: NDArray[np.bool_]) -> float:
        return float(self._refused.total(self._with_it(of))[0])

    def per_key(self, of: NDArray[np.bool_]) -> Cells:
        """[5, keys], as Differences.sums."""
        total = self._per_key.total(self._with_it(of)).reshape(PER_KEY, -1)
        return total[:, : len(self._model.keys)]

    def unknown_ids(self, of: NDArray[np.bool_]) -> Cells:
        """[2, features]: of this version, and of the other."""
        total = self._per_feature.total(self._with_it(of)).reshape(PER_FEATURE, -1)
        return total[:, : len(self._model.features)]
