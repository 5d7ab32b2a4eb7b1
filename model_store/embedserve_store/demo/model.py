"""The demo's rating model: an EmbeddingBagCollection and a ranker on its pooled vectors.

Hands train.py a module from KeyedJaggedTensor to predicted ratings. Only its tables are
published; the ranker stands for the one that users run in another service. Imports torchrec.
"""

from __future__ import annotations

import math

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType

from embedserve_store.demo.data import MovieTweetings
from embedserve_store.demo.examples import FEATURES, Examples

MOVIE_DIM = 32
GENRE_DIM = 16
USER_DIM = 64
INITIAL_BOUND = 0.02
"""Rows begin uniform in +-this, small against trained rows: one never trained says little."""

WEIGHTS = {"history": 0.3, "candidate": 1.0, "candidate_genres": 1.0, "user": 1.0}
"""Of each feature's score: a history says less about a rating than the movie itself."""
MATCH = 0.5


def make_collection(data: MovieTweetings) -> EmbeddingBagCollection:
    """The demo's tables, one row for each id of the vocabularies, on the CPU.

    movie and genre pool with the mean, so that a long history or list of genres weighs no
    more than a short one. user has one id an example, for which the sum is the row itself.
    """
    return EmbeddingBagCollection(
        tables=[
            _table("movie", len(data.movie_rows), MOVIE_DIM, PoolingType.MEAN, FEATURES[:2]),
            _table("genre", len(data.genre_rows), GENRE_DIM, PoolingType.MEAN, FEATURES[2:3]),
            _table("user", len(data.user_rows), USER_DIM, PoolingType.SUM, FEATURES[3:]),
        ]
    )


def _table(
    name: str, rows: int, dim: int, pooling: PoolingType, features: tuple[str, ...]
) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name,
        num_embeddings=rows,
        embedding_dim=dim,
        feature_names=list(features),
        pooling=pooling,
        weight_init_min=-INITIAL_BOUND,
        weight_init_max=INITIAL_BOUND,
    )


class RatingModel(torch.nn.Module):
    """Predicts a rating by arithmetic on an example's pooled vectors alone.

    rating = offset + the sum over features f of WEIGHTS[f] * score(f)
             + MATCH * score(history) * score(candidate)

    score is a vector's first number times the square root of its dim: how good the movie, its
    genres and the movies rated before are for anyone, and how generous the user is. So small a
    ranker learns no more than 7,200 ratings can teach: learned layers in its place fitted the
    training ratings and predicted later ones worse. The other numbers tell genres (genres.py).
    """

    def __init__(self, ebc: EmbeddingBagCollection, mean_rating: float) -> None:
        super().__init__()
        self.ebc = ebc
        self.offset = torch.nn.Parameter(torch.tensor(mean_rating))

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        """Predicted ratings, float32 [examples]."""
        vectors: dict[str, torch.Tensor] = self.ebc(ids).to_dict()
        scores = {name: score(vectors[name]) for name in WEIGHTS}
        weighted = sum(weight * scores[name] for name, weight in WEIGHTS.items())
        return self.offset + weighted + MATCH * scores["history"] * scores["candidate"]


def score(vectors: torch.Tensor) -> torch.Tensor:
    """The first number times the square root of dim, of each row: float32 [n, dim] to [n]."""
    return vectors[:, 0] * math.sqrt(vectors.shape[1])


def to_kjt(examples: Examples) -> KeyedJaggedTensor:
    """The ids of ``examples``, feature-major, with FEATURES as keys."""
    jagged = [examples.jagged(feature) for feature in FEATURES]
    return KeyedJaggedTensor(
        keys=list(FEATURES),
        values=torch.cat([torch.from_numpy(one.values) for one in jagged]),
        lengths=torch.cat([torch.from_numpy(one.lengths) for one in jagged]),
    )
