"""`embedserve plan --kubernetes` for a model in parts: the shards, as Kubernetes resources.

Pods are those of the base's Deployment, which is packaged as base_deployment.yaml. So components
change shards as they change other servers. deploy/kubernetes/overlays/parts has the routers, and
what all shards share.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from embedserve import __version__
from embedserve.commands.planning.pod_patch import (
    BASE,
    S3,
    Figures,
    PodOptions,
    PodRows,
    head_lines,
    ids_lines,
    pod_figures,
    quantity,
)
from embedserve.config import ServeSettings
from embedserve.processes.memory_bounds import server_memory
from embedserve_store.parts.part import Part
from embedserve_store.terminal.sizes import human_bytes

PACKAGE = "embedserve.commands.planning"
NAME = "embedserve-part-{part}"
"""Name of the StatefulSet, the Service and the disruption budget of a part. Routers look the
Service up: `--shards` of overlays/parts names it."""
SHARD = "embedserve-shard"
PART_LABEL = "embedserve/part"
DISK_ANNOTATION = {"embedserve/disk": "planned"}
"""Keeps the component s3 from replacing the disk figures of these manifests."""
REPLICAS = 2
READY_S_MIN = 40
"""Seconds that a replica must be ready before the next one is stopped. Routers know its address by
then: DNS servers on Kubernetes keep names for up to 30 s, and routers resolve them every 2 s."""

KubeManifest = dict[str, Any]


def shard_manifests(parts: int, rows: PodRows, options: PodOptions) -> str:
    """Returns a StatefulSet, a headless Service and a PodDisruptionBudget for each part, as YAML.

    Args:
        rows: rows of the largest part.
        options: how each shard serves; ``part`` is set here.

    Raises:
        ValueError: a shard would reject these options.
    """
    options = replace(options, part=str(Part(0, parts)))
    figures = _raised(pod_figures(rows, options), S3 if rows.is_pulled else BASE)
    manifests = [
        one
        for number in range(parts)
        for one in _of_part(Part(number, parts), rows, options, figures)
    ]
    rows = replace(rows, name=f"{rows.name}, the largest of {parts} parts")
    lines = [*head_lines(rows, options), *_router_lines(rows, parts), *ids_lines(rows)]
    return "\n".join(lines) + "\n" + yaml.safe_dump_all(manifests, sort_keys=False)


def _raised(figures: Figures, manifests: Figures) -> Figures:
    """Returns ``figures``, raised to those that the manifests of deploy/kubernetes have."""
    return {
        kind: {
            name: max(amount, manifests[kind][name]) for name, amount in amounts.items() if amount
        }
        for kind, amounts in figures.items()
    }


def _router_lines(rows: PodRows, parts: int) -> list[str]:
    names = max(1, rows.aliases)
    settings = ServeSettings("", follow="latest")
    memory = server_memory(settings, rows.ids, parts=parts, features=rows.features, names=names)
    lines = [
        "# Needs deploy/kubernetes/overlays/parts, which has the routers. A router takes",
        f"# {human_bytes(memory.common)} of memory, of which {human_bytes(memory.rows)} are ids of"
        f" {memory.versions} versions. With the largest requests that its limits allow it takes"
        f" {human_bytes(memory.most)}.",
    ]
    if rows.is_pulled:
        lines.append(f"# Its cache takes {human_bytes(rows.cached_bytes(rows.ids))} of the disk.")
    return lines


def _of_part(
    part: Part, rows: PodRows, options: PodOptions, figures: Figures
) -> Iterator[KubeManifest]:
    name = NAME.format(part=part.number)
    yield _stateful_set(part, rows, options, figures)
    yield {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": _labels(part)},
        "spec": {
            "clusterIP": "None",
            "selector": _labels(part),
            "ports": [
                {
                    "name": "grpc",
                    "port": ServeSettings("").grpc_port,
                    "targetPort": "grpc",
                    "appProtocol": "kubernetes.io/h2c",
                }
            ],
        },
    }
    yield {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name, "labels": _labels(part)},
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": _labels(part)},
        },
    }


def _stateful_set(part: Part, rows: PodRows, options: PodOptions, figures: Figures) -> KubeManifest:
    name = NAME.format(part=part.number)
    metadata: KubeManifest = {
        "name": name,
        "labels": _labels(part) | {"app.kubernetes.io/component": "shard"},
    }
    if rows.is_pulled:
        metadata["annotations"] = dict(DISK_ANNOTATION)
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata,
        "spec": {
            "serviceName": name,
            "replicas": REPLICAS,
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "RollingUpdate"},  # one at a time
            "minReadySeconds": READY_S_MIN,
            "selector": {"matchLabels": _labels(part)},
            "template": {
                "metadata": {"labels": _labels(part)},
                "spec": _pod(part, rows, options, figures),
            },
        },
    }


@cache
def _base_pod() -> KubeManifest:
    base = yaml.safe_load(files(PACKAGE).joinpath("base_deployment.yaml").read_text("utf-8"))
    pod: KubeManifest = base["spec"]["template"]["spec"]
    return pod


def _pod(part: Part, rows: PodRows, options: PodOptions, figures: Figures) -> KubeManifest:
    pod = deepcopy(_base_pod())
    del pod["topologySpreadConstraints"]  # the affinity takes their place
    (container,) = pod["containers"]
    container["image"] += f":{__version__}-cpu"
    container["env"] = [
        {"name": f"EMBEDSERVE_{name.upper()}", "value": value}
        for name, value in _settings(part, rows, options).items()
    ]
    container["resources"] = {
        kind: {name: quantity(name, amount) for name, amount in figures[kind].items()}
        for kind in ("requests", "limits")
    }
    if rows.is_pulled:
        size = {"sizeLimit": quantity("sizeLimit", figures["cache"]["sizeLimit"])}
        pod["volumes"].append({"name": "cache", "emptyDir": size})
    return {"affinity": _affinity(part), **pod}


def _settings(part: Part, rows: PodRows, options: PodOptions) -> dict[str, str]:
    """Returns the settings that differ from those of routers, which have the same ConfigMap."""
    given = {name: str(value) for name, value in options.given().items()}
    model = {"model": rows.model} if rows.model else {}
    # Routers find new replicas by themselves, and keep their connections.
    fixed = {"part": str(part), **model, "connection_age_s_max": "0"}
    return fixed | {"follow": options.settings().follow} | given


def _affinity(part: Part) -> KubeManifest:
    """Keeps replicas of a part on different hosts, and if possible in different zones."""

    def apart(topology_key: str) -> KubeManifest:
        return {"labelSelector": {"matchLabels": _labels(part)}, "topologyKey": topology_key}

    zones = {"weight": 100, "podAffinityTerm": apart("topology.kubernetes.io/zone")}
    return {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [apart("kubernetes.io/hostname")],
            "preferredDuringSchedulingIgnoredDuringExecution": [zones],
        }
    }


def _labels(part: Part) -> dict[str, str]:
    """Returns new labels: YAML would print references to equal objects."""
    return {"app.kubernetes.io/name": SHARD, PART_LABEL: str(part.number)}
