"""Renders overlays of a model in parts: routers of deploy/kubernetes, and printed shards.

Also runs the script of docs/parts.md that updates them.
"""

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from documents import ROOT, blocks

from embedserve.commands.planning.pod_patch import PodOptions, PodRows
from embedserve.commands.planning.shard_manifests import shard_manifests

from .conftest import COMPONENTS, Rendered, kustomization_of, render_together

PARTS_COMPONENTS = tuple(name for name in COMPONENTS if name not in ("gpu", "shared-memory"))
"""Components that combine with parts."""
GIB = 1 << 30
PAGE = ROOT / "docs" / "parts.md"
SCRIPT_S_MAX = 60
FAKE_KUBECTL = """#!/bin/bash
(IFS=$'\t'; echo "$*") >> "$CALLS"
[[ "$1" != rollout || "$3" != "$FAILING" ]]
"""
"""Records its arguments, and fails for the rollout of FAILING."""
ROWS = PodRows("shop@1 of store", 30 * GIB, model="shop")


@dataclass(frozen=True)
class Shard(Rendered):
    """The pods of one part, in the manifests of an overlay."""

    part: int = 0

    @property
    def stateful_set(self) -> dict[str, Any]:
        return self.one("StatefulSet", f"embedserve-part-{self.part}")

    @property
    def pod(self) -> dict[str, Any]:
        pod: dict[str, Any] = self.stateful_set["spec"]["template"]["spec"]
        return pod


def render_parts(parts: int, *components: str, rows: PodRows = ROWS) -> Rendered:
    """Renders overlays/parts with the shards of ``parts`` parts."""
    return render_with(printed_shards(parts, components, rows), *components)


def printed_shards(parts: int, components: Sequence[str], rows: PodRows = ROWS) -> str:
    """Returns the manifests of shards, whose store is remote if they have the component s3."""
    return shard_manifests(parts, replace(rows, is_pulled="s3" in components), PodOptions())


def render_with(shards: str, *components: str) -> Rendered:
    """Renders overlays/parts with the printed ``shards``."""
    (rendered,) = render_each([(shards, components)])
    return rendered


def render_each(overlays: Sequence[tuple[str, tuple[str, ...]]]) -> list[Rendered]:
    """Renders overlays/parts together, each time with printed shards and components."""
    texts = [parts_kustomization(components) for _, components in overlays]
    files = [{"parts.yaml": shards} for shards, _ in overlays]
    return [
        Rendered("+".join(components) or "parts", manifests, components)
        for (_, components), manifests in zip(overlays, render_together(texts, files), strict=True)
    ]


def parts_kustomization(components: Sequence[str]) -> str:
    return kustomization_of(components, "KUBERNETES/overlays/parts", "parts.yaml")


def shards_of(rendered: Rendered) -> list[Shard]:
    count = len(rendered.named("StatefulSet"))
    return [
        Shard(rendered.name, rendered.manifests, rendered.components, part) for part in range(count)
    ]


def is_selected_by(manifest: dict[str, Any], selector: str) -> bool:
    """Returns whether kubectl's ``-l selector`` selects a manifest."""
    found = manifest["metadata"].get("labels", {})
    is_selected = True
    for key, others, equal, value in re.findall(
        r"([\w./-]+) notin \((.*?)\)|([\w./-]+)=([\w-]+)", selector
    ):
        if key:
            is_selected &= found.get(key) not in others.split(", ")
        else:
            is_selected &= found.get(equal) == value
    return is_selected


def run_documented_update(folder: Path, count: int, failing_part: int = -1) -> list[list[str]]:
    """Runs the page's script with a fake kubectl; returns the arguments of each call.

    ``failing_part`` never becomes ready.
    """
    (script,) = (one.text for one in blocks(PAGE) if "kubectl rollout status" in one.text)
    assert "for part in 0 1;" in script
    numbers = " ".join(map(str, range(count)))
    kubectl = folder / "kubectl"
    kubectl.write_text(FAKE_KUBECTL)
    kubectl.chmod(0o755)
    calls = folder / "calls"
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "FAILING": f"statefulset/embedserve-part-{failing_part}",
    }
    script = script.replace("for part in 0 1;", f"for part in {numbers};")
    done = subprocess.run(["bash", "-c", script], env=environment, timeout=SCRIPT_S_MAX)
    assert (done.returncode != 0) == (failing_part >= 0)
    return [line.split("\t") for line in calls.read_text().splitlines()]


def applied_by(call: list[str], manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the manifests that a call of ``kubectl apply`` applies."""
    assert call[:3] == ["apply", "-k", "shop"]
    if not call[3:]:
        return manifests
    option, selector = call[3:]
    assert option == "-l"
    return [one for one in manifests if is_selected_by(one, selector)]
