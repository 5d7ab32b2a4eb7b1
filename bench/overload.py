"""Overload: four times what the server can do is offered on `rank`, and it keeps its pace.

Open loop: h2load's many connections each send at a fixed rate, so that requests come whether or
not others were answered. Peak is what as many connections get that send no faster than they are
answered. Goodput is what is answered under overload, as the server counts it; refusals are 429 or
RESOURCE_EXHAUSTED. Of gRPC h2load sees no statuses, so their times come from a caller beside it.
What is refused has been sent, and is read: 0.1 MB for each request of `rank`.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
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
RATE_PER_CONNECTION = {"http": 8, "grpc": 3}
"""More connections than requests that the server holds, or none is refused."""
SAMPLE_S = 0.25
PROBE_PAUSE_S = 0.05

Overload = dict[str, float | None]


@dataclass
class Times:
    """Milliseconds of the requests that were answered, and of those that were refused."""

    ok_ms: list[float] = field(default_factory=list)
    refused_ms: list[float] = field(default_factory=list)


def measure(seconds: int = 16) -> dict[str, Overload]:
    """The figures of both protocols."""
    server = EmbedServe()
    return {way.name: _measure(server, way, seconds) for way in server.ways[1:3]}


def _measure(server: EmbedServe, way: Way, seconds: int) -> Overload:
    work = workload("rank", "uniform")
    work.tables.make()
    is_grpc = way.protocol == "grpc"
    with running.running(server, work) as process, tempfile.TemporaryDirectory() as folder:
        message = server.body(way, work, typical(work))
        body, log = Path(folder) / "body", Path(folder) / "log"
        body.write_bytes(load.framed(message) if is_grpc else message)

        def drive(connections: int, seconds: int, rate: float | None) -> tuple[float, Times]:
            before = _counted_ok(way)
            times = _drive(way, body, log, connections, seconds, rate)
            return (_counted_ok(way) - before) / seconds, times

        drive(PEAK_CONNECTIONS, 2, None)
        peak, _ = drive(PEAK_CONNECTIONS, seconds // 2, None)
        offered = OVERLOAD * peak
        connections = round(offered / RATE_PER_CONNECTION[way.protocol])
        with _memory(process.pid) as memory, _probes(way, message, is_grpc) as probed:
            goodput, ended = drive(connections, seconds, offered)
        again, _ = drive(PEAK_CONNECTIONS, seconds // 2, None)
    times = probed if is_grpc else ended
    half = len(memory) // 2
    return {
        "peak_per_s": max(peak, again),
        "offered_per_s": offered,
        "ended_per_s": (len(ended.ok_ms) + len(ended.refused_ms)) / seconds,
        "goodput_per_s": goodput,
        "goodput_of_peak": goodput / max(peak, again),
        "refused_p50_ms": _at(times.refused_ms, 0.5),
        "refused_p99_ms": _at(times.refused_ms, 0.99),
        "answered_p50_ms": _at(times.ok_ms, 0.5),
        "answered_p99_ms": _at(times.ok_ms, 0.99),
        "memory_first_half_mb": max(memory[:half]) / 1e6,
        "memory_second_half_mb": max(memory[half:]) / 1e6,
    }


def _drive(
    way: Way, body: Path, log: Path, connections: int, seconds: int, rate: float | None
) -> Times:
    log.unlink(missing_ok=True)
    port = running.port_of(way)
    command = ["h2load", "-t1", f"-c{connections}", "-m1", f"-D{seconds:g}", "-w24", "-W24"]
    headers = dict(way.headers)
    if way.protocol == "grpc":
        headers = {"content-type": "application/grpc", "te": "trailers"}
    else:
        command.append("--h1")
    if rate is not None:
        command.append(f"--rps={rate / connections:.3f}")
    for name, value in headers.items():
        command += ["-H", f"{name}: {value}"]
    command += ["-d", str(body), f"--log-file={log}", f"http://127.0.0.1:{port}{way.path}"]
    load.run(command, seconds)
    times = Times()
    for line in log.read_text().splitlines():
        _, status, time_us = line.split("\t")[:3]
        {"200": times.ok_ms, "429": times.refused_ms}[status].append(int(time_us) / 1e3)
    return times


def _counted_ok(way: Way) -> float:
    """Requests that the server has answered, as it counts them."""
    protocol = "grpc" if way.protocol == "grpc" else "rest"
    wanted = f'embedserve_requests_total{{outcome="OK",protocol="{protocol}"}}'
    return running.metrics().get(wanted, 0.0)


@contextmanager
def _probes(way: Way, message: bytes, is_needed: bool) -> Iterator[Times]:
    """Meanwhile one caller asks now and then, and sees how each of its calls ends."""
    times, stop = Times(), threading.Event()

    def ask() -> None:
        import grpc

        options = [("grpc.max_receive_message_length", -1)]
        target = f"127.0.0.1:{running.port_of(way)}"
        with grpc.insecure_channel(target, options=options) as channel:
            call = channel.unary_unary(way.path)
            while not stop.wait(PROBE_PAUSE_S):
                start = time.perf_counter()
                try:
                    call(message, timeout=30)
                    ended = times.ok_ms
                except grpc.RpcError as error:
                    if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                        raise
                    ended = times.refused_ms
                ended.append((time.perf_counter() - start) * 1e3)

    thread = threading.Thread(target=ask)
    if is_needed:
        thread.start()
    try:
        yield times
    finally:
        stop.set()
        if is_needed:
            thread.join()


@contextmanager
def _memory(pid: int) -> Iterator[list[int]]:
    """Bytes of memory that are the process's own, sampled while a block runs."""
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
    ordered = sorted(values)
    return ordered[int(share * (len(ordered) - 1))] if ordered else None
