"""Reads the bundled MovieTweetings extract: ratings, movies, genres, and the row of each id.

Provides numpy arrays of row numbers for examples.py. A row is the position of an id in its
vocabulary: movies by imdb_id, users by user_id, genres by name. Never imports torch.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Ratings:
    """Ratings in order of time, as arrays of equal length."""

    user: Ids
    """Rows of the user table."""
    movie: Ids
    """Rows of the movie table."""
    rating: NDArray[np.float32]
    """Rating from 1 to 10."""
    unix_s: Ids

    def __len__(self) -> int:
        return len(self.rating)


@dataclass(frozen=True)
class MovieTweetings:
    """The extract: its ratings, every movie's genres, and the vocabularies."""

    ratings: Ratings
    movie_genres: tuple[tuple[int, ...], ...]
    """Rows of the genre table for each movie row; empty if the movie's genres are unknown."""
    movie_rows: dict[int, int]
    """Row of the movie table by imdb_id."""
    genre_rows: dict[str, int]
    user_rows: dict[int, int]
    """Row of the user table by user_id."""


def load() -> MovieTweetings:
    """Loads the extract that is installed with this package."""
    movies = {
        int(imdb_id): tuple(filter(None, genres.split("|")))
        for imdb_id, genres in _lines("movies.tsv.gz")
    }
    rated = np.array([[int(field) for field in line] for line in _lines("ratings.tsv.gz")])
    rated = rated[np.argsort(rated[:, 3], kind="stable")]
    movie_rows = {imdb_id: row for row, imdb_id in enumerate(sorted(movies))}
    user_rows = {user: row for row, user in enumerate(sorted(set(rated[:, 0].tolist())))}
    names = sorted({genre for genres in movies.values() for genre in genres})
    genre_rows = {genre: row for row, genre in enumerate(names)}
    return MovieTweetings(
        ratings=Ratings(
            user=np.array([user_rows[user] for user in rated[:, 0].tolist()]),
            movie=np.array([movie_rows[imdb_id] for imdb_id in rated[:, 1].tolist()]),
            rating=rated[:, 2].astype(np.float32),
            unix_s=rated[:, 3],
        ),
        movie_genres=tuple(
            tuple(genre_rows[genre] for genre in movies[imdb_id]) for imdb_id in movie_rows
        ),
        movie_rows=movie_rows,
        genre_rows=genre_rows,
        user_rows=user_rows,
    )


def _lines(name: str) -> Iterator[list[str]]:
    """Returns the fields of each line of a bundled file, without the header line."""
    packed = (files(__package__) / "data" / name).read_bytes()
    lines = gzip.decompress(packed).decode("utf-8").splitlines()
    return (line.split("\t") for line in lines[1:])
