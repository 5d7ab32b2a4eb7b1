"""Overload on `rank`: throughput of the server when offered four times its peak rate.

The load is an open loop: many connections send at a fixed rate, whether or not earlier requests are
finished. Peak is the rate of closed-loop connections, which send only after a response. Goodput is
the rate of successful responses under overload, as counted by the server.

Rejections are 429 or RESOURCE_EXHAUSTED. h2load offers the load over HTTP/1. Over gRPC open_loop.py
offers it, because it writes a call in one piece, and a separate caller times the rejections.

Over HTTP/1 a rejected request has been sent in full, 0.1 MB for a request of `rank`. The server
rejects it at the headers, but a client on the same host has written the body by then. Over gRPC a
rejected client starts with a small window, so that it does not send most bodies. The number of
finished requests and the CPU share of the load show whether all of the load arrived.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import load
import running
from measure import typical
from servers.base import Way
from servers.embedserve import EmbedServe
from workloads import workload

OVERLOAD = 4
PEAK_CONNECTIONS = 16
OVERLOAD_CONNECTIONS = 1000
"""Connections of the overload, more than the 262 requests of `rank` that the server's queue holds.
With fewer the server would reject none."""
SAMPLE_S = 0.25
OPEN_LOOP = Path(__file__).parent / "open_loop.py"
PROBE = Path(__file__).parent / "probe.py"
PROBE_PAUSE_S = 0.02
PROBE_NICENESS = "-10"
"""Niceness of the probe. Without the permission, `nice` warns and runs it all the same."""

Overload = dict[str, float | None]


@dataclass
class Times:
    """Latencies of requests by outcome.

    Attributes:
        ok_ms: milliseconds of successful requests.
        refused_ms: milliseconds of rejected requests.
        others: number of requests with another outcome.
    """

    ok_ms: list[float] = field(default_factory=list)
    refused_ms: list[float] = field(default_factory=list)
    others: int = 0


@dataclass(frozen=True)
class Load:
    """Outcome of the offered load.

    Attributes:
        ok: number of successful requests.
        refused: number of rejected requests.
        others: number of requests with another outcome.
        cpu_s: CPU seconds of the load generator.
        times: latencies, where they are known.
    """

    ok: int
    refused: int
    others: int
    cpu_s: float
    times: Times

    @property
    def ended(self) -> int:
        """Number of requests that succeeded or were rejected."""
        return self.ok + self.refused


def measure(seconds: int = 16) -> dict[str, Overload]:
    """Returns the figures of both protocols."""
    server = EmbedServe()
    return {way.name: _measure(server, way, seconds) for way in server.ways[1:3]}


def _measure(server: EmbedServe, way: Way, seconds: int) -> Overload:
    work = workload("rank", "uniform")
    work.tables.make()
    is_grpc = way.protocol == "grpc"
    with running.running(server, work) as process, tempfile.TemporaryDirectory() as folder:
        message = server.body(way, work, typical(work))
        plain, body, log = (Path(folder) / name for name in ("message", "body", "log"))
        plain.write_bytes(message)
        body.write_bytes(load.framed(message) if is_grpc else message)
        headers = load.GRPC_HEADERS if is_grpc else way.headers
        port = running.port_of(way)
        post = load.Post(body, headers, port, way.path, work.answer_bytes, not is_grpc)

        def counted(drive: Callable[[], Load], seconds: float) -> tuple[float, Load]:
            before = _counted_ok(way)
            ended = drive()
            return (_counted_ok(way) - before) / seconds, ended

        def closed(seconds: int) -> float:
            command = post.command(PEAK_CONNECTIONS, 1, seconds, log)
            return counted(lambda: _h2load(command, log, seconds), seconds)[0]

        closed(2)
        peak = closed(seconds // 2)
        offered = OVERLOAD * peak
        offer = offer_grpc if is_grpc else _offer_http
        with _memory(process.pid) as memory, _probe(way, plain, is_grpc) as probed:
            goodput, ended = counted(lambda: offer(post, log, offered, seconds), seconds)
        peak = max(peak, closed(seconds // 2))
    times = probed if is_grpc else ended.times
    half = len(memory) // 2
    return {
        "peak_per_s": peak,
        "offered_per_s": offered,
        "ended_per_s": ended.ended / seconds,
        "ended_of_peak": ended.ended / seconds / peak,
        "ended_neither_way": ended.others + probed.others,
        "load_cpu_share": ended.cpu_s / seconds,
        "goodput_per_s": goodput,
        "goodput_of_peak": goodput / peak,
        "refused_p50_ms": _at(times.refused_ms, 0.5),
        "refused_p99_ms": _at(times.refused_ms, 0.99),
        "answered_p50_ms": _at(times.ok_ms, 0.5),
        "answered_p99_ms": _at(times.ok_ms, 0.99),
        "memory_first_half_mb": max(memory[:half]) / 1e6,
        "memory_second_half_mb": max(memory[half:]) / 1e6,
    }


def _offer_http(post: load.Post, log: Path, rate: float, seconds: int) -> Load:
    command = post.command(OVERLOAD_CONNECTIONS, 1, seconds, log)
    return _h2load([*command, f"--rps={rate / OVERLOAD_CONNECTIONS:.3f}"], log, seconds)


def offer_grpc(post: load.Post, log: Path, rate: float, seconds: int) -> Load:
    """Offers calls at a rate and counts their outcomes, without latencies."""
    arguments = (post.port, post.path, post.body, post.answer_bytes, OVERLOAD_CONNECTIONS)
    command = [sys.executable, str(OPEN_LOOP), *map(str, arguments), str(rate), str(seconds)]
    before_s = _children_cpu_s()
    ended = json.loads(load.run(command, seconds))
    used_s = _children_cpu_s() - before_s
    return Load(ended["ok"], ended["refused"], ended["other"], used_s, Times())


def _h2load(command: list[str], log: Path, seconds: int) -> Load:
    log.unlink(missing_ok=True)
    before_s = _children_cpu_s()
    load.run(command, seconds)
    used_s, times = _children_cpu_s() - before_s, Times()
    for status, ms in load.read_log(log):
        if status in ("200", "429"):
            ended = times.ok_ms if status == "200" else times.refused_ms
            ended.append(ms)
        else:
            times.others += 1
    return Load(len(times.ok_ms), len(times.refused_ms), times.others, used_s, times)


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _counted_ok(way: Way) -> float:
    """Returns the number of successful requests, as counted by the server."""
    protocol = "grpc" if way.protocol == "grpc" else "rest"
    wanted = f'embedserve_requests_total{{outcome="OK",protocol="{protocol}"}}'
    return running.metrics().get(wanted, 0.0)


@contextmanager
def _probe(way: Way, message: Path, is_needed: bool) -> Iterator[Times]:
    """Runs a caller during the block that periodically makes a call and records its outcome."""
    times = Times()
    if not is_needed:
        yield times
        return
    command = [sys.executable, str(PROBE), str(running.port_of(way)), way.path, str(message)]
    command = ["nice", "-n", PROBE_NICENESS, *command, str(PROBE_PAUSE_S)]
    with subprocess.Popen(
        load.pinned(load.LOAD_CORE, command), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield times
        finally:
            process.terminate()
        said, _ = process.communicate(timeout=60)
    for line in said.splitlines():
        status, ms = line.split()
        if status == "OK":
            times.ok_ms.append(float(ms))
        elif status == "RESOURCE_EXHAUSTED":
            times.refused_ms.append(float(ms))
        else:
            times.others += 1


@contextmanager
def _memory(pid: int) -> Iterator[list[int]]:
    """Samples the bytes of anonymous memory of a process during the block."""
    status, stop = Path(f"/proc/{pid}/status"), threading.Event()
    samples: list[int] = []

    def sample() -> None:
        while not stop.wait(SAMPLE_S):
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
            samples.append(int(fields["RssAnon"].split()[0]) * 1024)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()


def _at(values: Sequence[float], share: float) -> float | None:
    return load.quantile(values, share) if values else None
