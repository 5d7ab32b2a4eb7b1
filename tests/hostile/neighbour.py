"""A well-behaved client beside the hostile ones, and what the server's process holds meanwhile.

One thread asks for health over HTTP/1.1, then embeds over gRPC, over and over, each on a connection
of its own that stays open.
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, perf_counter
from typing import Self

import numpy as np
from hostile import frames as f
from hostile.peer import Peer

from embedserve_proto import embedding_pb2 as pb

PAUSE_S = 0.005
ROUND_S_MAX = 30.0
REFRESH_STREAMS = 1000


def anonymous_kib(pid: int) -> int:
    """Private memory of a process: the tables' pages, which are a file's, do not count."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise AssertionError("no RssAnon")


def open_sockets(pid: int) -> int:
    count = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            count += str(link.readlink()).startswith("socket:")
        except FileNotFoundError:
            continue
    return count


def embed_request(ids: Sequence[int] | np.ndarray) -> bytes:
    """One example for each of ``ids``."""
    request = pb.EmbedRequest(
        keys=["user"],
        ids_bytes=np.array(ids, "<i8").tobytes(),
        lengths_bytes=np.ones(len(ids), "<i4").tobytes(),
    )
    return request.SerializeToString()


@dataclass
class Seen:
    """What the neighbour met since `Neighbour.begin`."""

    rounds: int = 0
    slowest_s: float = 0.0
    anonymous_kib_max: int = 0
    failures: list[str] = field(default_factory=list)


class Neighbour:
    """Runs as a context; a failure is kept and told, and ends nothing."""

    def __init__(self, http_port: int, grpc_port: int, pid: int, rows: np.ndarray) -> None:
        self._http_port = http_port
        self._grpc_port = grpc_port
        self._pid = pid
        self._rows = rows
        self._seen = Seen()
        self._done = threading.Condition()
        self._rounds = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()

    def begin(self) -> None:
        """Forgets what was seen; returns after a round of it."""
        with self._done:
            self._seen = Seen()
        self._wait_for_a_round()

    def seen(self) -> Seen:
        """What was seen since, a whole round that begins now included."""
        self._wait_for_a_round()
        with self._done:
            return self._seen

    def _wait_for_a_round(self) -> None:
        """A round that is under way does not count."""
        with self._done:
            wanted = self._rounds + 2
            assert self._done.wait_for(lambda: self._rounds >= wanted, ROUND_S_MAX), (
                f"the neighbour has no answer for {ROUND_S_MAX:g} s: {self._seen.failures[:3]}"
            )

    def _run(self) -> None:
        number = 0
        while not self._stopped.is_set():
            health = http.client.HTTPConnection("127.0.0.1", self._http_port, timeout=20)
            try:
                with closing(health), closing(Peer(self._grpc_port)) as peer:
                    for stream in range(1, 2 * REFRESH_STREAMS, 2):
                        self._round(health, peer, stream, number)
                        number += 1
                        if self._stopped.wait(PAUSE_S):
                            return
            except Exception as error:
                self._tell(0.0, f"{type(error).__name__}: {error}")
                self._stopped.wait(PAUSE_S)

    def _round(
        self, health: http.client.HTTPConnection, peer: Peer, stream: int, number: int
    ) -> None:
        start_s = perf_counter()
        health.request("GET", "/health/live")
        answer = health.getresponse()
        live = answer.status, answer.read()
        between_s = perf_counter()
        ids = [number % len(self._rows), (number * 7) % len(self._rows)]
        peer.send(f.call(stream, embed_request(ids)))
        values = embedded(peer, stream)
        slowest_s = max(between_s - start_s, perf_counter() - between_s)
        failure = ""
        if live != (200, b'{"status":"live"}'):
            failure = f"health answered {live}"
        elif not np.array_equal(values, self._rows[ids]):
            failure = f"embed of {ids} answered {values}"
        self._tell(slowest_s, failure)

    def _tell(self, slowest_s: float, failure: str) -> None:
        with self._done:
            seen = self._seen
            seen.slowest_s = max(seen.slowest_s, slowest_s)
            seen.anonymous_kib_max = max(seen.anonymous_kib_max, anonymous_kib(self._pid))
            seen.rounds += 1
            if failure:
                seen.failures.append(f"{monotonic():.3f}: {failure}")
            self._rounds += 1
            self._done.notify_all()


def embedded(peer: Peer, stream: int) -> np.ndarray:
    """The values that a call is answered with, one row for each example."""
    answer = peer.answer(stream)
    assert answer.reset_code is None
    assert answer.grpc_status == 0, answer.grpc_message
    response = pb.EmbedResponse.FromString(answer.body[5:])
    peer.answers.pop(stream)
    return np.frombuffer(response.values, "<f4").reshape(response.batch_size, -1)
