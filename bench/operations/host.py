"""Measurements for operators: pauses, the memory of a second server, and huge pages."""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import load
import running
from measure import bodies_of
from processes import children, memory_bytes
from servers.base import Server
from servers.constants import ConstantHttp
from servers.embedserve import EmbedServe
from workloads import Tables, Workload, workload

ROUNDS = 3
PAUSES_S = 60.0


def script_of(server: Server, work: Workload, folder: str, way_number: int = 1) -> Path:
    """Writes a wrk script that sends requests over one of the server's ways."""
    way = server.ways[way_number]
    bodies = bodies_of(server, way, work)
    path = Path(folder) / "requests.lua"
    load.lua(path, way.path, bodies, [server.headers(way, body) for body in bodies])
    return path


def pauses() -> dict[str, Any]:
    """Runs `small` at 64 connections for 60 s, and returns the longest requests.

    The same load on a constant reply shows the pauses of the machine itself. The server's own
    histogram counts the requests that took it over 20 ms.
    """
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
    """Returns the number of requests so far that took over 20 ms from decoding to response."""
    samples, name = running.metrics(), "embedserve_request_seconds"
    rest = '{protocol="rest"}'
    within = samples[f'{name}_bucket{{le="0.02",protocol="rest"}}']
    return samples[f"{name}_count{rest}"] - within


def memory() -> dict[str, Any]:
    """Returns the memory of two workers on the same mapped tables, after every table was read."""
    work = workload("bulk", "uniform")
    work.tables.make()
    server = EmbedServe("--workers", "2")
    with running.running(server, work, running.BOTH_CORES) as process:
        way = server.ways[1]
        for request in work.requests * 8:
            running.ask(server, way, work, request)
        sizes = [memory_bytes(child) for child in children(process.pid)]
    return {
        "table_mb": work.tables.count * work.tables.rows * work.tables.dim * 4 / 1e6,
        "private_mb": [(one["Private_Clean"] + one["Private_Dirty"]) / 1e6 for one in sizes],
        "pss_mb": [one["Pss"] / 1e6 for one in sizes],
    }


def tables() -> dict[str, Any]:
    """Measures mapped against resident tables: `bulk` on 5.3 GB, where every row has its own page
    at first."""
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
    """Reads the tables into the page cache, so that mapped tables are compared warm."""
    files = [str(path) for path in work.tables.store.rglob("tables.safetensors")]
    subprocess.run(["cat", *files], stdout=subprocess.DEVNULL, check=True)
