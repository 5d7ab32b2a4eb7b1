"""Recommends movies: pooled vectors from embedserve, towers from the checkpoint, neighbors from
faiss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import faiss
import numpy as np
import torch

from embedserve_client import GrpcEmbedClient
from examples.checkpoint import load
from examples.two_tower.model import CANDIDATE, OUT, QUERY, Towers

MODEL = "two_tower"
BATCH = 4096


class Recommender:
    """An index of movies; it holds no embedding tables."""

    def __init__(
        self, folder: Path, client: GrpcEmbedClient, movies: Mapping[int, Sequence[str]]
    ) -> None:
        """Builds the index.

        Args:
            movies: genres of each movie, by its id.
        """
        self._client = client
        self._towers = load(Towers(), folder / "checkpoint")
        self._ids = np.array(list(movies))
        self._index = faiss.IndexFlatIP(OUT)
        genres = list(movies.values())
        for start in range(0, len(movies), BATCH):
            some = slice(start, start + BATCH)
            self._index.add(self._candidates(self._ids[some], genres[some]))

    def _candidates(self, ids: np.ndarray, genres: Sequence[Sequence[str]]) -> np.ndarray:
        features = {"candidate": ids, "candidate_genres": [list(some) for some in genres]}
        pooled = self._pooled(features, CANDIDATE)
        with torch.inference_mode():
            return self._towers.candidates(pooled).numpy()

    def recommend(
        self, histories: Sequence[Sequence[int]], count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns (movies, scores) of each history, best first: int64 and float32 [n, count]."""
        pooled = self._pooled({"history": [list(bag) for bag in histories]}, QUERY)
        with torch.inference_mode():
            queries = self._towers.queries(pooled).numpy()
        fits, places = self._index.search(queries, count)
        return self._ids[places], fits

    def _pooled(self, features: dict[str, object], keys: Sequence[str]) -> torch.Tensor:
        result = self._client.embed(features, model=MODEL)  # type: ignore[arg-type]
        return torch.from_numpy(np.concatenate([result[key] for key in keys], axis=1))
