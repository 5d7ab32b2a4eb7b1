"""Trains the demo's rating model on the earlier ratings and measures it on the later ratings.

Provides the trained model and its errors for build_demo. Prints nothing: a caller that shows
progress passes a callback. The same settings give the same model. Imports torchrec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from embedserve_store.demo.data import MovieTweetings
from embedserve_store.demo.examples import Examples, make_examples, split_by_time
from embedserve_store.demo.genres import GenreTask
from embedserve_store.demo.model import RatingModel, make_collection, score, to_kjt

Progress = Callable[[int, int, float], None]
"""Callback after every step with the steps done, the total steps and the step's loss."""


@dataclass(frozen=True)
class TrainingSettings:
    """Hyperparameters, tuned on the last 15 % of the training ratings, not on held-out ratings."""

    epochs: int = 12
    batch_examples: int = 256
    learning_rate: float = 0.005
    penalty: float = 3.0
    """Weight of the rated rows' squared scores relative to the sum of squared errors. It pulls the
    scores of rare ids to zero."""
    held_out_share: float = 0.15
    """Share of the ratings that is held out, the last by time."""
    seed: int = 1


@dataclass(frozen=True)
class Errors:
    """Errors of predicted ratings, in rating points (1 to 10)."""

    rmse: float
    mae: float


@dataclass(frozen=True)
class Trained:
    """A trained model and its results on the held-out ratings."""

    model: RatingModel
    train: Examples
    held_out: Examples
    errors: Errors
    """Errors on the held-out ratings."""
    constant_errors: Errors
    """Errors of always predicting the mean of the training ratings, on the same ratings."""
    candidate_correlation: float
    """Result of the function candidate_correlation."""


def train(
    data: MovieTweetings,
    settings: TrainingSettings | None = None,
    progress: Progress | None = None,
) -> Trained:
    """Trains the model on the CPU and measures it.

    Leaves torch's random state and number of threads unchanged.
    """
    settings = settings or TrainingSettings()
    earlier, held_out = split_by_time(make_examples(data), settings.held_out_share)
    mean_rating = float(earlier.rating.mean())
    with torch.random.fork_rng(devices=[]), _one_thread():
        torch.manual_seed(settings.seed)
        model = RatingModel(make_collection(data), mean_rating)
        fit(model, GenreTask(data, settings.seed), earlier, settings, progress)
    return Trained(
        model=model,
        train=earlier,
        held_out=held_out,
        errors=errors(predict(model, held_out), held_out.rating),
        constant_errors=errors(np.full_like(held_out.rating, mean_rating), held_out.rating),
        candidate_correlation=candidate_correlation(model, earlier, held_out),
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limits torch to one thread within the block.

    The steps are so short that waiting for a second thread takes longer, up to 3 times on a busy
    host.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def fit(
    model: RatingModel,
    genres: GenreTask,
    examples: Examples,
    settings: TrainingSettings,
    progress: Progress | None = None,
) -> None:
    """Trains ``model`` with Adam in ``settings.epochs`` passes.

    The loss is the mean squared error plus the genre loss and the penalty.
    """
    optimizer = torch.optim.Adam(
        [*model.parameters(), *genres.parameters()], lr=settings.learning_rate, fused=True
    )
    penalty = settings.penalty / len(examples)
    steps = settings.epochs * -(-len(examples) // settings.batch_examples)
    used = _rows_used(model, examples)
    for step, batch in enumerate(_batches(examples, settings), start=1):
        wrong = model(to_kjt(batch)) - torch.from_numpy(batch.rating)
        squares = torch.stack(
            [
                score(bag.weight[used[table]]).square().sum()
                for table, bag in model.ebc.embedding_bags.items()
            ]
        )
        loss = wrong.square().mean() + penalty * squares.sum() + genres(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if progress:
            progress(step, steps, loss.item())


def _rows_used(model: RatingModel, examples: Examples) -> dict[str, torch.Tensor]:
    """Returns, for each table, the rows that ``examples`` look up, int64, ascending."""
    return {
        config.name: torch.from_numpy(
            np.unique(np.concatenate([examples.jagged(f).values for f in config.feature_names]))
        )
        for config in model.ebc.embedding_bag_configs()
    }


def _batches(examples: Examples, settings: TrainingSettings) -> Iterator[Examples]:
    """Yields batches that hold every example once per epoch, in an order determined by the seed."""
    order = np.random.default_rng(settings.seed)
    for _ in range(settings.epochs):
        shuffled = order.permutation(len(examples))
        for start in range(0, len(shuffled), settings.batch_examples):
            yield examples.take(shuffled[start : start + settings.batch_examples])


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
