"""Two workers against one on both cores, shared with the load; and the kill of one worker under
load."""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import load
import running
from measure import driver
from processes import children
from servers.base import Way
from servers.embedserve import GRPC, JSON, ONE_MESSAGE, EmbedServe
from workloads import Workload, workload

ROUNDS = 3
CONNECTIONS = 64
CALLERS = 8
KILL_AFTER_S = 3.0
READY_S_MAX = 120
"""Seconds until two workers are ready again, at most."""
WAYS = (JSON, ONE_MESSAGE, GRPC)
"""Ways that are measured. h2load sends the last two, and uses about the same CPU time for both."""


def measure(rounds: int = ROUNDS, seconds: float = 5) -> dict[str, dict[str, Any]]:
    """Returns the figures of each way."""
    work = workload("small", "uniform")
    work.tables.make()
    rates: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        for count in (1, 2):
            for way, rate in _rates(work, count, seconds):
                rates.setdefault((way.name, count), []).append(rate)
    found: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        one, two = (statistics.median(rates[way.name, count]) for count in (1, 2))
        found[way.name] = {
            "rate_of_1": one,
            "rate_of_2": two,
            "two_of_one": two / one,
            **_kill_one(work, way),
        }
    return found


def _rates(work: Workload, count: int, seconds: float) -> Iterator[tuple[Way, float]]:
    """Yields the rate of each way with ``count`` workers. Server and load share both cores."""
    server = EmbedServe("--workers", str(count))
    with (
        running.running(server, work, running.BOTH_CORES),
        tempfile.TemporaryDirectory() as folder,
        _unpinned_load(),
    ):
        for way in WAYS:
            drive = driver(server, way, work, Path(folder), CONNECTIONS, 1)
            drive(1)
            figures = drive(seconds)
            if figures.errors:
                raise RuntimeError(f"{way.name}: {figures.errors} requests failed")
            yield way, figures.rate


@contextmanager
def _unpinned_load() -> Iterator[None]:
    core, load.LOAD_CORE = load.LOAD_CORE, running.BOTH_CORES
    try:
        yield
    finally:
        load.LOAD_CORE = core


def _kill_one(work: Workload, way: Way) -> dict[str, Any]:
    """Kills one of two workers under load, and counts the lost requests. Each caller sends one
    request at a time on its own connection."""
    server = EmbedServe("--workers", "2")
    body = server.body(way, work, work.requests[0])
    stop = threading.Event()
    ended: list[str | None] = []

    def ask() -> None:
        with (_grpc_caller if way is GRPC else _http_caller)(way, body) as call:
            while not stop.is_set():
                ended.append(call())

    with running.running(server, work, running.BOTH_CORES) as process:
        threads = [threading.Thread(target=ask) for _ in range(CALLERS)]
        for thread in threads:
            thread.start()
        try:
            time.sleep(KILL_AFTER_S)
            os.kill(children(process.pid)[0], signal.SIGKILL)
            start = time.perf_counter()
            _until(lambda: _ready_workers() < 2, READY_S_MAX)
            back_s = _until(lambda: _ready_workers() == 2, READY_S_MAX) - start
            time.sleep(1)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    return {
        "lost_when_one_of_two_was_killed": len(ended) - ended.count(None),
        "of_clients": CALLERS,
        "answered": ended.count(None),
        "seconds_until_two_again": back_s,
    }


Caller = Callable[[], str | None]
"""Sends one request; returns its error, or None."""


@contextmanager
def _http_caller(way: Way, body: bytes) -> Iterator[Caller]:
    import httpx

    url = f"http://127.0.0.1:{running.PORT}{way.path}"
    with httpx.Client(timeout=10, headers=way.headers) as client:

        def call() -> str | None:
            try:
                client.post(url, content=body).raise_for_status()
            except httpx.HTTPError as error:
                return type(error).__name__
            return None

        yield call


@contextmanager
def _grpc_caller(way: Way, body: bytes) -> Iterator[Caller]:
    """Yields a caller that waits while it has no connection. It thus counts only requests that the
    killed worker had received."""
    import grpc

    options = [("grpc.use_local_subchannel_pool", 1)]  # separate connections
    target = f"127.0.0.1:{running.port_of(way)}"
    with grpc.insecure_channel(target, options=options) as channel:
        method = channel.unary_unary(way.path)

        def call() -> str | None:
            try:
                method(body, timeout=10, wait_for_ready=True)
            except grpc.RpcError as error:
                return str(error.code())
            return None

        yield call


def _ready_workers() -> float:
    try:
        return running.metrics()["embedserve_workers"]
    except OSError:  # the killed worker received the request
        return 0.0


def _until(is_true: Callable[[], bool], seconds: float) -> float:
    end = time.perf_counter() + seconds
    while not is_true():
        if time.perf_counter() > end:
            raise TimeoutError
        time.sleep(0.1)
    return time.perf_counter()
