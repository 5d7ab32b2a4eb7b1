"""A Ray cluster of three nodes on loopback, each a raylet with processes of its own.

As a script it starts the nodes in a folder, prints a line of JSON and ends them when its stdin
does: address of the head node, and process ids of the GCS and of the raylets, the head's first. It
answers each line of stdin, a question of QUESTIONS, with a line of JSON: a process of its own for
each would import ray again.
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
from pathlib import Path
from typing import Any

from warm_relay import SITE, warm_relay

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
        environment: variables of processes that use the cluster. What these and Ray's actors
            start as `embedserve serve` is warm (warm_relay).
        servers: process ids of these to those of the servers that they stand for.
    """

    address: str
    gcs: int
    raylets: list[int]
    environment: dict[str, str]
    servers: dict[int, int]
    _process: subprocess.Popen[str]

    def ask(self, question: str) -> Any:
        """Returns the answer to a question of QUESTIONS."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{question}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@contextmanager
def ray_nodes() -> Iterator[RayNodes]:
    """Starts the nodes, and ends them after its block."""
    # Not pytest's folder: the path of a Unix socket has at most 107 bytes.
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        warm_relay(Path(folder)) as relay,
    ):
        # Ray takes another address of the host in place of 127.0.0.1, except where it supports no
        # more than one host, which this variable of macOS and Windows says.
        variables = {
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": folder,
            "RAY_prestart_worker_first_driver": "0",
            # What nobody reads here: figures, events and the memory that workers take.
            "RAY_enable_metrics_collection": "0",
            "RAY_enable_timeline": "0",
            "RAY_event_stats": "0",
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_task_events_report_interval_ms": "0",
            "RAY_health_check_period_ms": "1000",  # a node is lost after five of them
            "RAY_agent_register_timeout_ms": str(STARTED_S_MAX * 1000),
            "RAY_worker_register_timeout_seconds": str(STARTED_S_MAX),
        }
        entries = [str(SITE), *(os.path.abspath(entry) for entry in sys.path if entry)]
        path = {"PYTHONPATH": os.pathsep.join(entries)}
        environment = os.environ | variables | relay.environment | path
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
                    yield RayNodes(
                        **started,
                        environment=environment | address,
                        servers=relay.servers,
                        _process=process,
                    )
                    process.stdin.close()
                    process.wait(ENDED_S_MAX)
                    return
        raise AssertionError("no Ray cluster was started")


def left() -> object:
    """Returns [named actors, number of placement groups] that Ray has."""
    import ray

    groups = ray.util.placement_group_table().values()
    alive = [one["name"] for one in groups if one["state"] != "REMOVED"]
    return [ray.util.list_named_actors(all_namespaces=True), len(alive)]


def kill() -> None:
    """Ends an actor for good."""
    import ray

    ray.kill(ray.get_actor("shop/1/2/0"))


QUESTIONS = {"left": left, "kill": kill}


def answer(question: str, address: str) -> str:
    """Connects to Ray for one question only: Ray ends a connected process without its GCS."""
    import ray

    ray.init(address=address, namespace="embedserve", logging_level="error", log_to_driver=False)
    try:
        return json.dumps(QUESTIONS[question]())
    finally:
        ray.shutdown()


def main(folder: str) -> None:
    # Ray writes the address there before it makes the folder.
    os.makedirs(f"{folder}/ray", exist_ok=True)
    from ray.cluster_utils import Cluster

    arguments = {
        "node_ip_address": "127.0.0.1",
        "num_cpus": CPUS,
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_dashboard": False,
        "no_monitor": True,  # nothing is scaled
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
    for line in sys.stdin:
        print(answer(line.strip(), cluster.address), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
