"""Ray Serve: a deployment with @serve.batch behind its HTTP proxy."""

from __future__ import annotations

from servers.json_peer import JsonPeer


class RayServe(JsonPeer):
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
