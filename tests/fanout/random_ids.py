"""Random ids for lookups in parts, and their results."""

from collections.abc import Mapping

import numpy as np

from embedserve_store import Manifest
from embedserve_store.goldens.goldens_file import Bags
from embedserve_store.goldens.reference_pooling import pool

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


def whole_results(
    manifest: Manifest,
    rows: Mapping[str, np.ndarray],
    ids: np.ndarray,
    lengths: np.ndarray,
    weights: np.ndarray | None,
) -> np.ndarray:
    """Returns the results from the whole ``rows`` of each table."""
    bags = Bags(ids, lengths.reshape(len(manifest.features), -1), weights)
    return pool(manifest, bags, ids, lambda table, numbers: rows[table.name][numbers])
