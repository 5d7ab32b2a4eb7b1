"""Turns ratings into examples: the jagged ids of each feature, and the rating to predict.

Provides the examples for train.py in time order, and splits them by time. An example's history
holds only movies that its user rated earlier, so no example sees its own rating or a later rating.
Never imports torch.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embedserve_store.demo.data import Ids, MovieTweetings

FEATURES = ("history", "candidate", "candidate_genres", "user")
"""KJT keys: the movies that the user rated before, the movie to rate, its genres, the user."""


@dataclass(frozen=True)
class Jagged:
    """Ids of one feature for many examples. Example i has the next lengths[i] of the values."""

    values: Ids
    lengths: Ids

    @classmethod
    def of(cls, bags: list[tuple[int, ...]]) -> Jagged:
        return cls(
            values=np.array([row for bag in bags for row in bag], dtype=np.int64),
            lengths=np.array([len(bag) for bag in bags], dtype=np.int64),
        )


@dataclass(frozen=True)
class Examples:
    """Bags of ids for each of FEATURES, and the rating to predict for each example."""

    bags: dict[str, list[tuple[int, ...]]]
    rating: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.rating)

    def take(self, indices: Ids) -> Examples:
        """Returns the examples at ``indices``, in that order."""
        bags = {name: [bags[i] for i in indices.tolist()] for name, bags in self.bags.items()}
        return Examples(bags, self.rating[indices])

    def jagged(self, feature: str) -> Jagged:
        return Jagged.of(self.bags[feature])


def make_examples(data: MovieTweetings) -> Examples:
    """Returns an example for each rating, in the order of the ratings."""
    ratings = data.ratings
    movies = ratings.movie.tolist()
    return Examples(
        bags={
            "history": histories(data),
            "candidate": [(movie,) for movie in movies],
            "candidate_genres": [data.movie_genres[movie] for movie in movies],
            "user": [(user,) for user in ratings.user.tolist()],
        },
        rating=ratings.rating,
    )


def histories(data: MovieTweetings) -> list[tuple[int, ...]]:
    """Returns for each rating the movies that its user rated in an earlier second, by time."""
    ratings = data.ratings
    seen: dict[int, list[tuple[int, int]]] = defaultdict(list)
    result = []
    for user, movie, unix_s in zip(
        ratings.user.tolist(), ratings.movie.tolist(), ratings.unix_s.tolist(), strict=True
    ):
        result.append(tuple(earlier for at, earlier in seen[user] if at < unix_s))
        seen[user].append((unix_s, movie))
    return result


def split_by_time(examples: Examples, held_out_share: float) -> tuple[Examples, Examples]:
    """Splits ``examples`` into the earlier examples and the last ``held_out_share`` of them."""
    first_held_out = len(examples) - round(held_out_share * len(examples))
    indices = np.arange(len(examples))
    return examples.take(indices[:first_held_out]), examples.take(indices[first_held_out:])
