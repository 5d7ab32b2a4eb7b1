"""Base of the peers that serve JSON over HTTP from a script in a separate environment."""

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

    def program(self, name: str) -> str:
        """Returns the path of a command in its environment."""
        return str(environment_folder(self.folder) / "bin" / name)
