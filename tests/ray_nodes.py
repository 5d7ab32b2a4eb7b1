"""A Ray cluster of three nodes on loopback, each a raylet with processes of its own.

As a script this module starts the nodes in a folder and prints a line of JSON. The line has the
address of the head node and the process ids of the GCS and of the raylets, the head's first. When
its stdin closes it ends the nodes. Each line of stdin is a question of QUESTIONS, and the response
is a line of JSON. A process per question would import ray each time.
"""

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
"""CPUs of a node, as Ray counts them. Two nodes have enough for all shards of a test."""
OBJECT_STORE_BYTES = 80 << 20
"""Size of Ray's object store in /dev/shm: the minimum that Ray accepts."""
STARTED_S_MAX = 300
"""Timeout in seconds for the start of Ray's processes, on a host that runs other tests, too."""
ENDED_S_MAX = 120
ATTEMPTS = 3
"""Attempts to start the cluster. Ray gives up on a node that does not start within 30 s, and has no
option for that limit."""


@dataclass(frozen=True)
class RayNodes:
    """Processes of a Ray cluster.

    Attributes:
        address: HOST:PORT of the head node.
        gcs: process id of the control plane.
        raylets: process id of the raylet of each node, the head's first.
        environment: variables of processes that use the cluster. An `embedserve serve` that they or
            Ray's actors start is forked from warm Python (warm_relay).
        servers: process id of each such stand-in to the process id of its server.
    """

    address: str
    gcs: int
    raylets: list[int]
    environment: dict[str, str]
    servers: dict[int, int]
    _process: subprocess.Popen[str]

    def send_question(self, question: str) -> Any:
        """Sends a question of QUESTIONS, and returns the response."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{question}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@contextmanager
def ray_nodes() -> Iterator[RayNodes]:
    """Starts the nodes, and ends them when the context ends."""
    # Not pytest's folder: the path of a Unix socket has at most 107 bytes.
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        warm_relay(Path(folder)) as relay,
    ):
        # Ray replaces 127.0.0.1 by another address of the host, unless it supports only clusters of
        # one host. This variable, meant for macOS and Windows, selects that.
        variables = {
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": folder,
            "RAY_prestart_worker_first_driver": "0",
            # Turns off what no test reads: metrics, events and the memory of workers.
            "RAY_enable_metrics_collection": "0",
            "RAY_enable_timeline": "0",
            "RAY_event_stats": "0",
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_task_events_report_interval_ms": "0",
            "RAY_health_check_period_ms": "200",  # five failed checks mark a node as lost
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
    """Returns [named actors, number of placement groups] of the Ray cluster."""
    import ray

    groups = ray.util.placement_group_table().values()
    alive = [one["name"] for one in groups if one["state"] != "REMOVED"]
    return [ray.util.list_named_actors(all_namespaces=True), len(alive)]


def kill() -> None:
    """Kills an actor, without a restart."""
    import ray

    ray.kill(ray.get_actor("shop/1/2/0"))


QUESTIONS = {"left": left, "kill": kill}


def answer(question: str, address: str) -> str:
    """Connects to Ray for one question only: Ray ends a connected process if the GCS dies."""
    import ray

    ray.init(address=address, namespace="embedserve", logging_level="error", log_to_driver=False)
    try:
        return json.dumps(QUESTIONS[question]())
    finally:
        ray.shutdown()


def main(folder: str) -> None:
    # Ray writes its address to this folder before it creates it.
    os.makedirs(f"{folder}/ray", exist_ok=True)
    from ray.cluster_utils import Cluster

    arguments = {
        "node_ip_address": "127.0.0.1",
        "num_cpus": CPUS,
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_dashboard": False,
        "no_monitor": True,  # no autoscaling
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
