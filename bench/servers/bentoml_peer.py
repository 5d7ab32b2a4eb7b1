"""BentoML: a service with a batchable method."""

from __future__ import annotations

import numpy as np
import orjson
from workloads import Request, Workload

from servers.base import HERE, Way
from servers.json_peer import JsonPeer


class BentoMl(JsonPeer):
    name = "BentoML"
    workloads = ("small",)
    folder = "bentoml"
    packages = ("bentoml==1.4.39", "uvloop==0.23.0", "httptools==0.9.0")

    def command(self, workload: Workload, port: int) -> list[str]:
        tables = workload.tables
        names = ["env", f"FOLDER={tables.folder}", f"TABLES={tables.count}"]
        where = ["--working-dir", str(HERE / "scripts"), "--host", "127.0.0.1"]
        serve = [self.program("bentoml"), "serve", "bentoml_server:Pooling"]
        return [*names, *serve, *where, "--port", str(port)]

    def body(self, way: Way, workload: Workload, request: Request) -> bytes:
        return b'{"features":[%b]}' % super().body(way, workload, request)

    def values(self, way: Way, workload: Workload, answer: bytes) -> np.ndarray:
        return np.array(orjson.loads(answer)[0]["values"], np.float32)

    def environment(self) -> dict[str, str]:
        more = {"BENTOML_DO_NOT_TRACK": "True", "BENTOML_CONFIG_OPTIONS": "api_server.workers=1"}
        return {**super().environment(), **more}
