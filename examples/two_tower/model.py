"""Two towers over pooled vectors: a query tower for users, and a candidate tower for movies.

A user is represented by previously liked movies, a movie by itself and its genres. Each tower
returns vectors of length 1, and the dot product of two vectors measures how well they fit.
"""

from __future__ import annotations

import torch
from torch.nn.functional import normalize
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType

QUERY = ("history",)
CANDIDATE = ("candidate", "candidate_genres")
DIM, HIDDEN, OUT = 32, 64, 32


def make_collection(movies: int, genres: int) -> EmbeddingBagCollection:
    features = {"movie": ("history", "candidate"), "genre": ("candidate_genres",)}
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name,
                num_embeddings=rows,
                embedding_dim=DIM,
                feature_names=list(features[name]),
                pooling=PoolingType.MEAN,
            )
            for name, rows in (("movie", movies), ("genre", genres))
        ]
    )


class Towers(torch.nn.Module):
    """The two dense networks over pooled vectors: all that a service needs in addition to
    embedserve."""

    def __init__(self) -> None:
        super().__init__()
        self.query = _tower(len(QUERY))
        self.candidate = _tower(len(CANDIDATE))

    def queries(self, pooled: torch.Tensor) -> torch.Tensor:
        """Returns float32 [n, OUT] for the pooled vectors of QUERY, float32 [n, DIM]."""
        return normalize(self.query(pooled))

    def candidates(self, pooled: torch.Tensor) -> torch.Tensor:
        """Returns float32 [n, OUT] for the pooled vectors of CANDIDATE, float32 [n, 2 * DIM]."""
        return normalize(self.candidate(pooled))


def _tower(features: int) -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(features * DIM, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, OUT)
    )


class TwoTower(Towers):
    """The towers with their tables, for training."""

    def __init__(self, movies: int, genres: int) -> None:
        super().__init__()
        self.ebc = make_collection(movies, genres)

    def forward(self, ids: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (queries, candidates), one of each per example."""
        vectors = self.ebc(ids).to_dict()
        pooled = [torch.cat([vectors[name] for name in names], 1) for names in (QUERY, CANDIDATE)]
        return self.queries(pooled[0]), self.candidates(pooled[1])
