"""An engine made of numpy: pools from small random tables, slow or failing on order.

It is an object like the real engine, and it keeps every batch that it was given. `expected`
says what any request must be answered, written from the contract and not from batch.py.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np

from embedserve.types import LookupRequest, ModelInfo, TableInfo

Bags = dict[str, list[list[int]]]
Weights = dict[str, list[list[float]]]

FEATURES = {"user": (7, 4), "movie": (11, 3), "tag": (5, 2)}
"""(rows, dim) of each feature's table."""
HOLD_S_MAX = 10.0


def model_info(name: str = "shop", features: dict[str, tuple[int, int]] = FEATURES) -> ModelInfo:
    return ModelInfo(
        name=name,
        version=7,
        features=tuple(features),
        rows_per_feature=tuple(rows for rows, _ in features.values()),
        keys=tuple(features),
        length_per_key=tuple(dim for _, dim in features.values()),
        tables=tuple(
            TableInfo(f"t_{feature}", rows, dim, "sum", "float32", (feature,), "table_wise")
            for feature, (rows, dim) in features.items()
        ),
        device_type="cpu",
        bytes_per_rank=(4 * sum(rows * dim for rows, dim in features.values()),),
        replanned=False,
        is_scripted=True,
    )


@dataclass
class Lookup:
    """A batch that the engine was given, and whether it came on the main thread."""

    ids: np.ndarray
    lengths: np.ndarray
    weights: np.ndarray | None
    batch_size: int
    is_inline: bool


class FakeEngine:
    """Sums rows; each bag alone and in the order of its ids, so that answers compare exactly.

    Attributes:
        delay_s: how long a lookup takes.
        failure: what a lookup raises, if anything.
        lookups: all batches so far.
    """

    def __init__(self, model: ModelInfo | None = None, seed: int = 0) -> None:
        self.model = model or model_info()
        random = np.random.default_rng(seed)
        self.tables = {
            table.features[0]: random.standard_normal(
                (table.num_embeddings, table.embedding_dim), np.float32
            )
            for table in self.model.tables
        }
        self.delay_s = 0.0
        self.failure: Exception | None = None
        self.lookups: list[Lookup] = []
        self._may_go_on = threading.Event()
        self._may_go_on.set()

    def hold(self) -> None:
        """Makes lookups wait for `release`; for batches that run in a thread."""
        self._may_go_on.clear()

    def release(self) -> None:
        self._may_go_on.set()

    def lookup(
        self, ids: np.ndarray, lengths: np.ndarray, weights: np.ndarray | None = None
    ) -> np.ndarray:
        bags = lengths.reshape(len(self.model.features), -1)
        is_inline = threading.current_thread() is threading.main_thread()
        self.lookups.append(Lookup(ids, lengths, weights, bags.shape[1], is_inline))
        if not self._may_go_on.wait(HOLD_S_MAX):
            raise TimeoutError("nobody released the fake engine")
        time.sleep(self.delay_s)
        if self.failure is not None:
            raise self.failure
        ends = np.cumsum(lengths)
        columns = [
            np.stack(
                [
                    self._pool(feature, ids[s], None if weights is None else weights[s])
                    for s in map(slice, row_ends - row, row_ends)
                ]
            )
            for feature, row, row_ends in zip(
                self.model.features, bags, ends.reshape(bags.shape), strict=True
            )
        ]
        return np.ascontiguousarray(np.concatenate(columns, axis=1))

    def _pool(self, feature: str, ids: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
        total = np.zeros(self.tables[feature].shape[1], np.float32)
        for i, row in enumerate(ids):
            total += self.tables[feature][row] * (np.float32(1) if weights is None else weights[i])
        return total

    def expected(self, bags: Bags, weights: Weights | None = None) -> np.ndarray:
        """[B, sum of dims]: what a request of these bags is answered, alone."""
        batch_size = len(next(iter(bags.values())))
        rows = []
        for example in range(batch_size):
            parts = []
            for feature in self.model.features:
                ids = np.array(bags[feature][example] if feature in bags else [], np.int64)
                has_weights = weights is not None and feature in weights
                given = np.array(weights[feature][example], np.float32) if has_weights else None
                parts.append(self._pool(feature, ids, given))
            rows.append(np.concatenate(parts))
        return np.stack(rows)


def make_request(bags: Bags, weights: Weights | None = None, model: str = "") -> LookupRequest:
    """The request of ``bags``: every feature with a bag for each example."""
    flat = [bag for feature_bags in bags.values() for bag in feature_bags]
    flat_weights = None
    if weights is not None:
        flat_weights = np.array(
            [w for feature in bags for bag in weights[feature] for w in bag], np.float32
        )
    return LookupRequest(
        model=model,
        features=tuple(bags),
        ids=np.array([i for bag in flat for i in bag], np.int64),
        lengths=np.array([len(bag) for bag in flat], np.int32),
        weights=flat_weights,
        batch_size=len(next(iter(bags.values()))),
    )
