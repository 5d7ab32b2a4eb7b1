"""Runs the whole example: trains two towers, publishes and serves their tables, and recommends.

    python -m examples.two_tower.run [--folder FOLDER] [--http-port 8010] [--grpc-port 8011]

Compares the recommendations with those of the whole model, and exits with 1 if they differ.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from embedserve_client import GrpcEmbedClient
from embedserve_store.demo.data import MovieTweetings
from embedserve_store.demo.data import load as load_ratings
from embedserve_store.demo.examples import Examples, make_examples
from examples.checkpoint import load
from examples.commands import EMBEDSERVE, module, run, started
from examples.two_tower.model import TwoTower
from examples.two_tower.nearest import MODEL, Recommender
from examples.two_tower.train import to_kjt

USERS, COUNT = 50, 10
DIFFERENCE_MAX = 1e-5
"""Largest difference of dot products in float32 that a different order of summation explains."""


def last_histories(data: MovieTweetings) -> list[tuple[int, ...]]:
    """Returns the USERS longest histories, as rows."""
    bags = sorted(set(make_examples(data).bags["history"]), key=lambda bag: (-len(bag), bag))
    return bags[:USERS]


def by_the_whole_model(
    data: MovieTweetings, folder: Path, histories: list[tuple[int, ...]]
) -> np.ndarray:
    """Returns how well each movie fits each history according to the whole model, float32
    [histories, movies]."""
    movies = len(data.movie_rows)
    whole = load(TwoTower(movies, len(data.genre_rows)), folder / "checkpoint")
    examples = Examples(
        bags={
            "history": [*histories, *((),) * (movies - len(histories))],
            "candidate": [(movie,) for movie in range(movies)],
            "candidate_genres": list(data.movie_genres),
        },
        rating=np.zeros(movies, np.float32),
    )
    with torch.inference_mode():
        queries, candidates = whole(to_kjt(examples))
        fits: np.ndarray = (queries[: len(histories)] @ candidates.T).numpy()
    return fits


def compare(folder: Path, grpc: str) -> float:
    """Recommends movies for some histories with faiss, and compares them with the whole model.

    Returns the greatest difference of the scores: of the found movies, and of the best movies.
    """
    data = load_ratings()
    ids, names = list(data.movie_rows), list(data.genre_rows)
    movies = {
        one: [names[genre] for genre in genres]
        for one, genres in zip(ids, data.movie_genres, strict=True)
    }
    histories = last_histories(data)
    expected = by_the_whole_model(data, folder, histories)
    with GrpcEmbedClient(grpc) as client:
        recommender = Recommender(folder, client, movies)
        found, fits = recommender.recommend([[ids[row] for row in bag] for bag in histories], COUNT)
    rows = np.vectorize(data.movie_rows.__getitem__)(found)
    best = np.sort(expected, axis=1)[:, : -COUNT - 1 : -1]
    own = np.take_along_axis(expected, rows, axis=1)
    print(f"{len(movies):,} movies indexed; {COUNT} of them found for each of {len(found)} users")
    for movie, fit in zip(found[0, :3].tolist(), fits[0, :3].tolist(), strict=True):
        print(f"  https://www.imdb.com/title/tt{movie:07}  {fit:.3f}  {', '.join(movies[movie])}")
    return float(max(np.abs(own - fits).max(), np.abs(best - fits).max()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="for what is trained and published")
    parser.add_argument("--http-port", type=int, default=8010)
    parser.add_argument("--grpc-port", type=int, default=8011)
    chosen = parser.parse_args()
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="two-tower-"))
    folder.mkdir(parents=True, exist_ok=True)
    store = folder / "store"
    run(*module("examples.two_tower.train"), folder)
    published = ("publish", folder / "checkpoint", folder / "tables.yaml", store, "--model", MODEL)
    run(*EMBEDSERVE, *published, "--expected", folder / "expected.safetensors")
    ports = ("--http-port", chosen.http_port, "--grpc-port", chosen.grpc_port)
    ready = f"http://127.0.0.1:{chosen.http_port}/health/ready"
    with started(*EMBEDSERVE, "serve", store, *ports, ready=ready):
        difference = compare(folder, f"127.0.0.1:{chosen.grpc_port}")
    print(f"greatest difference from the whole model: {difference:.2g}")
    sys.exit(0 if difference <= DIFFERENCE_MAX else 1)


if __name__ == "__main__":
    main()
