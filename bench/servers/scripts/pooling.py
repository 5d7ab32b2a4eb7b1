"""Exact float32 sums of the ids of many requests in one kernel call; shared by the peers' scripts.

All tables are in one matrix, so that one call of the kernel pools every bag of every request. Runs
in the peers' environments: it needs torch and numpy, and nothing of embedserve.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import embedding_bag

Jagged = tuple[np.ndarray, np.ndarray]
"""int64 ids [lengths.sum()], feature-major, and int32 lengths [features, examples]."""

JOINED = "joined.npy"


class Tables:
    """All tables in one matrix.

    The rows of t0.npy, t1.npy, … in ``folder`` are copied. If the folder has joined.npy, this file
    is mapped instead; it holds ``count`` tables of the same number of rows, one after another.

    Attributes:
        weight: float32 [tables * rows, dim].
        first_row: int64 [tables], the first row of each table in ``weight``.
    """

    def __init__(self, folder: str, count: int) -> None:
        joined = Path(folder) / JOINED
        if joined.exists():
            weight = np.load(joined, mmap_mode="c")  # torch requires a writable mapping
            rows = [len(weight) // count] * count
        else:
            mapped = [np.load(Path(folder) / f"t{i}.npy", mmap_mode="r") for i in range(count)]
            weight = np.concatenate(mapped)
            rows = [len(table) for table in mapped]
        self.weight = torch.from_numpy(weight)
        self.first_row = np.cumsum([0, *rows[:-1]])

    def pool(self, requests: Sequence[Jagged]) -> list[np.ndarray]:
        """Returns the vectors of each request, float32 [examples, tables * dim]."""
        ids = np.concatenate([ids for ids, _ in requests])
        lengths = np.concatenate([lengths.ravel() for _, lengths in requests])
        first_rows = [np.repeat(self.first_row, lengths.shape[1]) for _, lengths in requests]
        rows = ids + np.repeat(np.concatenate(first_rows), lengths)
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return self._split(requests, self._sums(rows, offsets))

    @torch.inference_mode()
    def _sums(self, rows: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        bags = torch.from_numpy(offsets)
        ids = torch.from_numpy(rows)
        sums = embedding_bag(ids, self.weight, bags, mode="sum", include_last_offset=True)
        return sums.numpy()

    def _split(self, requests: Sequence[Jagged], sums: np.ndarray) -> list[np.ndarray]:
        """Splits ``sums``, float32 [bags of all requests, dim] in the order of the requests."""
        answers, start = [], 0
        for _, lengths in requests:
            features, examples = lengths.shape
            own = sums[start : start + lengths.size].reshape(features, examples, -1)
            answers.append(own.transpose(1, 0, 2).reshape(examples, -1))
            start += lengths.size
        return answers


def from_bags(features: dict[str, list[list[int]]], names: Sequence[str]) -> Jagged:
    """Converts a JSON request {"f0": [[id, …] per example], …} to arrays."""
    bags = [features[name] for name in names]
    lengths = np.array([[len(bag) for bag in feature] for feature in bags], np.int32)
    ids = [row for feature in bags for bag in feature for row in bag]
    return np.array(ids, np.int64), lengths
