"""Real server processes on free loopback ports."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forkserver import PYTHON, WarmPopen, run_warm

if TYPE_CHECKING:
    import httpx

READY_S_MAX = 300
READY_POLL_S = 0.03
STOPPED_S_MAX = 60
COMMAND_S_MAX = 600
COMMANDS_AT_ONCE = 4
PORTS = (10_000, 20_000)
"""Range of ports for servers, below those that `embedserve cluster` draws for shards and those that
the kernel assigns to outgoing connections.

One of them could otherwise take a port before a server listens on it."""
ANSWER_S_MAX = 60
"""Timeout in seconds for a response. The server may be loading, or waiting for a core."""
WIDE = {"COLUMNS": "200"}
"""Environment in which the command line wraps no line."""


@dataclass
class Running:
    """A server process and its addresses.

    Attributes:
        management: URL of the management routes, which may have a port of their own.
    """

    process: subprocess.Popen[bytes]
    http: str
    grpc: str
    log: Path
    management: str = ""

    def __post_init__(self) -> None:
        self.management = self.management or self.http

    def get(self, path: str) -> httpx.Response:
        """Gets a management route over a new connection, which any worker may accept."""
        import httpx  # hosts of the GPU tests may lack it

        return httpx.get(self.management + path, timeout=ANSWER_S_MAX)

    def metrics(self) -> str:
        return self.get("/metrics").text

    def models(self) -> list[dict[str, Any]]:
        models: list[dict[str, Any]] = self.get("/models").json()["models"]
        return models

    def model(self) -> dict[str, Any]:
        """Returns the only model of /models."""
        (model,) = self.models()
        return model

    def children(self) -> list[int]:
        """Returns the ids of the applier of deltas, if any, and the workers, as they started."""
        return children_of(self.process.pid)


def free_port() -> int:
    """Returns a port that is free, and that no other call has returned or will return.

    Servers listen on their ports seconds later, so that finding a port free would not reserve it.
    """
    for port in _ports():
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise AssertionError("all ports are taken")


@cache
def _ports() -> Iterator[int]:
    """Returns the ports of this process in random order.

    Concurrent runs of the tests use the same range.
    """
    own = ports_of_worker()
    return iter(random.SystemRandom().sample(own, len(own)))


def ports_of_worker() -> range:
    """Returns the ports that belong to this worker of pytest-xdist."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    return range(PORTS[0] + worker % workers, PORTS[1], workers)


def is_running(pid: int) -> bool:
    """Returns whether a process is running. A zombie is not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def children_of(pid: int) -> list[int]:
    """Returns the ids of the processes that a process has started, in their order."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command(*arguments: object) -> list[str]:
    return [*PYTHON, "-m", "embedserve", *map(str, arguments)]


@contextmanager
def running(
    store: Path | str,
    log: Path,
    *arguments: object,
    ports_used: tuple[int, int] | None = None,
    is_warm: bool = True,
    has_management_port: bool = False,
) -> Iterator[Running]:
    """Runs `embedserve serve STORE …`, yields it once it is ready and stops it with SIGTERM.

    The (HTTP, gRPC) ports are free ones, or ``ports_used`` of an earlier server. If ``is_warm``,
    the server and its workers are forked from Python that has imported torch (forkserver). With a
    port for management, readiness is checked there.
    """
    http_port, grpc_port = ports_used or (free_port(), free_port())
    ports: tuple[object, ...] = ("--http-port", http_port, "--grpc-port", grpc_port)
    management = ""
    if has_management_port:
        port = free_port()
        ports, management = (*ports, "--management-port", port), f"http://127.0.0.1:{port}"
    words = command("serve", store, *ports, *arguments)
    with started(words, log, is_warm=is_warm) as process:
        http, grpc = f"http://127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}"
        server = Running(process, http, grpc, log, management)
        wait_until_ready(process, log, server.management)
        yield server


@contextmanager
def started(
    words: Sequence[str | Path],
    log: Path,
    *,
    is_warm: bool = True,
    stopped_s_max: float = STOPPED_S_MAX,
    **options: Any,
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a command with its output in ``log``, and stops it with SIGTERM at the end.

    The command may open the log too.

    Args:
        options: further arguments of WarmPopen if ``is_warm``, else of Popen.
    """
    popen: Any = WarmPopen if is_warm else subprocess.Popen
    log.write_bytes(b"")
    with log.open("ab") as output:
        process = popen(words, stdout=output, stderr=subprocess.STDOUT, **options)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=stopped_s_max)


def status(url: str, body: bytes | None = None) -> int:
    """Returns the status of a request, or 0 if no server responds."""
    try:
        with urllib.request.urlopen(url, body, timeout=ANSWER_S_MAX) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return 0


def wait_until_ready(
    process: subprocess.Popen[bytes], log: Path, url: str, path: str = "/health/ready"
) -> None:
    end = time.monotonic() + READY_S_MAX
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url + path, timeout=2):
                return
        except OSError as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()  # its response
            time.sleep(READY_POLL_S)
    raise AssertionError(f"not ready: {log.read_text()}")


def run_commands(
    *commands: Sequence[object],
) -> list[subprocess.CompletedProcess[str]]:
    """Runs embedserve commands to their ends, forked from warm Python, a few at a time."""
    with ThreadPoolExecutor(COMMANDS_AT_ONCE) as pool:
        return list(pool.map(lambda arguments: run_warm_command(*arguments), commands))


def run_command(
    *arguments: object, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs an embedserve command to its end, like from a shell."""
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=COMMAND_S_MAX,
        env=os.environ | WIDE | (environment or {}),
    )


def run_warm_command(
    *arguments: object, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs an embedserve command to its end, forked from warm Python.

    For commands that import torch, where another test covers their start from a shell.
    """
    return run_warm(
        command(*arguments), timeout=COMMAND_S_MAX, env=os.environ | WIDE | (environment or {})
    )
