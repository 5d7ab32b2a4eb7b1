"""Manifests for the tests: overlays/cpu with components, in a namespace, and volumes."""

import os
from pathlib import Path
from typing import Any

import yaml
from interop.tools import ROOT, run_tool

OVERLAY = Path(__file__).parent
"""Folder of the kustomization next to this file."""
KUBERNETES = ROOT / "deploy" / "kubernetes"
Manifest = dict[str, Any]


def render(folder: Path, namespace: str, *components: str) -> dict[str, Manifest]:
    """Returns the manifests by kind, Services by kind and name, with the Namespace first."""
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": namespace,
        "resources": [os.path.relpath(OVERLAY, folder)],
        "components": [
            os.path.relpath(KUBERNETES / "components" / name, folder) for name in components
        ],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    made = {"Namespace": {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}}
    for one in yaml.safe_load_all(run_tool("kubectl", "kustomize", folder)):
        name = one["metadata"]["name"]
        made[one["kind"] if one["kind"] != "Service" else f"Service {name}"] = one
    return made


def pod_of(manifests: dict[str, Manifest]) -> Manifest:
    """Returns the pod of the Deployment, which the caller may change in place."""
    pod: Manifest = manifests["Deployment"]["spec"]["template"]["spec"]
    return pod


def container_of(manifests: dict[str, Manifest]) -> Manifest:
    container: Manifest
    (container,) = pod_of(manifests)["containers"]
    return container


def persistent_volume(namespace: str, path: Path) -> Manifest:
    """Returns a volume on a folder of the node, for the claim of that namespace."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": namespace},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "capacity": {"storage": "50Gi"},
            "claimRef": {"namespace": namespace, "name": "embedserve-store"},
            "hostPath": {"path": str(path), "type": "Directory"},
        },
    }


def secret(namespace: str, name: str, files: dict[str, str]) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"namespace": namespace, "name": name},
        "stringData": files,
    }


def publishing_job(namespace: str, checkpoint: Path, image: str, model: str) -> Manifest:
    """Returns the Job of deploy/kubernetes/publish, with a folder of the node as its checkpoint."""
    job: Manifest = yaml.safe_load(run_tool("kubectl", "kustomize", KUBERNETES / "publish"))
    job["metadata"]["namespace"] = namespace
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    files = ["/checkpoint/model.safetensors", "/description/tables.yaml"]
    container["args"] = ["publish", *files, "/store", f"--model={model}"]
    container["image"] = image
    container["resources"]["requests"] = {"cpu": "100m", "memory": "1Gi"}
    folder = {"hostPath": {"path": str(checkpoint), "type": "Directory"}}
    pod["volumes"] = [
        {"name": one["name"]} | folder if one["name"] in ("checkpoint", "description") else one
        for one in pod["volumes"]
    ]
    return job
