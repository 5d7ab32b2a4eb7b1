"""Random ids for lookups in parts."""

from __future__ import annotations

import numpy as np

from embedserve_store import Manifest

Ids = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def random_ids(
    manifest: Manifest, examples: int, random: np.random.Generator, *, is_weighted: bool = False
) -> Ids:
    """Returns (ids, lengths, weights) of a batch; about a third of the bags are empty."""
    features = len(manifest.features)
    lengths = np.maximum(0, random.integers(-2, 5, features * examples)).astype(np.int32)
    rows = np.repeat(np.repeat(manifest.rows_per_feature, examples), lengths)
    weights = random.normal(size=rows.size).astype(np.float32) if is_weighted else None
    return random.integers(0, rows), lengths, weights
