"""The workloads: their tables, and the requests that are sent to every server.

The same tables exist as a model store for embedserve, and as .npy files of float32 rows for the
other servers, which map them. Both are created once, in a cache folder. The requests are the same
in every run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

CACHE = Path(os.environ.get("EMBEDSERVE_BENCH_CACHE", Path.home() / ".cache" / "embedserve-bench"))
ZIPF_EXPONENT = 1.05

DLRM_IDS = (
    *(3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1),
    *(6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1),
)
"""Ids per example of each of the 26 features of MLPerf's DLRM-v2 (multi-hot sizes); 214 in
total."""


@dataclass(frozen=True)
class Request:
    """One batch of jagged ids.

    Attributes:
        lengths: int32 [features, examples].
        ids: int64 [lengths.sum()], feature-major.
    """

    lengths: np.ndarray
    ids: np.ndarray

    @property
    def examples(self) -> int:
        return int(self.lengths.shape[1])

    def per_feature(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns (ids, lengths) of each feature."""
        ends = self.lengths.sum(axis=1).cumsum()
        return list(zip(np.split(self.ids, ends[:-1]), self.lengths, strict=True))

    def bags(self) -> Iterator[list[list[int]]]:
        """Yields the ids of each example, feature by feature."""
        ids = self.ids.tolist()
        start = 0
        for lengths in self.lengths.tolist():
            feature = []
            for length in lengths:
                feature.append(ids[start : start + length])
                start += length
            yield feature


@dataclass(frozen=True)
class Tables:
    """Tables t0, t1, … of one shape; each serves one feature f0, f1, … with sum pooling."""

    name: str
    count: int
    rows: int
    dim: int

    @property
    def features(self) -> list[str]:
        return [f"f{i}" for i in range(self.count)]

    @property
    def folder(self) -> Path:
        return CACHE / "tables" / f"{self.name}-{self.count}x{self.rows}x{self.dim}"

    @property
    def store(self) -> Path:
        """Folder of embedserve's model store, with the model ``name``."""
        return self.folder / "store"

    def npy(self, table: int) -> Path:
        """Returns the file of a table: float32 [rows, dim]."""
        return self.folder / f"t{table}.npy"

    @cached_property
    def mapped(self) -> list[np.ndarray]:
        return [np.load(self.npy(i), mmap_mode="r") for i in range(self.count)]

    def make(self) -> None:
        """Writes the rows and publishes them, unless they exist."""
        if (self.store / self.name / "1" / "manifest.json").exists():
            return
        import torch

        from embedserve_store import TableSpec, publish

        self.folder.mkdir(parents=True, exist_ok=True)
        random = np.random.default_rng(0)
        for i in range(self.count):
            np.save(self.npy(i), random.standard_normal((self.rows, self.dim), np.float32))
        tables = [
            TableSpec(f"t{i}", self.rows, self.dim, (feature,), "sum", "float32")
            for i, feature in enumerate(self.features)
        ]
        weights = {
            f"embedding_bags.t{i}.weight": torch.from_numpy(np.load(self.npy(i)))
            for i in range(self.count)
        }
        publish(weights, self.store, model=self.name, tables=tables)


@dataclass(frozen=True)
class Workload:
    """Requests of one shape to some tables.

    Attributes:
        ids: distribution of ids over the rows of a table, "uniform" or "zipf".
    """

    name: str
    tables: Tables
    ids: str

    @cached_property
    def requests(self) -> list[Request]:
        random = np.random.default_rng(1)
        lengths_of = {"small": _small_lengths, "rank": _rank_lengths, "bulk": _bulk_lengths}
        count = {"small": 2000, "rank": 32, "bulk": 8}[self.name]
        made = []
        for _ in range(count):
            lengths = lengths_of[self.name](random).astype(np.int32)
            made.append(Request(lengths, self._draw(random, int(lengths.sum()))))
        return made

    def _draw(self, random: np.random.Generator, count: int) -> np.ndarray:
        if self.ids == "uniform":
            return random.integers(0, self.tables.rows, count)
        return self._popular[np.searchsorted(self._cumulated, random.random(count))]

    @cached_property
    def _cumulated(self) -> np.ndarray:
        weights = 1.0 / np.arange(1, self.tables.rows + 1) ** ZIPF_EXPONENT
        return np.cumsum(weights / weights.sum())

    @cached_property
    def _popular(self) -> np.ndarray:
        """The ids by popularity, spread over the table as hashed ids are."""
        return np.random.default_rng(2).permutation(self.tables.rows)

    def expected(self, request: Request) -> np.ndarray:
        """Returns the exact pooled sums, float64 [examples, tables * dim]."""
        blocks = []
        for table, feature in zip(self.tables.mapped, request.bags(), strict=True):
            blocks.append(np.stack([table[bag].sum(axis=0, dtype=np.float64) for bag in feature]))
        return np.concatenate(blocks, axis=1)

    def check(self, request: Request, values: np.ndarray) -> None:
        """Raises AssertionError unless ``values`` are the sums, within float32 rounding in any
        order."""
        expected = self.expected(request)
        assert values.shape == expected.shape, (values.shape, expected.shape)
        np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-4)

    @property
    def answer_bytes(self) -> int:
        """Bytes of the float32 values of one response."""
        return 4 * self.requests[0].examples * self.tables.count * self.tables.dim


def _small_lengths(random: np.random.Generator) -> np.ndarray:
    """Returns the lengths of a request for one user, with 0 to 8 ids per feature."""
    return random.integers(0, 9, (8, 1))


def _rank_lengths(random: np.random.Generator) -> np.ndarray:
    """Returns the lengths of a request for one user and 500 candidates.

    The user's id and a history of ten ids are repeated for each candidate. Six features of a
    candidate have 1 to 3 ids.
    """
    user = np.repeat([[1], [10]], 500, axis=1)
    return np.concatenate([user, random.integers(1, 4, (6, 500))])


def _bulk_lengths(random: np.random.Generator) -> np.ndarray:
    return np.repeat(np.array(DLRM_IDS)[:, None], 512, axis=1)


SMALL_TABLES = Tables("small", 8, 100_000, 64)
BULK_TABLES = Tables("bulk", 26, 100_000, 128)
"""Tables of the shape of DLRM-v2's. The originals have up to 40 million rows; these fit any
memory."""


def workload(name: str, ids: str) -> Workload:
    return Workload(name, BULK_TABLES if name == "bulk" else SMALL_TABLES, ids)
