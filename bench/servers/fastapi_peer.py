"""FastAPI with pydantic and an nn.EmbeddingBag per table, in a first and an improved version."""

from __future__ import annotations

from workloads import Workload

from servers.json_peer import JsonPeer


class FastApi(JsonPeer):
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
