"""FastAPI, pydantic and an nn.EmbeddingBag for each table, as first written and improved."""

from __future__ import annotations

from workloads import Workload

from servers.json_peer import JsonPeer


class FastApi(JsonPeer):
    name = "hand-written FastAPI"
    folder = "fastapi"
    packages = ("fastapi==0.165.0", "uvicorn[standard]==0.54.0")
    script = "fastapi_server.py"


class TypedFastApi(FastApi):
    """The answer is written by pydantic, which takes knowing that it then is."""

    name = "hand-written FastAPI, answer typed"

    def command(self, workload: Workload, port: int) -> list[str]:
        return [*super().command(workload, port), "typed"]
