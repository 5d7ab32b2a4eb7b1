"""Measures the demo's rating model on ratings that were not used in training.

Provides plain numbers for train.py. Never changes a model. Imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from embedserve_store.demo.examples import Examples
from embedserve_store.demo.model import RatingModel, score, to_kjt


@dataclass(frozen=True)
class Errors:
    """Errors of predicted ratings, in rating points (1 to 10)."""

    rmse: float
    mae: float


def errors(predicted: NDArray[np.float32], rating: NDArray[np.float32]) -> Errors:
    wrong = predicted - rating
    return Errors(rmse=float(np.sqrt(np.mean(wrong**2))), mae=float(np.mean(np.abs(wrong))))


def predict(model: RatingModel, examples: Examples) -> NDArray[np.float32]:
    """Returns the predicted ratings, clamped to the valid range of 1 to 10."""
    with torch.no_grad():
        predicted: NDArray[np.float32] = model(to_kjt(examples)).clamp(1, 10).numpy()
    return predicted


def candidate_correlation(model: RatingModel, train: Examples, held_out: Examples) -> float:
    """Returns the Pearson correlation of held-out ratings with the candidate vectors' scores.

    Only held-out ratings of movies with a rating in ``train`` count. The vector of any other movie
    has learned its genres, but not how good it is.
    """
    trained = set(train.bags["candidate"])
    known = held_out.take(np.flatnonzero([bag in trained for bag in held_out.bags["candidate"]]))
    with torch.no_grad():
        candidates = model.ebc(to_kjt(known))["candidate"]
    return float(np.corrcoef(score(candidates).numpy(), known.rating)[0, 1])
