"""Trainer and callers of the soak of deltas, in processes of their own."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray
from soak import delta_ids

from embedserve_client import EmbedClient, EmbedResult, GrpcEmbedClient
from embedserve_client.errors import EmbedServeClientError
from embedserve_store import DeltaLine, DeltaWriter, ModelStore, RevertedError, WriterFencedError

MODEL = "m"
TABLES = 8
ROWS = 100_000
DIM = 16
ALWAYS = 50
"""First rows of each table, which every delta changes."""
PUSH_EVERY_S = 1.0
NAME = f"{MODEL}@1"
ALIAS = "stable"
ALIAS_NAME = f"{MODEL}@{ALIAS}"
EXAMPLES = 4


def changed_rows(seq: int, table: int, count: int) -> NDArray[np.int64]:
    """Returns the rows that delta ``seq`` changes, unique and ascending."""
    random = np.random.default_rng((seq, table))
    return np.unique(np.concatenate([np.arange(ALWAYS), random.integers(0, ROWS, count)]))


def train(store: str, rows_per_push: int, has_ids: bool) -> None:
    """Pushes deltas until it is killed, and continues after undos."""
    count = rows_per_push // TABLES
    models = ModelStore(store)
    line = DeltaLine(models, models.manifest(MODEL, 1))
    writer = DeltaWriter(store, model=MODEL, version=1)
    due_s = time.monotonic()
    while True:
        seq = writer.seq + 1
        changes, removed = delta_ids.changes(line, seq) if has_ids else ({}, {})
        for table in range(TABLES):
            rows = changed_rows(seq, table, count)
            changes[f"t{table}"] = rows, np.full((len(rows), DIM), seq, np.float32)
        try:
            writer.push_rows(changes, step=seq, removed=removed)
        except RevertedError:
            writer.resume()
            continue
        except WriterFencedError:  # the delta of a writer that was killed
            writer = DeltaWriter(store, model=MODEL, version=1)
            continue
        due_s += PUSH_EVERY_S
        time.sleep(max(0.0, due_s - time.monotonic()))


@dataclass
class Found:
    """Contents of responses, by seq.

    Attributes:
        values: values of the rows that every delta changes.
        slots: for each slot of ids the delta that its ids had the values of; -1 without any.
    """

    values: dict[int, set[float]] = field(default_factory=dict)
    slots: dict[int, set[tuple[int, float]]] = field(default_factory=dict)

    def add(self, other: Found) -> None:
        for seq, values in other.values.items():
            self.values.setdefault(seq, set()).update(values)
        for seq, slots in other.slots.items():
            self.slots.setdefault(seq, set()).update(slots)


class Caller(threading.Thread):
    """Sends requests for rows that every delta changes, and for ids that come and go.

    Attributes:
        found: what responses had.
        wrong: responses of two deltas, without a seq, or older than the one before.
    """

    def __init__(
        self, client: EmbedClient | GrpcEmbedClient, seed: int, name: str, has_ids: bool
    ) -> None:
        """
        Args:
            name: served name; with that of an alias, responses may be older than the one before.
        """
        super().__init__()
        self.found = Found()
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()
        self.is_stopped = threading.Event()
        self._client = client
        self._random = Random(seed)
        self._name, self._has_ids = name, has_ids

    def run(self) -> None:
        last = 0
        with self._client:
            while not self.is_stopped.is_set():
                bags: dict[str, list[list[Any]]] = {
                    f"f{table}": [[self._random.randrange(ALWAYS)] for _ in range(EXAMPLES)]
                    for table in range(TABLES)
                }
                slots = [self._random.randrange(delta_ids.SLOTS) for _ in range(EXAMPLES)]
                for table in delta_ids.KINDS if self._has_ids else ():
                    ids = [delta_ids.ids_of(table, slot) for slot in slots]
                    bags[table] = [[self._random.choice(one)] for one in ids]
                try:
                    result = self._client.embed(bags, model=self._name)
                except EmbedServeClientError:
                    self.counts["without an answer"] += 1
                    continue
                self.counts[f"answers of {self._name}"] += 1
                last = self._check(result, last, slots)

    def _check(self, result: EmbedResult, last: int, slots: list[int]) -> int:
        seq = result.seq
        if seq is None or (seq < last and self._name != ALIAS_NAME):
            self.wrong.append(f"seq {seq} after {last}")
            return last
        rows = result.values[:, : TABLES * DIM]
        if (rows != rows.flat[0]).any():
            self.wrong.append(f"seq {seq}: values {np.unique(rows).tolist()}")
        self.found.values.setdefault(seq, set()).add(float(rows.flat[0]))
        if self._has_ids:
            self._check_ids(seq, result.values[:, TABLES * DIM :], slots)
        return seq

    def _check_ids(self, seq: int, values: NDArray[Any], slots: list[int]) -> None:
        if (values != values[:, :1]).any():
            self.wrong.append(f"seq {seq}: ids of slots {slots} have {values.tolist()}")
        deltas = (float(one) - delta_ids.value_of(0) for one in values[:, 0])
        self.found.slots.setdefault(seq, set()).update(zip(slots, deltas, strict=True))


def call(http: str, grpc: str, names: Sequence[str], has_ids: bool, pipe: Connection) -> None:
    """Runs callers of each name until the pipe has a word, and sends what they found."""
    callers: list[Caller] = []
    for name in names:
        clients: list[EmbedClient | GrpcEmbedClient] = [
            EmbedClient(http, retries=0),
            GrpcEmbedClient(grpc, retries=0),
            GrpcEmbedClient(grpc, retries=0),
        ]
        # An alias gets less load, so that the load of the other name stays what it is without one.
        for client in clients[: 1 if name == ALIAS_NAME else None]:
            callers.append(Caller(client, len(callers) + 1, name, has_ids))
    for caller in callers:
        caller.start()
    pipe.recv()
    for caller in callers:
        caller.is_stopped.set()
        caller.join()
    wrong = [one for caller in callers for one in caller.wrong]
    found = Found()
    for caller in callers:
        found.add(caller.found)
    pipe.send((wrong, found, sum((caller.counts for caller in callers), Counter())))
