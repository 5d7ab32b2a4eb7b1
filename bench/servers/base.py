"""What the benchmark asks of a server that it measures."""

from __future__ import annotations

import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from workloads import CACHE, Request, Workload

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Way:
    """One way of asking a server.

    Attributes:
        name: as in the tables, such as "JSON".
        protocol: "http" (wrk posts the bodies), "http-one" (h2load posts one of them), "grpc"
            (h2load sends one of them as a message), "grpc-stream" (as many messages in one
            call), or "redis" (redis-benchmark).
        path: of the URL; of gRPC /package.Service/Method.
        headers: sent with each request.
    """

    name: str
    protocol: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)


class Server(ABC):
    """A server, its ways, and how to run it. One object for each row group of the tables."""

    name: str
    ways: Sequence[Way]
    workloads: Sequence[str] = ("small", "rank", "bulk")
    ids: Sequence[str] = ("uniform", "zipf")

    def missing(self) -> str:
        """What has to be installed first, said so; "" if nothing."""
        return ""

    def install(self) -> None:
        """Installs what is missing, into an environment of its own. Quiet; may be repeated."""
        return

    @abstractmethod
    def command(self, workload: Workload, port: int) -> list[str]:
        """Runs the server in the foreground on 127.0.0.1:port until SIGTERM. Way.protocol says
        which port is asked: HTTP is ``port``, gRPC is ``port`` + 1, Redis is ``port``."""

    def environment(self) -> dict[str, str]:
        """Variables beside the present ones."""
        return {}

    def prepare(self, workload: Workload, port: int) -> None:
        """Called once when the server takes connections, before anything is measured."""
        return

    @abstractmethod
    def body(self, way: Way, workload: Workload, request: Request) -> bytes:
        """``request`` as this server wants it: the body of a POST, or one protobuf message."""

    @abstractmethod
    def values(self, way: Way, workload: Workload, answer: bytes) -> np.ndarray:
        """float32 [examples, tables * dim] of an answer's body or message."""

    def headers(self, way: Way, body: bytes) -> dict[str, str]:
        """Of the request with ``body``."""
        return dict(way.headers)


def environment_folder(name: str) -> Path:
    """Where a peer's own virtual environment is."""
    return CACHE / "peers" / name


def python_of(name: str) -> str:
    return str(environment_folder(name) / "bin" / "python")


def make_environment(name: str, *packages: str) -> None:
    """A virtual environment with ``packages``, made once; the pins are part of its name's stamp."""
    folder = environment_folder(name)
    stamp = folder / ".installed"
    wanted = "\n".join(packages)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [python_of(name), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *packages], check=True)
    stamp.write_text(wanted)


def is_installed(name: str) -> bool:
    return (environment_folder(name) / ".installed").exists()
