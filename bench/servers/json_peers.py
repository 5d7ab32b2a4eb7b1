"""Peers that serve JSON over HTTP, each from a script in a separate environment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import orjson
from workloads import Request, Workload

from servers.base import (
    HERE,
    Server,
    Way,
    environment_folder,
    is_installed,
    make_environment,
    python_of,
)

COMMON = ("torch==2.13.0", "numpy==2.4.6", "orjson==3.13.0")


class JsonPeer(Server):
    """A server with requests {"f0": [[id, …] per example], …} and responses {"values": [[…] per
    example]}.

    Attributes:
        folder: folder of its environment.
        packages: packages of the environment, in addition to torch and numpy.
        script: script in scripts/, called with the tables' folder, their number and the port.
    """

    ids = ("uniform",)  # the cost of their Python hides the cost of the rows
    folder: str
    packages: Sequence[str]
    script: str
    path = "/embed"
    workloads: Sequence[str] = ("small", "rank")

    @property
    def ways(self) -> Sequence[Way]:  # type: ignore[override]
        return (Way("JSON", "http", self.path, {"Content-Type": "application/json"}),)

    def missing(self) -> str:
        return "" if is_installed(self.folder) else "its environment: make bench-peers"

    def install(self) -> None:
        make_environment(self.folder, *self.packages, *COMMON)

    def command(self, workload: Workload, port: int) -> list[str]:
        tables = workload.tables
        script = str(HERE / "scripts" / self.script)
        return [python_of(self.folder), script, str(tables.folder), str(tables.count), str(port)]

    def environment(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}

    def body(self, way: Way, workload: Workload, request: Request) -> bytes:
        return orjson.dumps(dict(zip(workload.tables.features, request.bags(), strict=True)))

    def values(self, way: Way, workload: Workload, answer: bytes) -> np.ndarray:
        return np.array(orjson.loads(answer)["values"], np.float32)


class Mosec(JsonPeer):
    """A server in Rust that batches for a Python worker."""

    name = "mosec"
    folder = "mosec"
    packages = ("mosec==0.9.8",)
    script = "mosec_server.py"
    path = "/inference"

    def command(self, workload: Workload, port: int) -> list[str]:
        python, script, *arguments, _ = super().command(workload, port)
        # mosec reads its own options from the command line as well.
        return [python, script, *arguments, "--port", str(port), "--log-level", "error"]


class FastApi(JsonPeer):
    """FastAPI with pydantic and an nn.EmbeddingBag per table."""

    name = "hand-written FastAPI"
    folder = "fastapi"
    packages = ("fastapi==0.165.0", "uvicorn[standard]==0.54.0")
    script = "fastapi_server.py"


class TypedFastApi(FastApi):
    """Improved version: the route has a return type, and pydantic therefore serializes the
    response."""

    name = "hand-written FastAPI, answer typed"

    def command(self, workload: Workload, port: int) -> list[str]:
        return [*super().command(workload, port), "typed"]


class LitServe(JsonPeer):
    """FastAPI in front of worker processes that batch."""

    name = "LitServe"
    workloads = ("small",)
    folder = "litserve"
    packages = ("litserve==0.2.19",)
    script = "litserve_server.py"
    path = "/predict"


class BentoMl(JsonPeer):
    """A service with a batchable method."""

    name = "BentoML"
    workloads = ("small",)
    folder = "bentoml"
    packages = ("bentoml==1.4.39", "uvloop==0.23.0", "httptools==0.9.0")

    def command(self, workload: Workload, port: int) -> list[str]:
        tables = workload.tables
        names = ["env", f"FOLDER={tables.folder}", f"TABLES={tables.count}"]
        where = ["--working-dir", str(HERE / "scripts"), "--host", "127.0.0.1"]
        program = str(environment_folder(self.folder) / "bin" / "bentoml")
        serve = [program, "serve", "bentoml_server:Pooling"]
        return [*names, *serve, *where, "--port", str(port)]

    def body(self, way: Way, workload: Workload, request: Request) -> bytes:
        return b'{"features":[%b]}' % super().body(way, workload, request)

    def values(self, way: Way, workload: Workload, answer: bytes) -> np.ndarray:
        return np.array(orjson.loads(answer)[0]["values"], np.float32)

    def environment(self) -> dict[str, str]:
        more = {"BENTOML_DO_NOT_TRACK": "True", "BENTOML_CONFIG_OPTIONS": "api_server.workers=1"}
        return {**super().environment(), **more}


class RayServe(JsonPeer):
    """A deployment with @serve.batch behind the HTTP proxy of Ray Serve."""

    name = "Ray Serve"
    workloads = ("small",)
    folder = "ray"
    packages = ("ray[serve]==2.60.0",)
    script = "ray_server.py"

    def environment(self) -> dict[str, str]:
        quiet = {
            "RAY_DEDUP_LOGS": "1",
            "RAY_SERVE_LOG_TO_STDERR": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        return {**super().environment(), **quiet}
