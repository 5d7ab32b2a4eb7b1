"""Interface of the servers that the benchmark measures."""

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
    """One way of sending requests to a server.

    Attributes:
        name: name in the tables, such as "JSON".
        protocol: "http" (wrk posts the bodies), "http-one" (h2load posts one body), "grpc" (h2load
            sends one message), "grpc-stream" (h2load sends several messages in one call), or
            "redis" (redis-benchmark).
        path: path of the URL; /package.Service/Method for gRPC.
        headers: headers of each request.
    """

    name: str
    protocol: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)


class Server(ABC):
    """A server, its ways, and how to run it. Each object is one group of rows in the tables."""

    name: str
    ways: Sequence[Way]
    workloads: Sequence[str] = ("small", "rank", "bulk")
    ids: Sequence[str] = ("uniform", "zipf")

    def missing(self) -> str:
        """Returns the software that must be installed first, as text; "" if nothing is missing."""
        return ""

    def install(self) -> None:
        """Installs missing software into a separate environment, without output. May be called
        again."""
        return

    @abstractmethod
    def command(self, workload: Workload, port: int) -> list[str]:
        """Returns the command that runs the server in the foreground on 127.0.0.1 until SIGTERM.

        Way.protocol decides the port: HTTP and Redis use ``port``, gRPC uses ``port`` + 1.
        """

    def environment(self) -> dict[str, str]:
        """Returns variables to add to the environment."""
        return {}

    def prepare(self, workload: Workload, port: int) -> None:
        """Prepares a server that accepts connections, once, before any measurement."""
        return

    @abstractmethod
    def body(self, way: Way, workload: Workload, request: Request) -> bytes:
        """Returns ``request`` in the server's format: the body of a POST, or one protobuf
        message."""

    @abstractmethod
    def values(self, way: Way, workload: Workload, answer: bytes) -> np.ndarray:
        """Returns the values in the body or message of a response, float32 [examples, tables *
        dim]."""

    def headers(self, way: Way, body: bytes) -> dict[str, str]:
        """Returns the headers of the request with ``body``."""
        return dict(way.headers)


def environment_folder(name: str) -> Path:
    """Returns the folder of a peer's virtual environment."""
    return CACHE / "peers" / name


def python_of(name: str) -> str:
    return str(environment_folder(name) / "bin" / "python")


def make_environment(name: str, *packages: str) -> None:
    """Creates a virtual environment with ``packages`` once; a change of the pins installs them
    again."""
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
