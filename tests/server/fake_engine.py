"""An engine made of numpy: small random tables, with delays and failures that a test sets.

It has the interface of the real engine, and keeps every batch that it receives. ``expected``
returns the right result of any request. It is written from the contract, independently of batch.py.
"""

import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from server.fake_models import FEATURES, VOCABULARIES, model_info

from embedserve.batching.join import adapt_to_model
from embedserve.batching.lookup_engine import RemoteLookups
from embedserve.codec.string_ids import HashedStrings
from embedserve.deltas.rows_reader import RowsReader
from embedserve.lookup_types import LookupRequest
from embedserve.model_info import ModelInfo
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.ids.string_hashes import hash_strings

__all__ = ["FEATURES", "Bags", "FakeEngine", "Weights", "make_request", "model_info"]

Bags = dict[str, list[list[Any]]]
"""Ids by feature, bag by bag: integers or strings."""
Weights = dict[str, list[list[float]]]

HOLD_S_MAX = 60.0


@dataclass
class Lookup:
    """A batch that the engine received, and whether it ran on the main thread."""

    ids: np.ndarray
    lengths: np.ndarray
    weights: np.ndarray | None
    batch_size: int
    is_inline: bool
    as_float16: bool = False


class FakeEngine:
    """Pools each bag alone and in the order of its ids, so that results compare exactly.

    Attributes:
        tables: rows by table name.
        waits_for_device, replicas: those of an engine on GPUs; set them before a batcher has the
            engine.
        delay_s: seconds that a lookup takes.
        failure: exception that a lookup raises, if any.
        damage: exception that a check raises, if any.
        lookups: all batches so far.
    """

    def __init__(self, model: ModelInfo | None = None, seed: int = 0) -> None:
        self.model = model or model_info()
        random = np.random.default_rng(seed)
        self.tables = {
            table.name: random.standard_normal(
                (table.num_embeddings, table.embedding_dim), np.float32
            )
            for table in self.model.tables
        }
        self.waits_for_device = False
        self.replicas = 1
        self.remote: RemoteLookups | None = None
        self.rows_reader: RowsReader | None = None
        self.delay_s = 0.0
        self.failure: Exception | None = None
        self.damage: Exception | None = None
        self.lookups: list[Lookup] = []
        self._uses = [
            (table, feature) for table in self.model.tables for feature in table.feature_names
        ]
        self._may_go_on = threading.Event()
        self._may_go_on.set()

    def request(self, bags: Bags, weights: Weights | None = None) -> LookupRequest:
        """Returns a request as a batcher of the engine's model takes it."""
        return adapt_to_model(make_request(bags, weights), self.model)

    def hold(self) -> None:
        """Makes lookups wait for ``release``; only for batches that run in a thread."""
        self._may_go_on.clear()

    def release(self) -> None:
        self._may_go_on.set()

    def lookup(
        self,
        ids: np.ndarray,
        lengths: np.ndarray,
        weights: np.ndarray | None = None,
        as_float16: bool = False,
    ) -> np.ndarray:
        bags = lengths.reshape(len(self.model.features), -1)
        is_inline = threading.current_thread() is threading.main_thread()
        self.lookups.append(Lookup(ids, lengths, weights, bags.shape[1], is_inline, as_float16))
        if not is_inline and not self._may_go_on.wait(HOLD_S_MAX):
            raise TimeoutError("nobody released the fake engine")
        time.sleep(self.delay_s)
        if self.failure is not None:
            raise self.failure
        ends = np.append(0, bags.sum(axis=1).cumsum())
        blocks = []
        for table, feature in self._uses:
            f = self.model.features.index(feature)
            mine = slice(ends[f], ends[f + 1])
            if self.model.is_pooled:
                of_ids = None if weights is None else weights[mine]
                blocks.append(self._pool_all(table, ids[mine], bags[f], of_ids))
            else:
                blocks.append(self.tables[table.name][ids[mine]])
        values = np.ascontiguousarray(np.concatenate(blocks, axis=1 if self.model.is_pooled else 0))
        return self.to_float16(values) if as_float16 else values

    def check(self) -> None:
        """Raises ``damage`` if it is set."""
        if self.damage is not None:
            raise self.damage

    def to_float16(self, values: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return values.astype(np.float16)

    def _pool_all(
        self, table: TableSpec, rows: np.ndarray, lengths: np.ndarray, weights: np.ndarray | None
    ) -> np.ndarray:
        """Pools bags like `_pool`, bit for bit, but adds the first ids of all bags in one call,
        then the second ids, and so on."""
        starts = np.cumsum(lengths) - lengths
        longest = lengths.max(initial=0)
        if longest > lengths.size:
            ranges = [slice(start, start + n) for start, n in zip(starts, lengths, strict=True)]
            pooled = [
                self._pool(table, rows[one], None if weights is None else weights[one])
                for one in ranges
            ]
            return np.stack(pooled)
        totals = np.zeros((lengths.size, table.embedding_dim), np.float32)
        for i in range(longest):
            bags = np.flatnonzero(lengths > i)
            at = starts[bags] + i
            added = self.tables[table.name][rows[at]]
            totals[bags] += added if weights is None else added * weights[at, None]
        if table.pooling == "mean":
            totals /= np.maximum(lengths, 1)[:, None].astype(np.float32)
        return totals

    def _pool(self, table: TableSpec, rows: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
        vectors = self.tables[table.name][rows]
        if weights is not None:
            vectors = vectors * weights[:, np.newaxis]
        total: np.ndarray = vectors.sum(0, initial=np.float32(0))
        return total / np.float32(max(len(rows), 1)) if table.pooling == "mean" else total

    def expected(self, bags: Bags, weights: Weights | None = None) -> np.ndarray:
        """Returns the result of a request of these bags alone: [B, sum of dims]. An unpooled model
        has [n, dim], key after key."""
        batch_size = len(next(iter(bags.values())))
        blocks = []
        for table, feature in self._uses:
            given = bags.get(feature, [[]] * batch_size)
            if not self.model.is_pooled:
                blocks += [self._vector(table, one) for bag in given for one in bag]
                continue
            pooled = []
            for example, bag in enumerate(given):
                rows = [row_of(table, one) for one in bag]
                known = [i for i, row in enumerate(rows) if row is not None]
                mine = (
                    weights[feature][example] if weights and feature in weights else [1] * len(bag)
                )
                known_weights = np.array([mine[i] for i in known], np.float32)
                pooled.append(
                    self._pool(table, np.array([rows[i] for i in known], int), known_weights)
                )
            blocks.append(np.stack(pooled))
        if self.model.is_pooled:
            return np.concatenate(blocks, axis=1)
        return np.array(blocks, np.float32).reshape(-1, self.model.length_per_key[0])

    def _vector(self, table: TableSpec, one: int | str) -> np.ndarray:
        row = row_of(table, one)
        if row is None:
            return np.zeros(table.embedding_dim, np.float32)
        vector: np.ndarray = self.tables[table.name][row]
        return vector

    def expected_lengths(self, bags: Bags) -> list[list[int]]:
        """Returns the lengths of an unpooled result, [keys, B]."""
        batch_size = len(next(iter(bags.values())))
        return [
            [len(bag) for bag in bags.get(feature, [[]] * batch_size)] for _, feature in self._uses
        ]

    def expected_unknown(self, bags: Bags) -> dict[str, int] | None:
        """Returns how many ids of these bags have no row, by feature."""
        counts = Counter(
            feature
            for feature, table in {feature: table for table, feature in self._uses}.items()
            for bag in bags.get(feature, [])
            for one in bag
            if not is_known(table, one)
        )
        return dict(counts) or None


def is_known(table: TableSpec, one: int | str) -> bool:
    if table.ids.rule == "map":
        return one in VOCABULARIES[table.name]
    return table.ids.rule == "modulo" or 0 <= int(one) < table.num_embeddings


def row_of(table: TableSpec, one: int | str) -> int | None:
    """Returns the row of an id by its table's rule; None if the id is skipped."""
    rule = table.ids
    if not is_known(table, one):
        assert rule.unknown != "error"
        return rule.default_row if rule.unknown == "row" else None
    if rule.rule == "map":
        return VOCABULARIES[table.name].index(one)
    if rule.rule == "modulo":
        return int(one) % rule.modulus + rule.offset
    return int(one)


def make_request(bags: Bags, weights: Weights | None = None, model: str = "") -> LookupRequest:
    """Returns a request of ``bags``, which have a bag for each example in every feature."""
    flat = [bag for feature_bags in bags.values() for bag in feature_bags]
    values = [i for bag in flat for i in bag]
    strings = [one for one in values if isinstance(one, str)]
    hashes = hash_strings(strings)
    hash_of = dict(zip(strings, hashes.tolist(), strict=True))
    string_counts = {
        feature: sum(map(len, feature_bags))
        for feature, feature_bags in bags.items()
        if any(isinstance(one, str) for bag in feature_bags for one in bag)
    }
    flat_weights = None
    if weights is not None:
        flat_weights = np.array(
            [w for feature in bags for bag in weights[feature] for w in bag], np.float32
        )
    return LookupRequest(
        model=model,
        features=tuple(bags),
        ids=np.array([hash_of[i] if isinstance(i, str) else i for i in values], np.int64),
        lengths=np.array([len(bag) for bag in flat], np.int32),
        weights=flat_weights,
        batch_size=len(next(iter(bags.values()))),
        string_features=frozenset(string_counts),
        strings=HashedStrings(hashes, strings, string_counts) if strings else None,
    )
