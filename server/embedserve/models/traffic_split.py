"""Chooses the version that serves a request, by its model name or by weighted shares.

Shares apply to requests that name a model without a version. Requests with the same routing key go
to the same version while the shares do not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import random
from zlib import crc32

from embedserve.batching.batcher import Batcher

POINTS = 10_000
"""Number of points that routing keys are hashed to.

A share is a range of points, so its resolution is a hundredth of a percent."""


class TrafficSplit:
    """Routing from names to batchers for the currently served versions.

    Attributes:
        by_name: batcher by every name that a request may use: the served name, the model alone and
            MODEL@NUMBER.
        possible: by name, all batchers that may serve a request for it: for a model alone those of
            all its versions, because the body may name one.
        weighted: by model, the (end point, batcher) pairs of the versions that have a share of the
            requests without a version.
    """

    def __init__(self, batchers: Sequence[Batcher], shares: Mapping[str, float]) -> None:
        """
        Args:
            batchers: served batchers; the first of a model serves the rest that no share covers.
            shares: shares in percent, by served name.
        """
        self.by_name = {batcher.model.served_as: batcher for batcher in batchers}
        self.possible: dict[str, list[Batcher]] = {}
        self.weighted: dict[str, list[tuple[int, Batcher]]] = {}
        for batcher in batchers:
            model = batcher.model
            self.by_name.setdefault(model.name, batcher)
            self.by_name.setdefault(f"{model.name}@{model.version}", batcher)
            self.possible.setdefault(model.name, []).append(batcher)
        for name, batcher in self.by_name.items():
            self.possible.setdefault(name, [batcher])
        for batcher in batchers:
            self._add_share(batcher, shares.get(batcher.model.served_as, 0.0))

    def _add_share(self, batcher: Batcher, percent: float) -> None:
        """Assigns remaining points to ``batcher``, unless it is the model's default batcher."""
        name = batcher.model.name
        if not percent or self.by_name[name] is batcher:
            return
        shared = self.weighted.setdefault(name, [])
        end = shared[-1][0] if shared else 0
        shared.append((min(POINTS, end + round(percent * POINTS / 100)), batcher))

    def share_of(self, name: str) -> float:
        """Returns the percentage of requests without a version that the served ``name`` gets."""
        batcher = self.by_name[name]
        model = batcher.model.name
        start = 0
        for end, one in self.weighted.get(model, ()):
            if one is batcher:
                return (end - start) * 100 / POINTS
            start = end
        return (POINTS - start) * 100 / POINTS if self.by_name[model] is batcher else 0.0

    def choose(self, name: str, routing_key: bytes) -> Batcher:
        """Returns the batcher of the model ``name`` for ``routing_key``.

        With an empty key the choice is random, weighted by the shares.
        """
        point = random() * POINTS
        if routing_key:
            point = crc32(routing_key, crc32(name.encode())) % POINTS
        for end, batcher in self.weighted[name]:
            if point < end:
                return batcher
        return self.by_name[name]
