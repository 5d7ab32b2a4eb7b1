"""mosec: a server in Rust that batches for a Python worker."""

from __future__ import annotations

from workloads import Workload

from servers.json_peer import JsonPeer


class Mosec(JsonPeer):
    name = "mosec"
    folder = "mosec"
    packages = ("mosec==0.9.8",)
    script = "mosec_server.py"
    path = "/inference"

    def command(self, workload: Workload, port: int) -> list[str]:
        python, script, *arguments, _ = super().command(workload, port)
        # mosec reads its own options from the command line as well.
        return [python, script, *arguments, "--port", str(port), "--log-level", "error"]
