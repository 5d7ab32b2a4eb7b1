"""Genres, as a second thing for the demo's vectors to learn beside ratings.

So few ratings teach one number of a vector: how good a movie is, how generous a user. The others
learn to tell a movie's genres, and a user's the genres of what they rate, so that movies that are
alike have vectors that are alike. Hands train.py a loss. Imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from embedserve_store.demo.data import Ids, MovieTweetings
from embedserve_store.demo.examples import Examples
from embedserve_store.demo.model import MOVIE_DIM, USER_DIM, RatingModel

MOVIES_PER_STEP = 1024


class GenreTask(torch.nn.Module):
    """A layer from a movie's row, and one from a user's, to each genre's log-odds; neither sees the
    first number, which is the score's. They are thrown away after training, as the ranker is.
    """

    def __init__(self, data: MovieTweetings, seed: int) -> None:
        super().__init__()
        genres = len(data.genre_rows)
        self.of_movie = torch.nn.Linear(MOVIE_DIM - 1, genres)
        self.of_user = torch.nn.Linear(USER_DIM - 1, genres)
        self._has_genre = _has_genre(data)
        self._movies = _chunks(np.flatnonzero(self._has_genre.any(dim=1).numpy()), seed)

    def forward(self, model: RatingModel, batch: Examples) -> torch.Tensor:
        """The cross entropy, in nats a genre, of some movies' genres and of those that the users of
        ``batch`` rate: float32 scalar."""
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
    """1 where a movie has a genre, float32 [movies, genres]."""
    has = torch.zeros(len(data.movie_genres), len(data.genre_rows))
    for movie, genres in enumerate(data.movie_genres):
        has[movie, list(genres)] = 1
    return has


def _chunks(movies: Ids, seed: int) -> Iterator[Ids]:
    """MOVIES_PER_STEP of the movies at a time, each as often as any other, for ever; no chunk of
    no movies."""
    order = np.random.default_rng(seed)
    while len(movies):
        shuffled = order.permutation(movies)
        for start in range(0, len(shuffled), MOVIES_PER_STEP):
            yield shuffled[start : start + MOVIES_PER_STEP]
