"""Measures the servers on one workload in turn, round after round, and takes medians.

A round starts each server once, so that disturbances of the machine affect all servers alike. Each
way of requesting is compared with the exact sums before it is timed: a fast wrong result is no
figure.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import load
from load import Figures, Post
from running import ask, port_of, running
from servers.base import Server, Way
from workloads import Request, Workload

CHECKED = 3
BODIES_BYTES_MAX = 24 << 20
"""Bytes of the bodies in a wrk script, or of the messages or responses of a stream. Larger requests
are fewer."""
WARM_UP_S = 1.0


@dataclass(frozen=True)
class Row:
    """Medians over the rounds for one way of requesting, at a number of connections and streams.

    Attributes:
        streams: concurrent streams per connection.
    """

    server: str
    way: str
    connections: int
    streams: int
    figures: Figures


def concurrency(workload: Workload, way: Way) -> list[tuple[int, int]]:
    """Returns pairs of (connections, streams per connection)."""
    if way.protocol == "grpc-stream":
        return [(1, 1), (8, 1)]
    if workload.name != "small":
        return [(1, 1)]
    if way.protocol == "grpc":
        return [(64, 1), (8, 8), (1, 1)]
    return [(64, 1), (1, 1)]


def measure(
    servers: Sequence[Server], workload: Workload, rounds: int, seconds: float
) -> list[Row]:
    samples: dict[tuple[str, str, int, int], list[Figures]] = {}
    for number in range(rounds):
        for server in servers:
            round_said = f"{workload.name} {workload.ids} {number + 1}/{rounds}"
            print(f"{round_said}: {server.name}", file=sys.stderr)
            try:
                measured = _measure_server(server, workload, seconds, is_first=number == 0)
                for key, figures in measured:
                    samples.setdefault(key, []).append(figures)
            except (RuntimeError, AssertionError, subprocess.SubprocessError) as error:
                print(f"{server.name} is left out: {error}", file=sys.stderr)
    return [Row(*key, _median(figures)) for key, figures in samples.items()]


def _measure_server(
    server: Server, workload: Workload, seconds: float, *, is_first: bool
) -> list[tuple[tuple[str, str, int, int], Figures]]:
    measured = []
    with running(server, workload), tempfile.TemporaryDirectory() as folder:
        for way in server.ways:
            if way.protocol != "redis":
                _check(server, way, workload, CHECKED if is_first else 1)
            for connections, streams in concurrency(workload, way):
                drive = driver(server, way, workload, Path(folder), connections, streams)
                drive(WARM_UP_S)
                figures = drive(seconds)
                if figures.errors:
                    raise RuntimeError(f"{way.name}: {figures.errors} requests failed")
                measured.append(((server.name, way.name, connections, streams), figures))
    return measured


def _check(server: Server, way: Way, workload: Workload, requests: int) -> None:
    for request in workload.requests[:requests]:
        answer = ask(server, way, workload, request)
        if not server.name.startswith("constant"):
            workload.check(request, server.values(way, workload, answer))


def driver(
    server: Server, way: Way, workload: Workload, folder: Path, connections: int, streams: int
) -> Callable[[float], Figures]:
    """Returns a function that drives one way of a running server: seconds -> Figures."""
    port = port_of(way)
    if way.protocol == "http":
        script = folder / f"{way.name}.lua"
        if not script.exists():
            bodies = bodies_of(server, way, workload)
            load.lua(script, way.path, bodies, [server.headers(way, body) for body in bodies])
        return lambda seconds: load.http(script, port, connections, seconds)
    if way.protocol == "redis":
        keys = server.body(way, workload, typical(workload)).decode().split()
        rows = workload.tables.rows
        return lambda seconds: load.redis(port, keys, rows, connections, seconds)
    # h2load sends one body: the request whose number of ids is nearest to the mean.
    message = server.body(way, workload, typical(workload))
    body, log = folder / f"{way.name}.body", folder / "h2load.log"
    if way.protocol == "http-one":
        body.write_bytes(message)
        post = Post(body, way.headers, port, way.path, workload.answer_bytes, is_http1=True)
        return lambda seconds: load.h2load(post, log, connections, streams, seconds)
    message = load.framed(message)
    messages = 1
    if way.protocol == "grpc-stream":
        larger = max(len(message), workload.answer_bytes)
        messages = max(1, min(load.STREAM_MESSAGES, BODIES_BYTES_MAX // larger))
    body.write_bytes(message * messages)
    post = Post(body, load.GRPC_HEADERS, port, way.path, messages * workload.answer_bytes)

    def call(seconds: float) -> Figures:
        calls = load.h2load(post, log, connections, streams, seconds)
        if way.protocol == "grpc":
            return calls
        return Figures(calls.rate * messages, None, None, None, calls.errors)

    return call


def bodies_of(server: Server, way: Way, workload: Workload) -> list[bytes]:
    bodies: list[bytes] = []
    for request in workload.requests:
        bodies.append(server.body(way, workload, request))
        if sum(map(len, bodies)) > BODIES_BYTES_MAX:
            break
    return bodies


def typical(workload: Workload) -> Request:
    mean = statistics.mean(request.ids.size for request in workload.requests)
    return min(workload.requests, key=lambda request: abs(request.ids.size - mean))


def _median(figures: Sequence[Figures]) -> Figures:
    def middle(name: str) -> float | None:
        """Returns the median of the rounds that have the figure. Streams have no latencies."""
        values = [value for one in figures if (value := getattr(one, name)) is not None]
        return statistics.median(values) if values else None

    return Figures(middle("rate") or 0.0, middle("p50_ms"), middle("p99_ms"), middle("max_ms"), 0)
