"""What travels between frontends, codec, service, batcher and engine: plain values and arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(slots=True)
class LookupRequest:
    """One caller's batch of jagged ids, as a codec understood it.

    Attributes:
        model: "" for the default model.
        features: KJT keys in the caller's order, each once.
        ids: int64 [n], the bags one after the other, feature-major.
        lengths: int32 [len(features) * batch_size], feature-major.
        weights: float32 [n], or None to count every id once.
        batch_size: examples B, 1 or more.
    """

    model: str
    features: tuple[str, ...]
    ids: np.ndarray
    lengths: np.ndarray
    weights: np.ndarray | None
    batch_size: int


@dataclass(slots=True)
class LookupResult:
    """The pooled vectors of one request.

    Attributes:
        model: that answered.
        values: float32 [B, sum(model.length_per_key)], C-contiguous, a slice of its batch.
    """

    model: ModelInfo
    values: np.ndarray


@dataclass(frozen=True)
class TableInfo:
    """A served table as callers may see it."""

    name: str
    num_embeddings: int
    embedding_dim: int
    pooling: str
    dtype: str
    features: tuple[str, ...]
    sharding: str


@dataclass(frozen=True, eq=False)
class ModelInfo:
    """A served model as callers may see it, and what a request is checked against.

    Compared by identity, so that what is derived from it can be cached cheaply.

    Attributes:
        features: names that requests may use, in the order of the engine's input.
        rows_per_feature: ids of a feature are below this.
        keys, length_per_key: of every answer, as in a KeyedTensor.
        bytes_per_rank: table bytes of each rank.
        replanned: the plan is not the stored one.
    """

    name: str
    version: int
    features: tuple[str, ...]
    rows_per_feature: tuple[int, ...]
    keys: tuple[str, ...]
    length_per_key: tuple[int, ...]
    tables: tuple[TableInfo, ...]
    device_type: str
    bytes_per_rank: tuple[int, ...]
    replanned: bool
    is_scripted: bool

    @cached_property
    def row_limits(self) -> np.ndarray:
        """rows_per_feature as uint64 [F]."""
        return np.array(self.rows_per_feature, np.uint64)
