"""Clients of other languages: programs that make the calls they are told and say how each ended.

A driver reads {"gzip", "calls"} as JSON and makes all calls at once over one connection. Its
packages are installed, or it is compiled, when it is first needed and whenever its sources change.
"""

from __future__ import annotations

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
"""Debian's Go packages are sources in a GOPATH; the cache keeps them compiled."""


@dataclass(frozen=True)
class Call:
    """One call, as a driver is told it.

    Attributes:
        cancel: a unary call at once, a stream at its first answer.
        in_turns: each request of a stream is sent after the answer before it.
    """

    method: str
    asked: Sequence[Lookup] = ()
    timeout_ms: float | None = None
    cancel: bool = False
    in_turns: bool = False
    metadata: dict[str, str] = field(default_factory=dict)

    def told(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "requests": [base64.b64encode(one.body).decode() for one in self.asked],
            "timeout_ms": self.timeout_ms,
            "cancel": self.cancel,
            "in_turns": self.in_turns,
            "metadata": self.metadata,
        }


@dataclass(frozen=True)
class Ended:
    """How a call ended."""

    bodies: list[bytes]
    code: grpc.StatusCode
    message: str
    trailers: dict[str, str]

    @property
    def answers(self) -> list[pb.EmbedResponse]:
        return [pb.EmbedResponse.FromString(body) for body in self.bodies]


@dataclass(frozen=True)
class Driver:
    """A program that makes calls; TARGET is put behind ``command``."""

    command: Sequence[str]
    arguments: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def __call__(self, target: str, *calls: Call, gzip: bool = False) -> list[Ended]:
        told = json.dumps({"gzip": gzip, "calls": [call.told() for call in calls]})
        program, *before = self.command
        said = run_tool(
            program,
            *before,
            target,
            *self.arguments,
            stdin=told.encode(),
            environment=self.environment,
        )
        return [_ended(one) for one in json.loads(said)]


def _ended(said: dict[str, Any]) -> Ended:
    bodies = [base64.b64decode(body) for body in said["answers"] or ()]
    return Ended(bodies, CODES[said["code"]], said["message"], said["trailers"])


def node_driver() -> Driver:
    """@grpc/grpc-js under Node."""
    sources = [HERE / "node" / name for name in ("package.json", "package-lock.json")]
    folder = made("node", sources, install_packages)
    return Driver(
        ["node", str(HERE / "node" / "client.js")],
        [str(PROTO)],
        {"NODE_PATH": str(folder / "node_modules")},
    )


def install_packages(folder: Path, sources: Sequence[Path]) -> None:
    """npm's, of a package.json and its lock."""
    for source in sources:
        shutil.copy(source, folder)
    options = ("--ignore-scripts", "--no-audit", "--no-fund")
    run_tool("npm", "ci", *options, cwd=folder, limit_s=BUILD_S_MAX)


def go_driver() -> Driver:
    """grpc-go, from Debian's packages."""
    folder = made("go", [HERE / "go" / "main.go"], _compile)
    return Driver([str(folder / "client")])


def _compile(folder: Path, sources: Sequence[Path]) -> None:
    output = folder / "client"
    run_tool("go", "build", "-o", output, *sources, environment=GO, limit_s=BUILD_S_MAX)


def python_programs(name: str) -> Path:
    """Where the programs of a Python environment of its own are, with what the folder of that name
    requires; a test that needs them is skipped where there is no package index."""
    return made(name, [HERE / name / "requirements.txt"], _install_for_python) / "bin"


def told_by_python(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """What client.py of the folder of that name writes to stdout, in such an environment; it is
    ``given`` what to ask."""
    done = subprocess.run(
        [str(python_programs(name) / "python"), str(HERE / name / "client.py")],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=CLIENT_S_MAX,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


def _install_for_python(folder: Path, sources: Sequence[Path]) -> None:
    """By the pip of this environment; compiled is what is imported, as it is."""
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
    """A folder that ``make`` has filled from ``sources``, once; another run waits for it."""
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
