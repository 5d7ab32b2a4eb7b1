"""Clients in other languages: programs that make the requested calls and report how each ended.

A driver reads {"gzip", "calls"} as JSON and makes all calls concurrently over one connection. Its
packages are installed, or it is compiled, at its first use and whenever its sources change.
"""

import base64
import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from interop.lookups import Lookup
from interop.tools import CACHE, ROOT, run_tool

from embedserve_proto import embedding_pb2 as pb

HERE = Path(__file__).parent
PROTO = ROOT / "proto" / "embedserve_proto" / "embedding.proto"
BUILD_S_MAX = 1200
CLIENT_S_MAX = 600
CODES = {code.value[0]: code for code in grpc.StatusCode}
GO = {
    "GO111MODULE": "off",
    "GOPATH": "/usr/share/gocode",
    "GOFLAGS": "",
    "GOCACHE": str(CACHE / "go-build"),
    "CGO_ENABLED": "0",
}
"""Environment of Go. Debian's Go packages are sources in a GOPATH; the cache has them compiled."""


@dataclass(frozen=True)
class Call:
    """A call that a driver makes.

    Attributes:
        cancel: cancels a unary call immediately, a stream at its first response.
        in_turns: sends each request of a stream after the response to the previous one.
    """

    method: str
    requested: Sequence[Lookup] = ()
    timeout_ms: float | None = None
    cancel: bool = False
    in_turns: bool = False
    metadata: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "requests": [base64.b64encode(one.body).decode() for one in self.requested],
            "timeout_ms": self.timeout_ms,
            "cancel": self.cancel,
            "in_turns": self.in_turns,
            "metadata": self.metadata,
        }


@dataclass(frozen=True)
class Ended:
    """The outcome of a call."""

    bodies: list[bytes]
    code: grpc.StatusCode
    message: str
    trailers: dict[str, str]

    @property
    def responses(self) -> list[pb.EmbedResponse]:
        return [pb.EmbedResponse.FromString(body) for body in self.bodies]


@dataclass(frozen=True)
class Driver:
    """A program that makes calls; TARGET is appended to ``command``."""

    command: Sequence[str]
    arguments: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def __call__(self, target: str, *calls: Call, gzip: bool = False) -> list[Ended]:
        request_json = json.dumps({"gzip": gzip, "calls": [call.to_json() for call in calls]})
        program, *before = self.command
        result_json = run_tool(
            program,
            *before,
            target,
            *self.arguments,
            stdin=request_json.encode(),
            environment=self.environment,
        )
        return [_ended(one) for one in json.loads(result_json)]


def _ended(result_json: dict[str, Any]) -> Ended:
    bodies = [base64.b64decode(body) for body in result_json["answers"] or ()]
    return Ended(
        bodies, CODES[result_json["code"]], result_json["message"], result_json["trailers"]
    )


def node_driver() -> Driver:
    """Returns the driver for @grpc/grpc-js on Node."""
    sources = [HERE / "node" / name for name in ("package.json", "package-lock.json")]
    folder = made("node", sources, install_packages)
    return Driver(
        ["node", str(HERE / "node" / "client.js")],
        [str(PROTO)],
        {"NODE_PATH": str(folder / "node_modules")},
    )


def install_packages(folder: Path, sources: Sequence[Path]) -> None:
    """Installs the npm packages of a package.json and its lock."""
    for source in sources:
        shutil.copy(source, folder)
    options = ("--ignore-scripts", "--no-audit", "--no-fund")
    run_tool("npm", "ci", *options, cwd=folder, limit_s=BUILD_S_MAX)


def go_driver() -> Driver:
    """Returns the driver for grpc-go from Debian's packages."""
    folder = made("go", [HERE / "go" / "main.go"], _compile)
    return Driver([str(folder / "client")])


def _compile(folder: Path, sources: Sequence[Path]) -> None:
    output = folder / "client"
    run_tool("go", "build", "-o", output, *sources, environment=GO, limit_s=BUILD_S_MAX)


def python_programs(name: str) -> Path:
    """Returns the programs' folder of a virtual environment with the packages of folder ``name``.

    Without a package index the test that needs it is skipped.
    """
    return made(name, [HERE / name / "requirements.txt"], _install_for_python) / "bin"


def run_python_client(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Runs client.py of folder ``name`` in its virtual environment, and returns its JSON output.

    Args:
        parameters: JSON for its stdin: what to request.
    """
    done = subprocess.run(
        [str(python_programs(name) / "python"), str(HERE / name / "client.py")],
        input=json.dumps(parameters),
        capture_output=True,
        text=True,
        timeout=CLIENT_S_MAX,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    responses: dict[str, Any] = json.loads(done.stdout)
    return responses


def _install_for_python(folder: Path, sources: Sequence[Path]) -> None:
    """Installs with the pip of this environment. Modules are compiled when they are imported."""
    python = (sys.executable, "-m")
    options = ("--quiet", "--disable-pip-version-check", "--no-compile")
    for command in (
        (*python, "venv", "--without-pip", folder),
        (*python, "pip", "--python", folder, "install", *options, "--requirement", sources[0]),
    ):
        done = subprocess.run(
            [*map(str, command)], capture_output=True, text=True, timeout=BUILD_S_MAX
        )
        if done.returncode:
            pytest.skip(f"{sources[0]} cannot be installed: {done.stderr[-500:]}")


def made(name: str, sources: Sequence[Path], make: Callable[[Path, Sequence[Path]], None]) -> Path:
    """Returns a folder that ``make`` fills from ``sources`` once. A concurrent run waits for it."""
    digest = hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()
    folder = CACHE / f"{name}-{digest[:16]}"
    with ExitStack() as held:
        CACHE.mkdir(parents=True, exist_ok=True)
        lock = held.enter_context((CACHE / f"{name}.lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder, sources)
            (folder / "made").touch()
    return folder
