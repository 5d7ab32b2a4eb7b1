"""Pooled collections of random rows, for tests that publish."""

from collections.abc import Sequence

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType

Tables = Sequence[tuple[str, int, int, list[str], PoolingType]]
"""(name, rows, dim, features, pooling) of each table."""


def collection(tables: Tables, *, is_weighted: bool = False) -> EmbeddingBagCollection:
    """Returns a collection whose rows are the next values of torch's generator."""
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
        ],
        is_weighted=is_weighted,
    )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    return made
