"""Helpers of the tests of served deltas: a store, pushes, and clients that check each result."""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from running_servers import ANSWER_S_MAX, Running

from embedserve_client import EmbedClient, GrpcEmbedClient
from embedserve_client.errors import EmbedServeClientError
from embedserve_store import DeltaWriter, TableSpec, publish

ROWS = {"user": 1000, "item": 50}
CHANGED = {"user": 300, "item": 50}
DIM = 8
WAIT_S_MAX = 120
PAUSE_S = 0.01
"""Seconds between a client's requests, so that servers that apply deltas get the cores."""
POLL_S = 0.05
BAGS = {"user": [[1, 2, 500], [299]], "item": [[3], [0, 49]]}
COUNTS = np.array([[2, 1], [1, 2]])
"""Number of changed rows in the bags, by example and key."""


@pytest.fixture
def ranks() -> int:
    """Returns the number of ranks of the model.

    With more than one, each worker compiles its lookups, which takes a second.
    """
    return 1


@pytest.fixture
def store(tmp_path: Path, ranks: int) -> Path:
    store = tmp_path / "store"
    publish_values(store, 0, ranks)
    return store


def publish_values(store: Path, value: float, ranks: int) -> int:
    """Publishes a version in which every value is ``value``."""
    weights = {
        f"ebc.embedding_bags.{name}.weight": torch.full((rows, DIM), value, dtype=torch.float32)
        for name, rows in ROWS.items()
    }
    tables = [TableSpec(name, rows, DIM, (name,), "sum", "float32") for name, rows in ROWS.items()]
    return publish(
        weights, store, model="m", tables=tables, sharding="row_wise", world_size=ranks
    ).version


def push(writer: DeltaWriter, seq: int) -> None:
    """Pushes delta ``seq``, in which every value of the changed rows is its seq."""
    changes = {
        name: (np.arange(count), np.full((count, DIM), seq, np.float32))
        for name, count in CHANGED.items()
    }
    assert writer.push_rows(changes, step=10 * seq) == seq


def wait_until(is_true: Callable[[], Any]) -> None:
    ends_s = time.monotonic() + WAIT_S_MAX
    while True:
        with suppress(httpx.TransportError):  # the worker was killed meanwhile
            if is_true():
                return
        assert time.monotonic() < ends_s
        time.sleep(POLL_S)


class Callers:
    """Clients over REST and gRPC that check that each result has the values of its seq."""

    def __init__(self, server: Running, undone: Mapping[int, int] | None = None) -> None:
        """Starts the clients.

        Args:
            undone: seq of each undo to the seq that it reverts to.
        """
        self._undone = undone or {}
        self.wrong: list[str] = []
        self.failures: list[str] = []
        self.seqs: set[int] = set()
        self.last_seq = 0
        self._stop = threading.Event()
        options: dict[str, Any] = {"retries": 5, "timeout_s": ANSWER_S_MAX}
        clients = [EmbedClient(server.http, **options), GrpcEmbedClient(server.grpc, **options)]
        self._threads = [
            threading.Thread(target=self._send_requests, args=(one,)) for one in clients
        ]
        for thread in self._threads:
            thread.start()

    def _send_requests(self, client: EmbedClient | GrpcEmbedClient) -> None:
        last = 0
        with client:
            while not self._stop.wait(PAUSE_S):
                try:
                    result = client.embed(BAGS)
                except EmbedServeClientError as error:  # the worker was killed
                    self.failures.append(repr(error))
                    continue
                seq = result.seq
                value = self._undone.get(seq or 0, seq or 0)
                expected = np.repeat(COUNTS * value, DIM, axis=1)
                if seq is None or not (result.values == expected).all():
                    self.wrong.append(f"seq {seq}: {result.values.tolist()}")
                    continue
                self.seqs.add(seq)
                self.last_seq = max(self.last_seq, seq)
                if seq < last:
                    self.wrong.append(f"seq {seq} after {last}")
                last = seq

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT_S_MAX)
