"""A Ray cluster of three nodes on loopback, each a raylet with processes of its own.

As a script it starts the nodes in a folder, prints a line of JSON and ends them when its stdin
does: address of the head node, and process ids of the GCS and of the raylets, the head's first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

NODES = 3
CPUS = 4
"""CPUs of a node, as Ray counts them: two nodes are enough for all shards of a test."""
OBJECT_STORE_BYTES = 80 << 20
"""What Ray needs at least, of /dev/shm."""
STARTED_S_MAX = 300
"""Seconds for Ray's processes to start, on a host that is busy with other tests."""
ENDED_S_MAX = 120
ATTEMPTS = 3
"""Starts of the cluster. Ray gives up a node that does not start within 30 s, which no option
changes."""


@dataclass(frozen=True)
class RayNodes:
    """Processes of a Ray cluster.

    Attributes:
        address: HOST:PORT of the head node.
        gcs: process id of the control plane.
        raylets: process id of the raylet of each node, the head's first.
        environment: variables of processes that use the cluster.
    """

    address: str
    gcs: int
    raylets: list[int]
    environment: dict[str, str]


@contextmanager
def ray_nodes() -> Iterator[RayNodes]:
    """Starts the nodes, and ends them after its block."""
    # Not pytest's folder: the path of a Unix socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        # Ray takes another address of the host in place of 127.0.0.1, except where it supports no
        # more than one host, which this variable of macOS and Windows says.
        variables = {
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": folder,
            "RAY_prestart_worker_first_driver": "0",
            "RAY_health_check_period_ms": "1000",  # a node is lost after five of them
            "RAY_agent_register_timeout_ms": str(STARTED_S_MAX * 1000),
            "RAY_worker_register_timeout_seconds": str(STARTED_S_MAX),
        }
        entries = [os.path.abspath(entry) for entry in sys.path if entry]
        environment = os.environ | variables | {"PYTHONPATH": os.pathsep.join(entries)}
        for _ in range(ATTEMPTS):
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, folder],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            with process:
                assert process.stdin is not None
                assert process.stdout is not None
                if line := process.stdout.readline():
                    started = json.loads(line)
                    address = {"RAY_ADDRESS": started["address"]}
                    yield RayNodes(**started, environment=environment | address)
                    process.stdin.close()
                    process.wait(ENDED_S_MAX)
                    return
        raise AssertionError("no Ray cluster was started")


def main(folder: str) -> None:
    # Ray writes the address there before it makes the folder.
    os.makedirs(f"{folder}/ray", exist_ok=True)
    from ray.cluster_utils import Cluster

    arguments = {
        "node_ip_address": "127.0.0.1",
        "num_cpus": CPUS,
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_dashboard": False,
        "temp_dir": f"{folder}/ray",
    }
    cluster = Cluster()
    nodes = [cluster.add_node(wait=False, **arguments) for _ in range(NODES)]
    cluster.wait_for_nodes(STARTED_S_MAX)

    def pid(node: int, kind: str) -> int:
        [info] = nodes[node].all_processes[kind]
        return int(info.process.pid)

    raylets = [pid(node, "raylet") for node in range(NODES)]
    started = {"address": cluster.address, "gcs": pid(0, "gcs_server"), "raylets": raylets}
    print(json.dumps(started), flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
