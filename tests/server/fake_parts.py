"""Parts of a router's tables with counts and replicas that a test sets."""

from dataclasses import dataclass, field, replace
from typing import Any

from embedserve.metrics.shard_metrics import PartStats
from embedserve.model_info import ModelInfo
from embedserve_store.plans.host_plan import HostPlan


@dataclass
class FakeParts:
    """Source of the counts and of the description of parts.

    Attributes:
        stats: counts by number of the part.
        joined: replicas of each part, by version.
    """

    stats: list[tuple[int, PartStats]] = field(default_factory=list)
    joined: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    def part_counts(self) -> list[tuple[int, PartStats]]:
        return self.stats

    def replicas(self, model: str, version: int) -> list[int]:
        return self.joined.get((model, version), [])

    def describe(self, model: str, version: int) -> list[dict[str, Any]]:
        return [
            {"part": part, "replicas": count, "why": "" if count else f"part {part} is lost"}
            for part, count in enumerate(self.replicas(model, version))
        ]


def in_parts(model: ModelInfo, shards: FakeParts, parts: int = 2) -> ModelInfo:
    """Returns ``model`` as a router serves it, with all rows on the last part."""
    rows = {one.name: (*[0] * parts, one.num_embeddings) for one in model.tables}
    return replace(model, plan=replace(model.plan, hosts=HostPlan(parts, rows)), shards=shards)
