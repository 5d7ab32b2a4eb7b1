"""Tests of the built image, started by podman with the rendered manifests (make image-test).

Podman has no preStop and leaves probes to systemd. The tests call both as kubelet does, and HAProxy
stands in for the Service. `make image` builds the image.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import httpx
import pytest
from interop.lookups import lookup
from interop.pods import (
    EXIT_S_MAX,
    NETWORK,
    SUBNET,
    VOLUME,
    Pod,
    fill_volume,
    has_way_out,
    play,
    podman,
)
from interop.proxies import CONFIGURATIONS, free_ports, haproxy_of
from interop.test_proxy_restart import ANSWERED, PROTOBUF, Load, load_through
from packaging.utils import canonicalize_name
from waits import wait_until

from embedserve_proto import __version__
from embedserve_proto import embedding_pb2 as pb
from embedserve_proto.embedding_pb2_grpc import EmbeddingServiceStub

pytestmark = pytest.mark.image

ROLLS = 2
ANSWERS = 50
"""Number of responses that each client waits for before, while and after a pod is replaced."""
CLIENTS = 2
"""Number of clients of each protocol."""
INSUFFICIENT_MEMORY = "64Mi"
"""Memory limit below what Python and PyTorch take before they load a model."""
IMAGE = f"localhost/embedserve:{__version__}-cpu"


@pytest.fixture(scope="module", autouse=True)
def network() -> Iterator[None]:
    if has_way_out():
        pytest.fail("packets could leave this host: run make image-test", pytrace=False)
    podman("network", "create", "--disable-dns", "--subnet", f"{SUBNET}.0/24", NETWORK)
    yield
    podman("network", "rm", "--force", NETWORK)


@pytest.fixture(scope="module", autouse=True)
def volume(store: Path) -> Iterator[Path]:
    yield fill_volume(VOLUME, store)
    podman("volume", "rm", "--force", VOLUME)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[ExitStack]:
    """Removes all pods at the end, even after a failure."""
    with ExitStack() as ends:
        yield ends


def start(pods: ExitStack, folder: Path, name: str, host: int, **changes: object) -> Pod:
    pod = play(folder, f"embedserve-{name}", host, **changes)  # type: ignore[arg-type]
    pods.callback(pod.remove)
    return pod


def assert_serves(pod: Pod) -> None:
    one = lookup(3)
    response = httpx.post(f"{pod.url}/embed", content=one.body, headers=PROTOBUF)
    assert pb.EmbedResponse.FromString(response.content) == one.response
    with grpc.insecure_channel(f"{pod.address}:8001") as channel:
        assert EmbeddingServiceStub(channel).Embed(one.request, timeout=30) == one.response


def wait_for_log(pod: Pod, text: str) -> None:
    wait_until(lambda: text in pod.log(), pod.log)


def test_pod_runs_with_the_settings_of_its_manifest(pods: ExitStack, tmp_path: Path) -> None:
    begin = time.monotonic()
    pod = start(pods, tmp_path, "one", 11)
    wait_until(lambda: pod.probe("startupProbe") == 200, pod.log)
    live_s = time.monotonic() - begin
    pod.wait_until_ready()
    print(f"\nlive after {live_s:.1f} s, ready after {time.monotonic() - begin:.1f} s", end=" ")
    assert pod.probe("livenessProbe") == 200
    assert_serves(pod)
    status = podman("exec", pod.container, "cat", "/proc/1/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert set(fields["Uid"].split()) == set(fields["Gid"].split()) == {"10001"}
    assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    host = pod.inspect()["HostConfig"]
    assert host["ReadonlyRootfs"]
    assert host["Memory"] == 8 << 30
    writes = "touch /tmp/a && ! touch /a && ! touch /store/a"
    podman("exec", pod.container, "sh", "-c", f"{writes} 2>/dev/null")


def test_image_contains_a_list_of_its_packages() -> None:
    path = "/opt/embedserve/sbom.cdx.json"
    command = ("--rm", "--network", "none", "--entrypoint", "cat", IMAGE, path)
    listed = json.loads(podman("run", *command))
    found: dict[str, str] = {
        canonicalize_name(one["name"]): one["version"] for one in listed["components"]
    }
    assert found["embedserve"] == __version__
    assert {"torch", "torchrec", "fbgemm-gpu-cpu"} <= set(found)


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    """Runs clients of every protocol, through HAProxy, for the addresses 11 and 12."""
    ports = free_ports()
    text = (CONFIGURATIONS / "haproxy.cfg").read_text()
    for old, new in {
        "bind :8000": f"bind 127.0.0.1:{ports.http}",
        "bind :8001": f"bind 127.0.0.1:{ports.grpc}",
        "10.0.0.1:": f"{SUBNET}.11:",
        "10.0.0.2:": f"{SUBNET}.12:",
    }.items():
        assert old in text
        text = text.replace(old, new)
    with (
        haproxy_of(tmp_path, text, ports) as proxy,
        load_through(proxy, clients=CLIENTS, timeout_s=EXIT_S_MAX) as load,
    ):
        yield load


def test_rolling_replacement_loses_no_requests(pods: ExitStack, tmp_path: Path, load: Load) -> None:
    old = start(pods, tmp_path, "roll-0", 11)
    old.wait_until_ready()
    load.wait_until_answered()
    load.start()
    for number in range(1, ROLLS + 1):
        load.wait_for_each(ANSWERS, ANSWERED)
        new = start(pods, tmp_path, f"roll-{number}", 11 + number % 2)
        new.wait_until_ready()
        load.wait_for_each(ANSWERS, ANSWERED)
        assert old.stop() == 0
        assert "are cut" not in old.log()
        old.remove()
        old = new
    load.wait_for_each(ANSWERS, ANSWERED)
    load.stop()
    load.check_answered()
    print(f"\n{sum(met.total() for met in load.outcomes.values())} requests, none lost", end=" ")


def test_pod_with_insufficient_memory_is_killed_and_restarted(
    pods: ExitStack, tmp_path: Path
) -> None:
    pod = start(pods, tmp_path, "small", 11, memory=INSUFFICIENT_MEMORY)
    wait_until(lambda: pod.inspect()["RestartCount"] >= 2, lambda: pod.inspect()["State"])
    assert pod.probe("readinessProbe") != 200
    pod.remove()
    restarted = start(pods, tmp_path, "enough", 11)
    restarted.wait_until_ready()
    assert_serves(restarted)


def test_killed_pod_serves_again_after_its_restart(pods: ExitStack, tmp_path: Path) -> None:
    """Kills with the signal that the kernel sends when a container exceeds its memory."""
    pod = start(pods, tmp_path, "killed", 11)
    pod.wait_until_ready()
    os.kill(pod.inspect()["State"]["Pid"], signal.SIGKILL)  # podman kill would prevent the restart
    wait_until(lambda: pod.inspect()["RestartCount"])
    pod.wait_until_ready()
    assert_serves(pod)


def test_truncated_secret_file_is_named_in_the_log(pods: ExitStack, tmp_path: Path) -> None:
    settings = {
        "EMBEDSERVE_TLS_CERT": "/secret/tls.crt",
        "EMBEDSERVE_TLS_KEY": "/secret/tls.key",
    }
    for kind in ("secret", "volume"):
        pods.callback(podman, kind, "rm", "embedserve-half-secret")
    truncated_files = {"tls.crt": "-----BEGIN CERTIFICATE-----\nMIIB", "tls.key": ""}
    pod = start(pods, tmp_path, "half", 11, settings=settings, secret=truncated_files)
    wait_for_log(pod, "/secret/tls.")
    assert pod.probe("readinessProbe") == 0
    assert "Traceback" not in pod.log()


def test_unreadable_store_is_named_in_the_log(pods: ExitStack, tmp_path: Path, store: Path) -> None:
    folder = fill_volume(f"{VOLUME}-closed", store)
    pods.callback(podman, "volume", "rm", "--force", f"{VOLUME}-closed")
    (folder / "shop").chmod(0)
    pod = start(pods, tmp_path, "closed", 11, volume=f"{VOLUME}-closed")
    wait_for_log(pod, "/store/shop")
    assert pod.probe("livenessProbe") == 200
    assert pod.probe("readinessProbe") == 503
    (folder / "shop").chmod(0o755)
    pod.wait_until_ready()
    assert_serves(pod)
