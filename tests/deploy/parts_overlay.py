"""Renders overlays of a model in parts: routers of deploy/kubernetes, and printed shards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import yaml

from embedserve.commands.planning.pod_patch import PodOptions, PodRows
from embedserve.commands.planning.shard_manifests import shard_manifests

from .conftest import COMPONENTS, Rendered, kustomize_text, manifests_of

PARTS_COMPONENTS = tuple(name for name in COMPONENTS if name not in ("gpu", "shared-memory"))
"""Components that combine with parts."""
GIB = 1 << 30
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


def render_parts(
    parts: int, *components: str, rows: PodRows = ROWS, options: PodOptions | None = None
) -> Rendered:
    """Renders overlays/parts with the shards of ``parts`` parts.

    Their store is remote if the component s3 is among ``components``.
    """
    rows = replace(rows, is_pulled="s3" in components)
    text = shard_manifests(parts, rows, options or PodOptions())
    return render_with(text, *components)


def render_with(shards: str, *components: str) -> Rendered:
    """Renders overlays/parts with the printed ``shards``."""
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["KUBERNETES/overlays/parts", "parts.yaml"],
        "components": [f"KUBERNETES/components/{name}" for name in components],
    }
    text = yaml.safe_dump(kustomization)
    name = "+".join(components) or "parts"
    return Rendered(name, manifests_of(kustomize_text(text, {"parts.yaml": shards})), components)


def shards_of(rendered: Rendered) -> list[Shard]:
    count = len(rendered.named("StatefulSet"))
    return [
        Shard(rendered.name, rendered.manifests, rendered.components, part) for part in range(count)
    ]
