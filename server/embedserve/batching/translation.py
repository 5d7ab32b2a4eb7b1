"""Turns the ids of a joined batch into row numbers, and sees to those that have none.

An unknown id refuses its request, is left out, or is looked up as its table's default row, as
the table's rule has it; it is counted for its request and feature. No Python runs for each id.
Never says which id is unknown: checks.py does, once a batch is refused.
"""

from __future__ import annotations

import numpy as np

from embedserve.lookup import Batch
from embedserve.model_info import ModelInfo


def translate(batch: Batch, model: ModelInfo) -> bool:
    """Puts row numbers in the place of ``batch``'s ids; False where an id refuses its request."""
    translation = model.translator.translate(batch.ids, batch.ids_per_feature)
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
    """int64 [requests, feature_count], of the ids of ``features`` and ``examples``."""
    requests = np.searchsorted(np.cumsum(sizes), examples, side="right")
    places = requests * feature_count + features
    return np.bincount(places, minlength=len(sizes) * feature_count).reshape(-1, feature_count)


def _skip(batch: Batch, positions: np.ndarray, bags: np.ndarray, is_pooled: bool) -> None:
    """Takes ids out of their bags, so that a mean divides by those that are left.

    An unpooled answer has a row for each id sent: these are zeroed once they are looked up.
    """
    if not is_pooled:
        batch.skipped = positions
        return
    batch.ids = np.delete(batch.ids, positions)
    if batch.weights is not None:
        batch.weights = np.delete(batch.weights, positions)
    # A new array: that of a lone request is the request's own.
    batch.lengths = batch.lengths - np.bincount(bags, minlength=batch.lengths.size).astype(np.int32)
