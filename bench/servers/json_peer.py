"""Common to the peers that answer JSON over HTTP from a script in an environment of their own."""

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
    """{"f0": [[id, …] of each example], …} in, {"values": [[…] of each example]} out.

    Attributes:
        folder: of its environment.
        packages: installed there, beside torch and numpy.
        script: in scripts/; called with the tables' folder, their number and the port.
    """

    ids = ("uniform",)  # what their Python costs hides what the rows cost
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

    def program(self, name: str) -> str:
        """A command of its environment."""
        return str(environment_folder(self.folder) / "bin" / name)
