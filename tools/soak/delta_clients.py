"""Trainer and callers of the soak of deltas, in processes of their own."""

from __future__ import annotations

import threading
import time
from collections import Counter
from multiprocessing.connection import Connection
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedserve_client import EmbedClient, GrpcEmbedClient
from embedserve_client.errors import EmbedServeClientError
from embedserve_store import DeltaWriter, RevertedError, WriterFencedError

MODEL = "m"
TABLES = 8
ROWS = 100_000
DIM = 16
ALWAYS = 50
"""First rows of each table, which every delta changes."""
PUSH_EVERY_S = 1.0


def changed_rows(seq: int, table: int, count: int) -> NDArray[np.int64]:
    """Returns the rows that delta ``seq`` changes, unique and ascending."""
    random = np.random.default_rng((seq, table))
    return np.unique(np.concatenate([np.arange(ALWAYS), random.integers(0, ROWS, count)]))


def train(store: str, rows_per_push: int) -> None:
    """Pushes deltas until it is killed, and continues after undos."""
    count = rows_per_push // TABLES
    writer = DeltaWriter(store, model=MODEL, version=1)
    due_s = time.monotonic()
    while True:
        seq = writer.seq + 1
        changes = {}
        for table in range(TABLES):
            rows = changed_rows(seq, table, count)
            changes[f"t{table}"] = rows, np.full((len(rows), DIM), seq, np.float32)
        try:
            writer.push_rows(changes, step=seq)
        except RevertedError:
            writer.resume()
            continue
        except WriterFencedError:  # the delta of a writer that was killed
            writer = DeltaWriter(store, model=MODEL, version=1)
            continue
        due_s += PUSH_EVERY_S
        time.sleep(max(0.0, due_s - time.monotonic()))


class Caller(threading.Thread):
    """Sends requests for rows that every delta changes.

    Attributes:
        values: value of these rows by seq, as responses had them.
        wrong: responses of two deltas, without a seq, or older than the one before.
    """

    def __init__(self, client: EmbedClient | GrpcEmbedClient, seed: int) -> None:
        super().__init__()
        self.values: dict[int, float] = {}
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()
        self.is_stopped = threading.Event()
        self._client = client
        self._random = Random(seed)

    def run(self) -> None:
        last = 0
        with self._client:
            while not self.is_stopped.is_set():
                bags = {
                    f"f{table}": [[self._random.randrange(ALWAYS)] for _ in range(4)]
                    for table in range(TABLES)
                }
                try:
                    result = self._client.embed(bags)
                except EmbedServeClientError:
                    self.counts["without an answer"] += 1
                    continue
                self.counts["answers"] += 1
                last = self._check(result.seq, result.values, last)

    def _check(self, seq: int | None, values: NDArray[Any], last: int) -> int:
        if seq is None or seq < last:
            self.wrong.append(f"seq {seq} after {last}")
            return last
        value = float(values.flat[0])
        if (values != value).any():
            self.wrong.append(f"seq {seq}: values {np.unique(values).tolist()}")
        elif self.values.setdefault(seq, value) != value:
            self.wrong.append(f"seq {seq}: {value}, and {self.values[seq]} before")
        return seq


def call(http: str, grpc: str, pipe: Connection) -> None:
    """Runs callers until the pipe has a word, and sends what they found."""
    callers = [
        Caller(EmbedClient(http, retries=0), 1),
        Caller(GrpcEmbedClient(grpc, retries=0), 2),
        Caller(GrpcEmbedClient(grpc, retries=0), 3),
    ]
    for caller in callers:
        caller.start()
    pipe.recv()
    for caller in callers:
        caller.is_stopped.set()
        caller.join()
    wrong = [one for caller in callers for one in caller.wrong]
    values: dict[int, set[float]] = {}
    for caller in callers:
        for seq, value in caller.values.items():
            values.setdefault(seq, set()).add(value)
    pipe.send((wrong, values, sum((caller.counts for caller in callers), Counter())))
