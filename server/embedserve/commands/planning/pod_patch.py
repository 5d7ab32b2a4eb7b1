"""`embedserve plan --kubernetes`: resources of a pod for a model, as a patch of the Deployment.

Memory is the sum computed by processes/memory_bounds.py; comments in the patch explain each figure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from embedserve.config import ServeSettings
from embedserve.config_checks import check_device, check_settings
from embedserve.processes.memory_bounds import Rows, ServerMemory, server_memory
from embedserve_store.terminal.sizes import human_bytes

MIB = 1 << 20
CORES_MIN = 2
"""Fewest cores of a pod: one answers requests, the other runs large batches and loads the next
version."""
CACHED_VERSIONS = 3
"""Versions that the cache of a remote store holds: the two newest, and one that is being pulled."""
CUDA_BYTES = 4 << 30
"""Bytes of CUDA's libraries and contexts. The value is an estimate; no such pod was measured."""
TMP_BYTES = 1 << 30
"""Bytes of the sizeLimit of /tmp in the base Deployment."""
LOG_BYTES = 256 << 20
PULLED_BYTES_PER_S = 50e6
"""Slowest rate, in bytes per second, at which a version is expected to be pulled. A slower rollout
is reported as failed but continues."""
START_S = 600


@dataclass(frozen=True)
class PodOptions:
    """How the pod serves.

    Attributes:
        workers, tables, follow: options of `serve`. None keeps what the Deployment says; memory is
            then computed for the defaults of `serve`, or for `--follow latest` if the store is
            behind a URL.
        hot: fraction of mapped rows that memory is to hold, 0 to 1.
    """

    workers: int | None = None
    tables: str | None = None
    follow: str | None = None
    hot: float = 1.0

    def __post_init__(self) -> None:
        """Raises ValueError if the server would reject these options."""
        check_settings(self.settings())
        if self.tables == "resident" and self.hot < 1:
            raise ValueError("hot_percent is of mapped tables; resident ones are held whole")

    def given(self) -> dict[str, Any]:
        """Returns the options that were given, by name; all other settings of the Deployment
        stay."""
        chosen = {"workers": self.workers, "tables": self.tables, "follow": self.follow}
        return {name: value for name, value in chosen.items() if value is not None}

    def settings(self, *, is_pulled: bool = False) -> ServeSettings:
        """Returns the settings that memory is computed for."""
        overlay = {"follow": "latest"} if is_pulled else {}
        return ServeSettings("", **overlay | self.given())


@dataclass(frozen=True)
class PodRows:
    """Rows to be served: their name for the user, and their bytes. ``is_pulled``: the store is
    remote."""

    name: str
    mapped: int
    copied: int = 0
    is_pulled: bool = False


def pod_patch(rows: PodRows, options: PodOptions, gpus: int = 0) -> str:
    """Returns a strategic merge patch of the Deployment embedserve, as YAML.

    Args:
        gpus: number of GPUs in the plan; 0: rows are held in the pod's memory.

    Raises:
        ValueError: such tables cannot be served on GPUs with these options.
    """
    settings = options.settings(is_pulled=rows.is_pulled)
    if gpus:
        check_device(settings, "cuda")
        memory = server_memory(Rows(CUDA_BYTES), settings, gpus=gpus)
    else:
        memory = server_memory(Rows(rows.mapped, rows.copied), settings, options.hot)
    cache = CACHED_VERSIONS * rows.mapped if rows.is_pulled else 0
    lines = [*_head(rows, settings, options.hot, memory, gpus), *DEPLOYMENT]
    lines += [f"  progressDeadlineSeconds: {_deadline_s(rows)}", *CONTAINER]
    if given := options.given():
        lines.append("          env:")
    for name, value in given.items():
        lines += [f"            - name: EMBEDSERVE_{name.upper()}"]
        lines += [f'              value: "{value}"']
    lines += _resources(settings, memory, cache, gpus)
    if cache:
        lines += ["      volumes:", "        - name: cache", "          emptyDir:"]
        lines += [f"            sizeLimit: {_quantity(cache)}"]
    return "\n".join(lines) + "\n"


DEPLOYMENT = ("apiVersion: apps/v1", "kind: Deployment", "metadata:", "  name: embedserve", "spec:")
CONTAINER = (
    "  template:",
    "    spec:",
    "      containers:",
    "        - name: embedserve",
)


def _head(
    rows: PodRows, settings: ServeSettings, hot: float, memory: ServerMemory, gpus: int
) -> list[str]:
    held = "one version" if settings.follow == "none" else "two versions"
    part = "" if settings.tables == "resident" else f", {100 * hot:g}% of the rows"
    held = "CUDA, a guess; the rows lie on the GPUs" if gpus else f"{held}, {settings.tables}{part}"
    return [
        f"# Made by embedserve plan --kubernetes: {' '.join(rows.name.split())},",
        f"# {human_bytes(rows.mapped)} of rows and ids. Memory:",
        f"#   {human_bytes(memory.rows)}: {held}",
        f"#   {human_bytes(memory.processes)}: idle workers, {settings.workers}",
        f"#   {human_bytes(memory.work)}: requests under way; the limit has"
        f" {human_bytes(memory.clients)} for",
        "#   all that clients can make workers hold (docs/settings.md#memory)",
    ]


def _resources(settings: ServeSettings, memory: ServerMemory, cache: int, gpus: int) -> list[str]:
    requests = {"cpu": f'"{max(CORES_MIN, settings.workers)}"', "memory": _quantity(memory.common)}
    limits = {"memory": _quantity(memory.most)}
    if cache:
        disk = _quantity(cache + TMP_BYTES + LOG_BYTES)
        requests["ephemeral-storage"] = limits["ephemeral-storage"] = disk
    if gpus:
        limits["nvidia.com/gpu"] = f'"{gpus}"'
    lines = ["          resources:"]
    for kind, amounts in (("requests", requests), ("limits", limits)):
        lines.append(f"            {kind}:")
        lines += [f"              {name}: {amount}" for name, amount in amounts.items()]
    return lines


def _deadline_s(rows: PodRows) -> int:
    """Returns the seconds after which Kubernetes reports the rollout as failed."""
    return START_S + math.ceil(rows.mapped / PULLED_BYTES_PER_S)


def _quantity(nbytes: int) -> str:
    return f"{math.ceil(nbytes / MIB)}Mi"
