"""Trains the demo's vectors on genres, as a second task besides ratings.

With few ratings, only one number of a vector is learned from them: how good a movie is, or how
generous a user is. The other numbers learn the genres of a movie, or the genres of the movies that
a user rates. Similar movies therefore get similar vectors. Provides a loss for train.py. Imports
torch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from embedserve_store.demo.data import Ids, MovieTweetings
from embedserve_store.demo.examples import Examples, Jagged
from embedserve_store.demo.model import MOVIE_DIM, USER_DIM, RatingModel

MOVIES_PER_STEP = 1024


class GenreTask(torch.nn.Module):
    """Two linear layers that map a movie's row and a user's row to each genre's log-odds.

    Neither layer sees the first number of the row, which is the score's. Both are discarded after
    training, as the ranker is.
    """

    def __init__(self, data: MovieTweetings, seed: int) -> None:
        super().__init__()
        genres = len(data.genre_rows)
        self.of_movie = torch.nn.Linear(MOVIE_DIM - 1, genres)
        self.of_user = torch.nn.Linear(USER_DIM - 1, genres)
        self._has_genre = _has_genre(data)
        self._movies = _chunks(np.flatnonzero(self._has_genre.any(dim=1).numpy()), seed)

    def forward(self, model: RatingModel, batch: Examples) -> torch.Tensor:
        """Returns the sum of two genre losses, cross entropies in nats per genre: float32 scalar.

        The first loss is for the genres of some movies. The second is for the genres of the movies
        that the users of ``batch`` rate.
        """
        movies = torch.from_numpy(next(self._movies))
        users, rated = (torch.from_numpy(batch.jagged(one).values) for one in ("user", "candidate"))
        return self._loss(self.of_movie, _rows(model, "movie")[movies], movies) + self._loss(
            self.of_user, _rows(model, "user")[users], rated
        )

    def _loss(
        self, layer: torch.nn.Linear, vectors: torch.Tensor, movies: torch.Tensor
    ) -> torch.Tensor:
        return binary_cross_entropy_with_logits(layer(vectors[:, 1:]), self._has_genre[movies])


def _rows(model: RatingModel, table: str) -> torch.Tensor:
    rows: torch.Tensor = model.ebc.embedding_bags[table].weight
    return rows


def _has_genre(data: MovieTweetings) -> torch.Tensor:
    """Returns float32 [movies, genres], with 1 for each genre of a movie."""
    has = torch.zeros(len(data.movie_genres), len(data.genre_rows))
    genres = Jagged.of([*data.movie_genres])
    has[np.repeat(np.arange(len(has)), genres.lengths), genres.values] = 1
    return has


def _chunks(movies: Ids, seed: int) -> Iterator[Ids]:
    """Yields chunks of at most MOVIES_PER_STEP movies forever, in passes over all movies.

    Yields nothing if there are no movies.
    """
    order = np.random.default_rng(seed)
    while len(movies):
        shuffled = order.permutation(movies)
        for start in range(0, len(shuffled), MOVIES_PER_STEP):
            yield shuffled[start : start + MOVIES_PER_STEP]
