"""Tests of the built image on a real control plane and kubelet (make cluster-test).

The image runs with overlays/cpu. The control plane is Kubernetes 1.20. Its network plugin does not
enforce policies.
"""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from interop.cluster.host import CGROUP, CGROUPS
from interop.cluster.kubectl import Kubectl, Namespaced
from interop.cluster.manifests import persistent_volume, render
from interop.proxies import Proxy
from interop.test_proxy_restart import ANSWERED, Load, load_through

pytestmark = pytest.mark.cluster

NAMESPACE = "serving"
REPLICAS = 2
"""Minimum of the autoscaler."""
ROLLOUTS = 2
CLIENTS = 3
"""Number of clients of each protocol."""
ANSWERS = 200
"""Number of responses that each client waits for before and after a change."""
REQUEST_S_MAX = 60
RESTARTS = "jsonpath={.status.containerStatuses[0].restartCount}"
CONNECTION_ERRORS = ("UNAVAILABLE", "CANCELLED", "RemoteProtocolError", "ReadError", "ConnectError")
"""Errors of clients whose connection ends with its server."""


@pytest.fixture(scope="module")
def serving(
    kubectl: Kubectl, volume: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Namespaced]:
    """Applies the whole overlay."""
    manifests = render(tmp_path_factory.mktemp(NAMESPACE), NAMESPACE)
    kubectl.apply(persistent_volume(NAMESPACE, volume), *manifests.values())
    yield kubectl.in_namespace(NAMESPACE)
    kubectl.try_run("delete", "namespace", NAMESPACE, "--wait=false")


@pytest.fixture
def load(serving: Namespaced) -> Iterator[Load]:
    """Runs clients of every protocol through the Service, and counts their outcomes."""
    address = serving.get("service", "embedserve")["spec"]["clusterIP"]
    service = Proxy("service", f"http://{address}:8000", f"{address}:8001", Path(os.devnull))
    with load_through(service, clients=CLIENTS, timeout_s=REQUEST_S_MAX) as load:
        load.wait_until_answered()
        load.start()
        load.wait_for_each(ANSWERS, ANSWERED)
        yield load


def total(load: Load) -> Counter[str]:
    return sum(load.outcomes.values(), Counter())


def test_overlay_becomes_ready(serving: Namespaced) -> None:
    seconds = serving.wait_until_ready(REPLICAS)
    print(f"\n{REPLICAS}/{REPLICAS} ready after {seconds:.0f} s", end=" ")
    claim = serving.get("pvc", "embedserve-store")
    assert claim["status"]["phase"] == "Bound"
    serving.wait_for(
        "1", *("get", "pdb", "embedserve", "--output"), "jsonpath={.status.disruptionsAllowed}"
    )
    for service in ("embedserve", "embedserve-headless"):
        (subset,) = serving.get("endpoints", service)["subsets"]
        assert len(subset["addresses"]) == REPLICAS


def test_rollout_loses_no_requests(serving: Namespaced, load: Load) -> None:
    serving.wait_until_ready(REPLICAS)
    for _ in range(ROLLOUTS):
        before = {pod["metadata"]["name"] for pod in serving.pods()}
        serving.run("rollout", "restart", "deployment/embedserve")
        serving.wait_until_ready(REPLICAS)
        load.wait_for_each(ANSWERS, ANSWERED)
        assert not before & {pod["metadata"]["name"] for pod in serving.pods()}
    load.stop()
    load.check_answered()
    print(f"\n{ROLLOUTS} rollouts, {total(load).total()} requests, none lost", end=" ")


def test_force_deleted_pod_loses_only_requests_in_flight(serving: Namespaced, load: Load) -> None:
    """Checks that clients lose at most requests in flight, and none after a new pod is ready."""
    serving.wait_until_ready(REPLICAS)
    (target_pod, *_) = serving.pods()
    serving.run("delete", "pod", target_pod["metadata"]["name"], "--force", "--grace-period=0")
    serving.wait_until_ready(REPLICAS)
    assert_only_connections_lost(load, "deleted by force")


def test_killed_server_is_restarted(serving: Namespaced, load: Load) -> None:
    """Kills with the signal that the kernel uses for a cgroup without memory."""
    serving.wait_until_ready(REPLICAS)
    target_pod = serving.pods()[0]["metadata"]["name"]
    restarts = restarts_of(serving, target_pod)
    os.kill(main_process(serving.get("pod", target_pod)), signal.SIGKILL)
    serving.wait_for(str(restarts + 1), *("get", "pod", target_pod, "--output"), RESTARTS)
    serving.wait_until_ready(REPLICAS)
    assert_only_connections_lost(load, "killed")


def assert_only_connections_lost(load: Load, kind: str) -> None:
    """Checks that every client gets correct responses again, and lost only connections before."""
    with load.changed:
        before = {name: met.copy() for name, met in load.outcomes.items()}
    load.wait_for_each(ANSWERS, ANSWERED)
    load.stop()
    for name, met in load.outcomes.items():
        assert set(met - before[name]) <= ANSWERED, (name, met - before[name])
    lost = {outcome: count for outcome, count in total(load).items() if outcome not in ANSWERED}
    for outcome in lost:
        assert outcome.startswith(CONNECTION_ERRORS), lost
    print(f"\n{kind}: {sum(lost.values())} of {total(load).total()} requests lost: {lost}", end=" ")


def main_process(pod: dict[str, Any]) -> int:
    (container,) = pod["status"]["containerStatuses"]
    identifier = container["containerID"].removeprefix("containerd://")
    (procs, *_) = CGROUPS.glob(f"pids/{CGROUP}/**/{identifier}/cgroup.procs")
    return int(procs.read_text().split()[0])


def restarts_of(namespace: Namespaced, pod: str) -> int:
    return int(namespace.run("get", "pod", pod, "--output", RESTARTS))
