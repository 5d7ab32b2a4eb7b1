"""Trains two towers on the ratings of embedserve's demo, and saves them.

    python -m examples.two_tower.train FOLDER

FOLDER gets checkpoint/ (the whole model) and tables.yaml with the vocabularies of its tables. It
also gets expected.safetensors: some inputs, and the results of the model's own tables for them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torchrec import KeyedJaggedTensor

from embedserve_store import write_expected
from embedserve_store.demo.data import load as load_ratings
from embedserve_store.demo.examples import Examples, make_examples
from embedserve_store.demo.vocabularies import write_description
from embedserve_store.sources.live import describe
from examples.checkpoint import save
from examples.two_tower.model import CANDIDATE, QUERY, TwoTower

LIKED = 7
"""Rating, out of ten, from which a movie counts as liked."""
EPOCHS, BATCH, LEARNING_RATE, TEMPERATURE = 20, 256, 0.003, 0.1
SEED = 7


def to_kjt(examples: Examples) -> KeyedJaggedTensor:
    jagged = [examples.jagged(feature) for feature in (*QUERY, *CANDIDATE)]
    return KeyedJaggedTensor(
        keys=[*QUERY, *CANDIDATE],
        values=torch.from_numpy(np.concatenate([one.values for one in jagged])),
        lengths=torch.from_numpy(np.concatenate([one.lengths for one in jagged])),
    )


def train(model: TwoTower, examples: Examples) -> None:
    """Trains each query to find its candidate among the candidates of its batch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)
    order = np.random.default_rng(SEED)
    for _ in range(EPOCHS):
        shuffled = order.permutation(len(examples))
        for start in range(0, len(examples), BATCH):
            queries, candidates = model(to_kjt(examples.take(shuffled[start : start + BATCH])))
            logits = queries @ candidates.T / TEMPERATURE
            loss = cross_entropy(logits, torch.arange(len(queries)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def main() -> None:
    folder = Path(sys.argv[1])
    data = load_ratings()
    examples = make_examples(data)
    has_history = np.array([bool(bag) for bag in examples.bags["history"]])
    liked = examples.take(np.flatnonzero(has_history & (examples.rating >= LIKED)))
    torch.set_num_threads(1)  # steps are too short for several threads
    torch.manual_seed(SEED)
    model = TwoTower(len(data.movie_rows), len(data.genre_rows))
    train(model, liked)
    save(model, folder / "checkpoint")
    write_description(data, describe(model.ebc), folder / "tables.yaml")
    write_expected(model.ebc, folder / "expected.safetensors")


if __name__ == "__main__":
    main()
