"""Divides the ids of a batch over the parts of a model, by their rows.

FBGEMM's bucketizer does the work. Its operator also numbers the rows from the first one of each
part.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import fbgemm_gpu  # noqa: F401  # registers the bucketizer
import numpy as np
import torch

from embedserve_store.format.manifest import Manifest
from embedserve_store.parts.part_manifest import part_manifest
from embedserve_store.plans.host_plan import HostPlan

BUCKETIZE = torch.ops.fbgemm.block_bucketize_sparse_features.default


class PartLookup(NamedTuple):
    """Lookup in one part, for a batch.

    Attributes:
        part: number of the part.
        ids: int64 [n] row numbers of the part, feature-major.
        lengths: int32 [features of the part * batch_size].
        weights: float32 [n], or None.
        shape: shape of the float32 values that the part returns.
    """

    part: int
    ids: np.ndarray
    lengths: np.ndarray
    weights: np.ndarray | None
    shape: tuple[int, int]


class DividedIds(NamedTuple):
    """Ids of a batch, part by part, then feature by feature.

    Attributes:
        lengths: int32 [parts, features, examples].
        ids: int64 [n] row numbers of the parts.
        weights: float32 [n], or None.
        ends: the ids of part p are those from ends[p] to ends[p + 1].
    """

    lengths: np.ndarray
    ids: np.ndarray
    weights: np.ndarray | None
    ends: list[int]

    def part_lookup(self, part: int, lengths: np.ndarray, shape: tuple[int, int]) -> PartLookup:
        """Returns the lookup of all ids of ``part``."""
        ids = slice(self.ends[part], self.ends[part + 1])
        weights = None if self.weights is None else self.weights[ids]
        return PartLookup(part, self.ids[ids], lengths, weights, shape)


class Partition:
    """The parts of one version: the rows that each holds, and its features.

    Attributes:
        manifest: manifest of the whole version.
        manifests: manifests of the parts, in order.
        has_feature: bool [parts, features], whether a part has rows of a feature.
        feature_counts: int64 [parts], the number of features of each part.
        columns: feature, by its index in the whole manifest, and table of each key of each part.
        feature_index: int64 [parts, features], index of a feature among those of a part, in
            the order of the whole manifest. 0 where the part does not have it.
    """

    def __init__(self, manifest: Manifest, hosts: HostPlan) -> None:
        self.manifest = manifest
        self.manifests = [part_manifest(manifest, hosts, part) for part in range(hosts.parts)]
        starts = [_boundaries(manifest, hosts, feature) for feature in manifest.features]
        self._starts = [torch.tensor(one, dtype=torch.int64) for one in starts]
        self._blocks = torch.ones(len(starts), dtype=torch.int64)
        self.has_feature = np.array(
            [[one in part.features for one in manifest.features] for part in self.manifests]
        )
        self.feature_counts = self.has_feature.sum(axis=1)
        index = {feature: i for i, feature in enumerate(manifest.features)}
        self.columns = [
            [(index[part.features[one.feature]], one.table.name) for one in part.columns]
            for part in self.manifests
        ]
        self.feature_index = (self.has_feature.cumsum(axis=1) - 1) * self.has_feature

    def sent_features(self, part: int) -> tuple[str, ...]:
        """Returns the features of ``part`` in the order in which their ids are sent."""
        names = zip(self.manifest.features, self.has_feature[part], strict=True)
        return tuple(name for name, is_there in names if is_there)

    def divide(
        self, ids: np.ndarray, lengths: np.ndarray, weights: np.ndarray | None = None
    ) -> DividedIds:
        """Divides a batch, as Engine.lookup takes it, over the parts."""
        new_lengths, new_ids, new_weights, _, _ = BUCKETIZE(
            torch.from_numpy(lengths),
            torch.from_numpy(ids),
            False,  # bucketize_pos
            False,  # sequence
            self._blocks,
            len(self.manifests),
            None if weights is None else torch.from_numpy(weights),
            None,  # batch_size_per_feature
            -1,  # max_B
            self._starts,
        )
        per_part = new_lengths.numpy().reshape(len(self.manifests), -1)
        return DividedIds(
            per_part.reshape(len(self.manifests), len(self._starts), -1),
            new_ids.numpy(),
            None if new_weights is None else new_weights.numpy(),
            [0, *accumulate(per_part.sum(axis=1, dtype=np.int64).tolist())],
        )


def _boundaries(manifest: Manifest, hosts: HostPlan, feature: str) -> tuple[int, ...]:
    """Returns the first row of each part, and the end of the last one, in the smallest table of
    ``feature``. Ids of a feature are rows of all its tables."""
    tables = [table for table in manifest.tables if feature in table.feature_names]
    smallest = min(tables, key=lambda table: table.num_embeddings)
    return hosts.rows[smallest.name]
