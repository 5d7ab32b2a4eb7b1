"""Translates the ids of a joined batch into row numbers and handles unknown ids.

The table's rule decides about an unknown id: its request is rejected, the id is skipped, or the
table's default row is looked up. Skipped and default ids are counted by request and feature. No
Python runs per id. This module never reports which id is unknown: validation.py does so once a
batch is rejected.
"""

from __future__ import annotations

import numpy as np

from embedserve.lookup_types import Batch
from embedserve.model_info import ModelInfo
from embedserve_store.ids.translate import ChangeRows


def translate(batch: Batch, model: ModelInfo, change: ChangeRows | None = None) -> bool:
    """Replaces the ids of ``batch`` by row numbers; returns False if an unknown id is rejected.

    Args:
        change: as in IdTranslator.translate.
    """
    translation = model.translator.translate(batch.ids, batch.ids_per_feature, change)
    batch.ids = translation.rows
    if translation.unknown is None:
        return True
    positions = np.flatnonzero(translation.unknown)
    bags = np.searchsorted(np.cumsum(batch.lengths, dtype=np.int64), positions, side="right")
    features, examples = np.divmod(bags, batch.batch_size)
    if model.rejects_unknown[features].any():
        return False
    batch.unknown_counts = _count(batch.sizes, features, examples, len(model.features))
    is_skipped = model.skips_unknown[features]
    if is_skipped.any():
        _skip(batch, positions[is_skipped], bags[is_skipped], model.is_pooled)
    return True


def _count(
    sizes: list[int], features: np.ndarray, examples: np.ndarray, feature_count: int
) -> np.ndarray:
    """Counts ids, given their ``features`` and ``examples``: int64 [requests, feature_count]."""
    requests = np.searchsorted(np.cumsum(sizes), examples, side="right")
    places = requests * feature_count + features
    return np.bincount(places, minlength=len(sizes) * feature_count).reshape(-1, feature_count)


def _skip(batch: Batch, positions: np.ndarray, bags: np.ndarray, is_pooled: bool) -> None:
    """Removes ids from their bags, so that a mean divides by the number of remaining ids.

    An unpooled result has a row for each id sent, so its ids stay. Their positions are recorded in
    ``batch.skipped``, and their rows are zeroed after the lookup.
    """
    if not is_pooled:
        batch.skipped = positions
        return
    batch.ids = np.delete(batch.ids, positions)
    if batch.weights is not None:
        batch.weights = np.delete(batch.weights, positions)
    # A new array: with a single request the batch shares the request's array.
    batch.lengths = batch.lengths - np.bincount(bags, minlength=batch.lengths.size).astype(np.int32)
