"""Trains a DLRM and saves it with torch.distributed.checkpoint, with the files that embedserve
needs.

    python -m examples.dlrm.train FOLDER

FOLDER gets checkpoint/ (the whole model) and tables.yaml (the description of its tables). It also
gets expected.safetensors: some inputs, and the results of the model's own tables for them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import yaml
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.models.dlrm import DLRM

from embedserve_store import write_expected
from examples.checkpoint import save
from examples.dlrm.clicks import Clicks, make_clicks
from examples.dlrm.model import make_dlrm

COUNT, HELD_OUT = 8000, 1000
EPOCHS, BATCH, LEARNING_RATE = 3, 200, 0.01
SEED = 7


def clicks() -> tuple[Clicks, Clicks]:
    """Returns (training data, held-out data)."""
    made = make_clicks(COUNT, SEED)
    return made.take(slice(0, COUNT - HELD_OUT)), made.take(slice(COUNT - HELD_OUT, COUNT))


def train(model: DLRM, data: Clicks) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)
    order = np.random.default_rng(SEED)
    for _ in range(EPOCHS):
        shuffled = order.permutation(len(data))
        for start in range(0, len(data), BATCH):
            batch = data.take(shuffled[start : start + BATCH])
            logits = model(torch.from_numpy(batch.numbers), batch.to_kjt()).squeeze(1)
            loss = binary_cross_entropy_with_logits(logits, torch.from_numpy(batch.clicked))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def describe(model: DLRM, path: Path) -> None:
    """Describes what a checkpoint does not: the features of each table, and their pooling."""
    tables = [
        {
            "name": config.name,
            "num_embeddings": config.num_embeddings,
            "embedding_dim": config.embedding_dim,
            "feature_names": list(config.feature_names),
            "pooling": config.pooling.value.lower(),
        }
        for config in model.sparse_arch.embedding_bag_collection.embedding_bag_configs()
    ]
    path.write_text(yaml.safe_dump({"tables": tables}, sort_keys=False))


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)  # steps are too short for several threads
    torch.manual_seed(SEED)
    model = make_dlrm()
    training, _ = clicks()
    train(model, training)
    save(model, folder / "checkpoint")
    describe(model, folder / "tables.yaml")
    write_expected(model.sparse_arch.embedding_bag_collection, folder / "expected.safetensors")


if __name__ == "__main__":
    main()
