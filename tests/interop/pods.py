"""Pods of podman, started from the rendered manifests as kubelet starts them.

All run in the network namespace of the test, which has no way out (make image-test). Their
addresses are on a bridge inside it.
"""

import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from interop.tools import ROOT, run_tool
from running_servers import status

OVERLAY = ROOT / "deploy" / "kubernetes" / "overlays" / "cpu"
NETWORK = "embedserve-test"
SUBNET = "10.89.77"
VOLUME = "embedserve-test-store"
STARTED_KINDS = {"Deployment", "ConfigMap"}
"""Kinds of the overlay's objects that podman starts; the claim is a podman volume."""
READY_S_MAX = 180
EXIT_S_MAX = 60
PODMAN_S_MAX = 120
GRACE_S = 25
"""Seconds of terminationGracePeriodSeconds that remain after preStop."""


def has_way_out() -> bool:
    """Returns whether a packet can leave this network namespace."""
    routes = Path("/proc/net/route").read_text().splitlines()[1:]
    return any(route.split()[1] == "00000000" for route in routes)


def podman(*arguments: object) -> str:
    """Runs podman in the temporary folder.

    Podman leaves a file "oom" in its working directory when a container is killed for its memory.
    """
    elsewhere = Path(tempfile.gettempdir())
    return run_tool("podman", *arguments, cwd=elsewhere, limit_s=PODMAN_S_MAX).decode()


def rendered() -> dict[str, dict[str, Any]]:
    """Returns the manifests that podman starts, by kind."""
    text = run_tool("kubectl", "kustomize", OVERLAY)
    manifests = {one["kind"]: one for one in yaml.safe_load_all(text)}
    return {kind: manifests[kind] for kind in sorted(STARTED_KINDS)}


@dataclass(frozen=True)
class Pod:
    """A pod of podman: one replica of the Deployment."""

    name: str
    container: str
    address: str
    manifest: dict[str, Any]

    @property
    def url(self) -> str:
        return f"http://{self.address}:8000"

    def inspect(self) -> dict[str, Any]:
        found: dict[str, Any]
        (found,) = json.loads(podman("inspect", "--type", "container", self.container))
        return found

    def log(self) -> str:
        command = ["podman", "logs", self.container]
        return subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
        ).stdout

    def probe(self, kind: str) -> int:
        """Returns the status of the manifest's probe, or 0 if nothing listens."""
        return status(self.url + self.manifest[kind]["httpGet"]["path"])

    def wait_until_ready(self) -> float:
        """Waits until the pod is ready, and returns the seconds."""
        start = time.monotonic()
        while self.probe("readinessProbe") != 200:
            assert time.monotonic() < start + READY_S_MAX, self.log()
            time.sleep(0.1)
        return time.monotonic() - start

    def stop(self) -> int:
        """Stops the pod as kubelet does: preStop, SIGTERM, grace period. Returns its exit code."""
        hook = self.manifest["lifecycle"]["preStop"]["exec"]["command"]
        podman("exec", self.container, *hook)
        podman("stop", "--time", GRACE_S, self.container)
        code: int = self.inspect()["State"]["ExitCode"]
        return code

    def remove(self) -> None:
        """Removes the pod. Retries, as podman fails while it restarts a container."""
        end = time.monotonic() + EXIT_S_MAX
        remove = ["podman", "pod", "rm", "--force", "--ignore", "--time", "1", self.name]
        while (done := subprocess.run(remove, capture_output=True, text=True)).returncode:
            assert time.monotonic() < end, done.stderr
            time.sleep(0.2)


def play(
    folder: Path,
    name: str,
    host: int,
    *,
    memory: str = "",
    settings: Mapping[str, str] | None = None,
    secret: Mapping[str, str] | None = None,
    volume: str = VOLUME,
) -> Pod:
    """Starts the rendered Deployment as ``name``, at the address ``SUBNET.host``.

    Omits its ports, which podman would publish on all addresses of the host.

    Args:
        memory: another memory limit.
        settings: further values of the ConfigMap.
        secret: files of a Secret that is mounted at /secret.
        volume: another volume with a store.
    """
    manifests = rendered()
    deployment = manifests["Deployment"]
    deployment["metadata"]["name"] = name
    manifests["ConfigMap"]["data"].update(settings or {})
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    del container["ports"]
    if memory:
        container["resources"] = {"limits": {"memory": memory}}
    (store,) = (one for one in pod["volumes"] if one["name"] == "store")
    store["persistentVolumeClaim"]["claimName"] = volume
    if secret is not None:
        files = {file: base64.b64encode(text.encode()).decode() for file, text in secret.items()}
        metadata = {"name": f"{name}-secret"}
        manifests["Secret"] = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": metadata,
            "data": files,
        }
        # Podman 4.3 crashes without "optional".
        source = {"secretName": metadata["name"], "optional": False}
        pod["volumes"].append({"name": "secret", "secret": source})
        container["volumeMounts"].append({"name": "secret", "mountPath": "/secret"})
    path = folder / f"{name}.yaml"
    # Objects that the Deployment refers to come first.
    path.write_text(yaml.safe_dump_all(sorted(manifests.values(), key=_is_deployment)))
    address = f"{SUBNET}.{host}"
    podman("kube", "play", "--network", NETWORK, "--ip", address, path)
    started = f"{name}-pod-0"
    return Pod(started, f"{started}-{container['name']}", address, container)


def _is_deployment(manifest: dict[str, Any]) -> bool:
    return bool(manifest["kind"] == "Deployment")


def fill_volume(name: str, store: Path) -> Path:
    """Copies a store into a volume, readable by the image's user, and returns its folder."""
    podman("volume", "create", name)
    folder = Path(podman("volume", "inspect", "--format", "{{.Mountpoint}}", name).strip())
    shutil.copytree(store, folder, dirs_exist_ok=True)
    run_tool("chmod", "--recursive", "a+rX", folder)
    return folder
