"""What an operator asks, measured: pauses, workers, the memory of a second server, huge pages."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import load
import running
from measure import bodies_of
from servers.base import Server
from servers.constants import ConstantHttp
from servers.embedserve import EmbedServe
from workloads import Tables, Workload, workload

BOTH_CORES = "0,1"
ROUNDS = 3
KILL_AFTER_S = 3.0
PAUSES_S = 60.0


def script_of(server: Server, work: Workload, folder: str, way_number: int = 1) -> Path:
    way = server.ways[way_number]
    bodies = bodies_of(server, way, work)
    path = Path(folder) / "requests.lua"
    load.lua(path, way.path, bodies, [server.headers(way, body) for body in bodies])
    return path


def pauses() -> dict[str, Any]:
    """60 s of `small` at 64 connections: the longest request, and of a constant reply, which is
    what the machine itself does; and how many were over 20 ms in the server, as it counts them."""
    work = workload("small", "uniform")
    work.tables.make()
    found: dict[str, Any] = {}
    for server in (EmbedServe(), ConstantHttp("protobuf")):
        is_ours = server.name == "embedserve"
        with running.running(server, work), tempfile.TemporaryDirectory() as folder:
            script = script_of(server, work, folder, 1 if is_ours else 0)
            load.http(script, running.PORT, 64, 2)
            before = _paused() if is_ours else 0.0
            figures = load.http(script, running.PORT, 64, PAUSES_S).as_dict()
            if is_ours:
                found["over_20_ms_in_the_server"] = _paused() - before
        found |= {f"{server.name}: {name}": value for name, value in figures.items()}
    return found


def _paused() -> float:
    """Requests that took the server over 20 ms so far, from their decoding to their answer."""
    samples, name = running.metrics(), "embedserve_request_seconds"
    rest = '{protocol="rest"}'
    within = samples[f'{name}_bucket{{le="0.02",protocol="rest"}}']
    return samples[f"{name}_count{rest}"] - within


def workers() -> dict[str, Any]:
    """One worker and two on both cores, load included; then one of two is killed under load."""
    work = workload("small", "uniform")
    work.tables.make()
    rates: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS):
            for count in rates:
                server = EmbedServe("--workers", str(count))
                with running.running(server, work, BOTH_CORES):
                    script = script_of(server, work, folder, 0)
                    load.http(script, running.PORT, 64, 1)
                    # The load is on both cores, too, as the servers are.
                    rates[count].append(_unpinned(script, 64, 5))
        killed = _kill_one(work)
    medians = {f"rate_of_{count}": statistics.median(all_) for count, all_ in rates.items()}
    return {**medians, "two_of_one": medians["rate_of_2"] / medians["rate_of_1"], **killed}


def _unpinned(script: Path, connections: int, seconds: float) -> float:
    core, load.LOAD_CORE = load.LOAD_CORE, BOTH_CORES
    try:
        return load.http(script, running.PORT, connections, seconds).rate
    finally:
        load.LOAD_CORE = core


def _kill_one(work: Workload) -> dict[str, Any]:
    """Clients that ask one request at a time on connections of their own, and what they lost."""
    import httpx

    server = EmbedServe("--workers", "2")
    way = server.ways[0]
    body = server.body(way, work, work.requests[0])
    url = f"http://127.0.0.1:{running.PORT}{way.path}"
    stop, lost, answered = threading.Event(), [], []

    def ask() -> None:
        with httpx.Client(timeout=10) as client:
            while not stop.is_set():
                try:
                    client.post(url, content=body).raise_for_status()
                    answered.append(time.perf_counter())
                except httpx.HTTPError as error:
                    lost.append(type(error).__name__)

    with running.running(server, work, BOTH_CORES) as process:
        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        try:
            time.sleep(KILL_AFTER_S)
            victim = _children(process.pid)[0]
            os.kill(victim, signal.SIGKILL)
            start = time.perf_counter()
            _until(lambda: _ready_workers() < 2, 60)
            back_s = _until(lambda: _ready_workers() == 2, 60) - start
            time.sleep(1)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    return {
        "lost_when_one_of_two_was_killed": len(lost),
        "of_clients": 8,
        "answered": len(answered),
        "seconds_until_two_again": back_s,
    }


def _children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed]


def _ready_workers() -> float:
    try:
        return running.metrics()["embedserve_workers"]
    except OSError:  # the one that was asked is the one that died
        return 0.0


def _until(is_true: Callable[[], bool], seconds: float) -> float:
    end = time.perf_counter() + seconds
    while not is_true():
        if time.perf_counter() > end:
            raise TimeoutError
        time.sleep(0.1)
    return time.perf_counter()


def memory() -> dict[str, Any]:
    """Two workers on the same mapped tables, after every table was read."""
    work = workload("bulk", "uniform")
    work.tables.make()
    server = EmbedServe("--workers", "2")
    with running.running(server, work, BOTH_CORES) as process:
        way = server.ways[1]
        for request in work.requests * 8:
            running.ask(server, way, work, request)
        sizes = [_memory(child) for child in _children(process.pid)]
    return {
        "table_mb": work.tables.count * work.tables.rows * work.tables.dim * 4 / 1e6,
        "private_mb": [private / 1e6 for private, _ in sizes],
        "pss_mb": [pss / 1e6 for _, pss in sizes],
    }


def _memory(pid: int) -> tuple[int, int]:
    """(private, proportional set size) in bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return sizes["Private_Clean"] + sizes["Private_Dirty"], sizes["Pss"]


def tables() -> dict[str, Any]:
    """`bulk` on 5.3 GB of tables: every row is read through its own page at first."""
    work = Workload("bulk", Tables("bulk", 26, 400_000, 128), "uniform")
    work.tables.make()
    found: dict[str, list[float]] = {"mapped": [], "resident": []}
    ready_s: dict[str, float] = {}
    for _ in range(ROUNDS):
        for held, latencies in found.items():
            server = EmbedServe("--tables", held)
            start = time.perf_counter()
            with (
                running.running(server, work) as process,
                tempfile.TemporaryDirectory() as folder,
            ):
                ready_s[held] = time.perf_counter() - start
                _read_the_files(work)
                script = script_of(server, work, folder)
                load.http(script, running.PORT, 1, 3)
                latencies.append(load.http(script, running.PORT, 1, 5).p50_ms or 0.0)
                assert process.poll() is None
    return {
        "table_mb": work.tables.count * work.tables.rows * work.tables.dim * 4 / 1e6,
        **{f"{held}_p50_ms": statistics.median(values) for held, values in found.items()},
        **{f"{held}_seconds_to_ready": seconds for held, seconds in ready_s.items()},
    }


def _read_the_files(work: Workload) -> None:
    """Into the page cache, so that mapped tables are compared warm."""
    files = [str(path) for path in work.tables.store.rglob("tables.safetensors")]
    subprocess.run(["cat", *files], stdout=subprocess.DEVNULL, check=True)
