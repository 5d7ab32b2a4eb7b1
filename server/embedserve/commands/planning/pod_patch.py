"""`embedserve plan --kubernetes`: resources of a pod for a model, as a patch of the Deployment.

Memory is the sum computed by processes/memory_bounds.py; comments in the patch explain each figure.
The patch leaves out what the manifests of deploy/kubernetes have enough of, so that it never lowers
a figure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import yaml

from embedserve.config import ServeSettings
from embedserve.config_checks import check_device, check_settings
from embedserve.processes.memory_bounds import FEATURES, ServerMemory, server_memory
from embedserve_store.terminal.sanitize import sanitize
from embedserve_store.terminal.sizes import human_bytes

MIB = 1 << 20
CORES_MIN = 2
"""Fewest cores of a pod: one answers requests, the other runs large batches and loads the next
version."""
CACHED_VERSIONS = 3
"""Versions that the cache of a remote store holds besides one for each alias: the two newest, and
the next, which is pulled before another is dropped."""
CACHE_SLACK_BYTES = 256 << 20
"""Bytes in the cache for goldens, plans, manifests and locks."""
CUDA_BYTES = 4 << 30
"""Bytes of CUDA's libraries and contexts. The value is an estimate; no such pod was measured."""
TMP_BYTES = 1 << 30
"""Bytes of the sizeLimit of /tmp in the base Deployment."""
LOG_BYTES = 256 << 20
PULLED_BYTES_PER_S = 50e6
"""Slowest rate, in bytes per second, at which a version is expected to be pulled. A slower rollout
is reported as failed but continues."""
START_S = 600

GPUS, DISK, DEADLINE = "nvidia.com/gpu", "ephemeral-storage", "progressDeadlineSeconds"
COUNTS = ("cpu", GPUS, DEADLINE)
"""Figures that are no bytes."""
Figures = dict[str, dict[str, int]]
"""Amounts by kind (requests, limits, rollout, cache) and name; memory and disk in bytes."""
BASE: Figures = {
    "requests": {"cpu": 2, "memory": 8 << 30},
    "limits": {"memory": 8 << 30, GPUS: 2},
    "rollout": {DEADLINE: 1800},
}
"""Figures of deploy/kubernetes: the base, with the GPUs of the component gpu."""
S3: Figures = {
    "requests": BASE["requests"] | {DISK: 22 << 30},
    "limits": BASE["limits"] | {DISK: 22 << 30},
    "rollout": {DEADLINE: 3600},
    "cache": {"sizeLimit": 20 << 30},
}
"""Figures of the base with the component s3."""


@dataclass(frozen=True)
class PodOptions:
    """How the pod serves.

    Attributes:
        workers, tables, follow: options of `serve`. None keeps what the Deployment says; memory is
            then computed for the defaults of `serve`, or for `--follow latest` if the store is
            behind a URL and the tables are not on GPUs.
        hot: fraction of mapped rows that memory is to hold, 0 to 1.
        store: store that the pods read, if the planned tables come from elsewhere.
        part: part K/N that the pod holds, as a shard, which follows unless ``follow`` says none; ""
            for a server of whole tables.
    """

    workers: int | None = None
    tables: str | None = None
    follow: str | None = None
    hot: float = 1.0
    store: str = ""
    part: str = ""

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

    def settings(self, *, is_followed: bool = False) -> ServeSettings:
        """Returns the settings that memory is computed for."""
        followed = {"follow": "latest"} if is_followed or self.part else {}
        return ServeSettings("", part=self.part, **followed | self.given())


@dataclass(frozen=True)
class PodRows:
    """Rows to be served.

    Attributes:
        name: their name for the user.
        mapped, copied: bytes, as in server_memory.
        is_pulled: whether the store is remote.
        ids: bytes of vocabularies, a part of ``mapped``; estimated if the tables are not published.
        model: name of the model; "" if the tables are not published.
        aliases: number of aliases of the model, as far as it is known.
        features: number of features of the model.
    """

    name: str
    mapped: int
    copied: int = 0
    is_pulled: bool = False
    ids: int = 0
    model: str = ""
    aliases: int = 0
    features: int = FEATURES

    @property
    def cached_versions(self) -> int:
        """Versions that a pod may have in its cache at once. One is counted without aliases, too:
        a server that rejects two newer versions still holds its own."""
        return CACHED_VERSIONS + max(1, self.aliases)

    def cached_bytes(self, version_bytes: int) -> int:
        """Returns the bytes of a cache with versions of ``version_bytes`` each."""
        return self.cached_versions * version_bytes + CACHE_SLACK_BYTES


def pod_figures(rows: PodRows, options: PodOptions, gpus: int = 0) -> Figures:
    """Returns what a pod needs, whatever the manifests have.

    Args:
        gpus: number of GPUs in the plan; 0: rows are held in the pod's memory.

    Raises:
        ValueError: such tables cannot be served on GPUs with these options.
    """
    settings, memory = _memory(rows, options, gpus)
    figures: Figures = {
        "requests": {"cpu": max(CORES_MIN, settings.workers), "memory": memory.common},
        "limits": {"memory": memory.most, GPUS: gpus},
        "rollout": {DEADLINE: START_S + math.ceil(rows.mapped / PULLED_BYTES_PER_S)},
    }
    if rows.is_pulled:
        cache = rows.cached_bytes(rows.mapped)
        figures["cache"] = {"sizeLimit": cache}
        for kind in ("requests", "limits"):
            figures[kind][DISK] = cache + TMP_BYTES + LOG_BYTES
    return figures


def pod_patch(rows: PodRows, options: PodOptions, gpus: int = 0) -> str:
    """Returns a strategic merge patch of the Deployment embedserve, as YAML.

    Arguments and errors are those of pod_figures.
    """
    needed = pod_figures(rows, options, gpus)
    manifests = S3 if rows.is_pulled else BASE
    raised: Figures = {kind: {} for kind in needed}
    enough = []
    for kind, amounts in needed.items():
        for name, amount in amounts.items():
            if amount > manifests[kind][name]:
                raised[kind][name] = amount
            elif amount:
                enough.append(f"{kind} {name} {quantity(name, amount)}")
    lines = [*head_lines(rows, options, gpus), *ids_lines(rows)]
    if enough:
        lines += ["# Left out, because deploy/kubernetes has as much or more:"]
        lines += [f"#   {one}" for one in enough]
    deployment = _deployment(raised, options.given())
    return "\n".join(lines) + "\n" + yaml.safe_dump(deployment, sort_keys=False)


def _memory(rows: PodRows, options: PodOptions, gpus: int) -> tuple[ServeSettings, ServerMemory]:
    settings = options.settings(is_followed=rows.is_pulled and not gpus)
    # The Deployment may serve each of the aliases that there are, but --follow latest has one name.
    names = 1 if options.follow == "latest" else max(1, rows.aliases)
    if not gpus:
        memory = server_memory(
            settings, rows.mapped, rows.copied, options.hot, features=rows.features, names=names
        )
        return settings, memory
    check_device(settings, "cuda")
    memory = server_memory(settings, 0, gpus=gpus, features=rows.features, names=names)
    return settings, replace(memory, rows=CUDA_BYTES)


def head_lines(rows: PodRows, options: PodOptions, gpus: int = 0) -> list[str]:
    """Returns comments that explain the memory of a pod, and its cache; arguments are those of
    pod_figures."""
    settings, memory = _memory(rows, options, gpus)
    kept = "one version" if memory.versions == 1 else f"{memory.versions} versions"
    fraction = "" if settings.tables == "resident" else f", {100 * options.hot:g}% of the rows"
    kept = (
        "CUDA, a guess; the rows lie on the GPUs"
        if gpus
        else f"{kept}, {settings.tables}{fraction}"
    )
    lines = [
        f"# Made by embedserve plan --kubernetes: {sanitize(rows.name)},",
        f"# {human_bytes(rows.mapped)} of rows and ids. Memory:",
        f"#   {human_bytes(memory.rows)}: {kept}",
        f"#   {human_bytes(memory.processes)}: idle workers, {settings.workers}",
        f"#   {human_bytes(memory.work)}: requests in flight; the limit has"
        f" {human_bytes(memory.clients)} for",
        "#   all that clients can make workers hold (docs/settings.md#memory)",
    ]
    if rows.is_pulled:
        lines += [
            f"# Cache: {rows.cached_versions} versions: the two newest, the next, and"
            f" {rows.cached_versions - CACHED_VERSIONS} by alias.",
            f"# Each further alias takes {human_bytes(rows.mapped)}.",
        ]
    return lines


def ids_lines(rows: PodRows) -> list[str]:
    """Returns a comment that names an estimate of the vocabularies; none if they are published."""
    if not rows.ids or rows.model:
        return []
    return [
        f"# Ids are estimated as {human_bytes(rows.ids)}: one for each row of a table with a"
        " vocabulary.",
    ]


def _deployment(figures: Figures, given: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = {"name": "embedserve"}
    if given:
        container["env"] = [
            {"name": f"EMBEDSERVE_{name.upper()}", "value": str(value)}
            for name, value in given.items()
        ]
    written = {
        kind: {name: quantity(name, amount) for name, amount in amounts.items()}
        for kind, amounts in figures.items()
        if amounts
    }
    if resources := {kind: written[kind] for kind in ("requests", "limits") if kind in written}:
        container["resources"] = resources
    pod: dict[str, Any] = {"containers": [container]}
    if "cache" in written:
        pod["volumes"] = [{"name": "cache", "emptyDir": written["cache"]}]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "embedserve"},
        "spec": {**figures["rollout"], "template": {"spec": pod}},
    }


def quantity(name: str, amount: int) -> str:
    """Returns Kubernetes' notation of an amount: bytes in whole MiB, all else as it is."""
    return str(amount) if name in COUNTS else f"{math.ceil(amount / MIB)}Mi"
