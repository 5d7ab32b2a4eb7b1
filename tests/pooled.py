"""Pooled collections of random rows, to publish."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType

Tables = Sequence[tuple[str, int, int, list[str], PoolingType]]
"""(name, rows, dim, features, pooling) of each."""


def collection(tables: Tables) -> EmbeddingBagCollection:
    """Its rows are what torch's generator gives next."""
    made = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name,
                num_embeddings=rows,
                embedding_dim=dim,
                feature_names=features,
                pooling=pooling,
            )
            for name, rows, dim, features, pooling in tables
        ]
    )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    return made
