"""LitServe: FastAPI in front of worker processes that batch."""

from __future__ import annotations

from servers.json_peer import JsonPeer


class LitServe(JsonPeer):
    name = "LitServe"
    workloads = ("small",)
    folder = "litserve"
    packages = ("litserve==0.2.19",)
    script = "litserve_server.py"
    path = "/predict"
