"""The engine: (ids, lengths, weights) of one batch in, pooled vectors out.

Holds the DistributedModelParallel of one model version. Arrays come in and go out as numpy;
torch begins and ends here. It trusts its input: the batch has been validated.
"""

from __future__ import annotations

import numpy as np
import torch

from embedserve.engine.script import Lookup
from embedserve.engine.sharded import main_device
from embedserve_store.errors import StoreError
from embedserve_store.load import ModelVersion
from embedserve_store.manifest import Manifest
from embedserve_store.plan import Plan

WARM_UP_CALLS = 4
"""TorchScript profiles its first two calls of a lookup, at 100 to 150 ms each."""

PARITY_TOLERANCE = 1e-5
"""Relative to the largest magnitude of a golden answer: float32 sums in another order."""


class Engine:
    """One restored model version.

    Attributes:
        manifest: what is served.
        plan: as restored, which is not the stored one where ``replanned``.
        device_type: cpu or cuda.
        is_scripted: whether lookups run as TorchScript, or eagerly.
    """

    def __init__(
        self,
        version: ModelVersion,
        plan: Plan,
        device_type: str,
        *,
        lookup: Lookup,
        weighted_lookup: Lookup,
        is_scripted: bool,
    ) -> None:
        self.manifest: Manifest = version.manifest
        self.plan = plan
        self.device_type = device_type
        self.is_scripted = is_scripted
        self.replanned = plan is not version.plan
        self._version = version
        self._lookup = lookup
        self._weighted_lookup = weighted_lookup
        self._device = main_device(device_type)
        self._means = [c for c in self.manifest.columns if c.table.pooling == "mean"]

    def lookup(
        self, ids: np.ndarray, lengths: np.ndarray, weights: np.ndarray | None = None
    ) -> np.ndarray:
        """Pools the rows of ``ids``.

        Args:
            ids: int64 [n], feature-major, each below its table's rows.
            lengths: int32 [F * B], in the order of ``manifest.features``, sum n.
            weights: float32 [n], or None to count every id once. A mean divides the weighted
                sum by the number of ids, as FBGEMM does.

        Returns:
            float32 [B, sum(manifest.length_per_key)], its columns in ``manifest.keys`` order.
        """
        with torch.inference_mode():
            on_device = torch.from_numpy(ids).to(self._device)
            lengths_on_device = torch.from_numpy(lengths).to(self._device)
            if weights is None:
                answer = self._lookup(on_device, lengths_on_device, None)
            else:
                weights_on_device = torch.from_numpy(weights).to(self._device)
                answer = self._weighted_lookup(on_device, lengths_on_device, weights_on_device)
            values: np.ndarray = answer.cpu().numpy()
        if self._means:
            self._divide_means(values, lengths)
        return values

    def _divide_means(self, values: np.ndarray, lengths: np.ndarray) -> None:
        counts = np.maximum(lengths, 1).reshape(len(self.manifest.features), -1)
        for column in self._means:
            values[:, column.start : column.end] /= counts[column.feature, :, None]

    def warm_up(self) -> None:
        """Answers the version's goldens until lookups are compiled, and compares the answers.

        Raises:
            StoreError: an answer is not the published one: the rows served are not those that
                were published.
        """
        goldens = self._version.goldens()
        bags = goldens.bags
        lengths = bags.lengths.reshape(-1)
        weights = np.ones(bags.ids.size, np.float32) if bags.weights is None else bags.weights
        for _ in range(WARM_UP_CALLS):
            plain = self.lookup(bags.ids, lengths)
            weighted = self.lookup(bags.ids, lengths, weights)
        answers = plain if bags.weights is None else weighted
        self._check_parity(answers, goldens.stored_answers)

    def _check_parity(self, answers: np.ndarray, expected: np.ndarray) -> None:
        for column in self.manifest.columns:
            block = slice(column.start, column.end)
            error = float(np.abs(answers[:, block] - expected[:, block]).max(initial=0.0))
            scale = float(np.abs(expected[:, block]).max(initial=0.0))
            if not error <= PARITY_TOLERANCE * max(scale, 1e-30):
                raise StoreError(
                    f"{self._version.path}: the vectors of {column.key!r} are not the published "
                    f"ones: off by {error:.3g} where the largest is {scale:.3g}"
                )
