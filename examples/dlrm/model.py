"""TorchRec's DLRM, and its dense part alone: the rest of the model once embedserve serves the
tables."""

from __future__ import annotations

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
from torchrec.models.dlrm import DLRM, DenseArch, InteractionArch, OverArch

from examples.dlrm.clicks import FEATURES, NUMBERS, ROWS

DIM = 16
DENSE_LAYERS = [32, DIM]
OVER_LAYERS = [64, 1]


def make_dlrm() -> DLRM:
    tables = [
        EmbeddingBagConfig(
            name=f"t_{feature}",
            num_embeddings=rows,
            embedding_dim=DIM,
            feature_names=[feature],
            pooling=PoolingType.SUM,
        )
        for feature, rows in zip(FEATURES, ROWS, strict=True)
    ]
    collection = EmbeddingBagCollection(tables=tables)
    return DLRM(collection, NUMBERS, DENSE_LAYERS, OVER_LAYERS)


class DensePart(torch.nn.Module):
    """The part of DLRM after the tables, from TorchRec's modules and with DLRM's parameter
    names."""

    def __init__(self) -> None:
        super().__init__()
        tables = len(FEATURES)
        pairs = (tables + 1) * tables // 2
        self.dense_arch = DenseArch(NUMBERS, DENSE_LAYERS)
        self.inter_arch = InteractionArch(tables)
        self.over_arch = OverArch(DIM + pairs, OVER_LAYERS)

    def forward(self, numbers: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        """Returns click probabilities, float32 [n].

        Args:
            numbers: float32 [n, 13].
            pooled: vectors of FEATURES one after another, float32 [n, 26 * DIM], as embedserve
                returns them.
        """
        dense = self.dense_arch(numbers)
        sparse = pooled.reshape(-1, len(FEATURES), DIM)
        logits: torch.Tensor = self.over_arch(self.inter_arch(dense, sparse))
        return logits.squeeze(1).sigmoid()
