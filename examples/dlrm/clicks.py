"""Clicks in the shape of Criteo's: 13 numbers and 26 ids per impression, and whether it was
clicked.

They are generated from a seed. A click depends on hidden weights of the ids and numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torchrec import KeyedJaggedTensor

NUMBERS = 13
ROWS = (
    *(1460, 583, 20000, 12000, 305, 24, 12517, 633, 3, 9314, 5683, 15000, 3194),
    *(27, 8000, 14000, 10, 5652, 2173, 4, 17000, 18, 15, 11000, 105, 7000),
)
"""Rows of each of the 26 tables. Small tables are as large as in Criteo's data set; large ones are
cut to at most 20,000 rows, to fit a laptop."""
FEATURES = tuple(f"cat_{number}" for number in range(len(ROWS)))
MISSING = 0.05
"""Share of the ids that are missing; their bags are empty."""
SKEW = 1.3
"""Exponent of the Zipf distribution of ids: a few ids make up most impressions."""


@dataclass(frozen=True)
class Clicks:
    """Impressions and their clicks.

    Attributes:
        numbers: float32 [n, 13].
        ids: int64 [n, 26], row numbers; -1 if missing.
        clicked: float32 [n], 0 or 1.
    """

    numbers: np.ndarray
    ids: np.ndarray
    clicked: np.ndarray

    def __len__(self) -> int:
        return len(self.clicked)

    def take(self, which: slice | np.ndarray) -> Clicks:
        return Clicks(self.numbers[which], self.ids[which], self.clicked[which])

    def bags(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Returns (ids, lengths) of each feature, as embedserve's clients accept them: int64, int32
        [n]."""
        columns = zip(FEATURES, self.ids.T, strict=True)
        return {name: (ids[ids >= 0], (ids >= 0).astype(np.int32)) for name, ids in columns}

    def to_kjt(self) -> KeyedJaggedTensor:
        """Returns the same bags as a KeyedJaggedTensor, with FEATURES as keys."""
        bags = self.bags().values()
        return KeyedJaggedTensor(
            keys=list(FEATURES),
            values=torch.from_numpy(np.concatenate([ids for ids, _ in bags])),
            lengths=torch.from_numpy(np.concatenate([lengths for _, lengths in bags])),
        )


def make_clicks(count: int, seed: int) -> Clicks:
    random = np.random.default_rng(seed)
    numbers = np.log1p(random.exponential(20.0, (count, NUMBERS))).astype(np.float32)
    columns, score = [], (numbers - numbers.mean(0)) @ random.normal(0, 0.2, NUMBERS)
    for rows in ROWS:
        ids = (random.zipf(SKEW, count) - 1) % rows
        is_missing = random.random(count) < MISSING
        score += np.where(is_missing, 0.0, random.normal(0, 0.4, rows)[ids])
        columns.append(np.where(is_missing, -1, ids))
    clicked = random.random(count) < 1 / (1 + np.exp(-score))
    return Clicks(numbers, np.stack(columns, axis=1), clicked.astype(np.float32))
