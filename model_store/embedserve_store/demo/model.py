"""Defines the demo's rating model: an EmbeddingBagCollection and a ranker on its pooled vectors.

The module maps a KeyedJaggedTensor to predicted ratings, and train.py trains it. Only its tables
are published; the ranker stands for a user's ranker in another service. Imports torchrec.
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
"""Rows are initialized uniformly within this bound of zero. It is small against trained rows, so
that an untrained row has little effect."""

WEIGHTS = {"history": 0.3, "candidate": 1.0, "candidate_genres": 1.0, "user": 1.0}
"""Weight of each feature's score. A history predicts a rating less well than the movie itself."""
MATCH = 0.5


def make_collection(data: MovieTweetings) -> EmbeddingBagCollection:
    """Creates the demo's tables on the CPU, with one row for each id of the vocabularies.

    movie and genre use mean pooling, so that a long history or list of genres weighs no more than a
    short list. user has one id per example, so its sum is the row itself.
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

    score is a vector's first number times the square root of its dim. It measures how good the
    movie, its genres and the movies rated before are for anyone, and how generous the user is. Such
    a small ranker learns no more than 7,200 ratings can teach. Learned layers in its place fitted
    the training ratings and predicted later ratings worse. The other numbers encode genres
    (genres.py).
    """

    def __init__(self, ebc: EmbeddingBagCollection, mean_rating: float) -> None:
        super().__init__()
        self.ebc = ebc
        self.offset = torch.nn.Parameter(torch.tensor(mean_rating))

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        """Returns the predicted ratings, float32 [examples]."""
        vectors: dict[str, torch.Tensor] = self.ebc(ids).to_dict()
        scores = {name: score(vectors[name]) for name in WEIGHTS}
        weighted = sum(weight * scores[name] for name, weight in WEIGHTS.items())
        return self.offset + weighted + MATCH * scores["history"] * scores["candidate"]


def score(vectors: torch.Tensor) -> torch.Tensor:
    """Returns each row's first number times the square root of dim: float32 [n, dim] to [n]."""
    return vectors[:, 0] * math.sqrt(vectors.shape[1])


def to_kjt(examples: Examples) -> KeyedJaggedTensor:
    """Returns the ids of ``examples``, feature-major, with FEATURES as keys."""
    jagged = [examples.jagged(feature) for feature in FEATURES]
    return KeyedJaggedTensor(
        keys=list(FEATURES),
        values=torch.cat([torch.from_numpy(one.values) for one in jagged]),
        lengths=torch.cat([torch.from_numpy(one.lengths) for one in jagged]),
    )
