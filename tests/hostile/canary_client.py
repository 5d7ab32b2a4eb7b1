"""A well-behaved canary client that runs during attacks, and the memory of the server's process.

The canary client is a process of its own, so that no attacker takes its interpreter. It requests
health over HTTP/1.1 and then embeds over gRPC, over and over, each on a connection that stays open.
While no test runs it pauses for REST_S between rounds, so that other tests have the cores.
"""

import http.client
import multiprocessing
import ssl
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic, perf_counter
from typing import Self

import numpy as np
from hostile import frames as f
from hostile.peer import WAIT_S_MAX, Peer

from embedserve_proto import embedding_pb2 as pb

PAUSE_S, SAMPLES = 0.005, 4
"""Seconds between two readings of the server's memory during a test, and readings per round. A
stalled server shows as well with a round every 20 ms; short peaks of memory would not."""
REST_S = 20.0
"""Pause between two rounds while no test runs. The server closes connections after 75 idle s."""
ROUND_S_MAX = 150.0
REFRESH_STREAMS = 1000
BEGIN, SEEN = "begin", "seen"


def anonymous_kib(pid: int) -> int:
    """Returns the private memory of a process in KiB, without the tables' file-backed pages."""
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


def uncrowded_s(pid: int) -> float:
    """Reads a clock that stops while the process's event loop, or this process, waits for a core
    that another process has. The clock runs on while something else keeps the event loop busy.

    The waiting time comes from proc(5), schedstat: nanoseconds that a thread, here the first, spent
    on a run queue.
    """
    waited_ns = 0
    for who in (str(pid), "self"):
        waited_ns += int(Path(f"/proc/{who}/schedstat").read_text().split()[1])
    return perf_counter() - waited_ns / 1e9


def embed_request(ids: Sequence[int] | np.ndarray) -> bytes:
    """Returns a request with one example for each of ``ids``."""
    request = pb.EmbedRequest(
        keys=["user"],
        ids_bytes=np.array(ids, "<i8").tobytes(),
        lengths_bytes=np.ones(len(ids), "<i4").tobytes(),
    )
    return request.SerializeToString()


@dataclass
class Seen:
    """Measurements of the canary client since `Neighbour.begin`.

    Attributes:
        sockets: sockets that the server had open at the end of the first round, including the
            canary client's two.
    """

    rounds: int = 0
    sockets: int = 0
    health_s_max: float = 0.0
    embed_s_max: float = 0.0
    anonymous_kib_max: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def slowest_s(self) -> float:
        return max(self.health_s_max, self.embed_s_max)


class Neighbour:
    """Runs the canary client as a context manager. A failure is recorded and ends nothing."""

    def __init__(
        self, http_port: int, grpc_port: int, pid: int, rows: np.ndarray, root: str = ""
    ) -> None:
        """Creates the client; ``root`` is the file of the root certificate to trust, over TLS."""
        context = multiprocessing.get_context("spawn")
        self._channel, self._theirs = context.Pipe()
        arguments = (http_port, grpc_port, pid, rows, root, self._theirs)
        self._process = context.Process(target=_run, args=arguments)

    def __enter__(self) -> Self:
        self._process.start()
        self._theirs.close()
        return self

    def __exit__(self, *error: object) -> None:
        self._channel.close()
        self._process.join(ROUND_S_MAX)

    def begin(self) -> Seen:
        """Discards the previous measurements; returns the measurements of one new round."""
        return self._request(BEGIN)

    def seen(self) -> Seen:
        """Returns the measurements since `begin`, including a whole round that starts now."""
        return self._request(SEEN)

    def _request(self, what: str) -> Seen:
        self._channel.send(what)
        assert self._channel.poll(ROUND_S_MAX), (
            f"the canary client has no response for {ROUND_S_MAX:g} s"
        )
        seen = self._channel.recv()
        assert isinstance(seen, Seen)
        return seen


def _run(
    http_port: int,
    grpc_port: int,
    pid: int,
    rows: np.ndarray,
    root: str,
    channel: "Connection[Seen, str]",
) -> None:
    """Runs rounds until the channel closes. Replies to a request after a round that began later."""
    seen, requested, pauses_s = Seen(), "", [REST_S]
    tls = ssl.create_default_context(cafile=root) if root else None
    for health_s, embed_s, failure in _rounds(http_port, grpc_port, pid, rows, tls):
        seen.rounds += 1
        seen.health_s_max = max(seen.health_s_max, health_s)
        seen.embed_s_max = max(seen.embed_s_max, embed_s)
        seen.anonymous_kib_max = max(seen.anonymous_kib_max, anonymous_kib(pid))
        if failure:
            seen.failures.append(f"{monotonic():.3f}: {failure}")
        if requested:
            if requested == BEGIN:
                # Both connections are open at this point; they are reopened after other rounds.
                seen.sockets = open_sockets(pid)
            channel.send(seen)
            pauses_s = [PAUSE_S] * SAMPLES if requested == BEGIN else [REST_S]
            requested = ""
        try:
            for pause_s in pauses_s:
                if channel.poll(pause_s):
                    requested = channel.recv()
                    break
                seen.anonymous_kib_max = max(seen.anonymous_kib_max, anonymous_kib(pid))
        except EOFError:
            return
        if requested == BEGIN:
            seen = Seen()


Round = tuple[float, float, str]
"""``uncrowded_s`` until the health response and until the embed response, and the error or ""."""


def _rounds(
    http_port: int, grpc_port: int, pid: int, rows: np.ndarray, tls: ssl.SSLContext | None
) -> Iterator[Round]:
    """Yields the results of consecutive rounds."""
    number = 0
    while True:
        if tls is None:
            health = http.client.HTTPConnection("127.0.0.1", http_port, timeout=WAIT_S_MAX)
        else:
            health = http.client.HTTPSConnection(
                "127.0.0.1", http_port, timeout=WAIT_S_MAX, context=tls
            )
        try:
            with closing(health), closing(Peer(grpc_port, tls=tls)) as peer:
                for stream in range(1, 2 * REFRESH_STREAMS, 2):
                    yield _round(health, peer, stream, number, pid, rows)
                    number += 1
        except Exception as error:
            yield 0.0, 0.0, f"{type(error).__name__}: {error}"


def _round(
    health: http.client.HTTPConnection,
    peer: Peer,
    stream: int,
    number: int,
    pid: int,
    rows: np.ndarray,
) -> Round:
    start_s = uncrowded_s(pid)
    health.request("GET", "/health/live")
    response = health.getresponse()
    live = response.status, response.read()
    between_s = uncrowded_s(pid)
    ids = [number % len(rows), (number * 7) % len(rows)]
    peer.send(f.call(stream, embed_request(ids)))
    values = embedded(peer, stream)
    times = between_s - start_s, uncrowded_s(pid) - between_s
    if live != (200, b'{"status":"live"}'):
        return *times, f"health answered {live}"
    if not np.array_equal(values, rows[ids]):
        return *times, f"embed of {ids} answered {values}"
    return *times, ""


def embedded(peer: Peer, stream: int) -> np.ndarray:
    """Returns the values in the response to a call, one row for each example."""
    response = peer.response(stream)
    assert response.reset_code is None
    assert response.grpc_status == 0, response.grpc_message
    message = pb.EmbedResponse.FromString(response.body[5:])
    peer.responses.pop(stream)
    return np.frombuffer(message.values, "<f4").reshape(message.batch_size, -1)
