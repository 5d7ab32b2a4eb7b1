"""Which of the served versions answers a request: by the name that it has, or by shares.

A share is of the requests that name a model and no version. Who asks with a routing key is answered
by the same version as long as the shares are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import random
from zlib import crc32

from embedserve.batching.batcher import Batcher

POINTS = 10_000
"""That keys fall on: a share is told to a hundredth of a percent."""


class TrafficSplit:
    """From names to batchers, for the versions that are served now.

    Attributes:
        by_name: by every name that a request may have: as served, the model alone, and
            MODEL@NUMBER.
        possible: by name, all that may answer a request whose body is not read yet.
        shared: models of which several versions share the requests that name none.
    """

    def __init__(self, batchers: Sequence[Batcher], shares: Mapping[str, float]) -> None:
        """
        Args:
            batchers: the first of a model answers what no other has a share of.
            shares: in percent, by name as served.
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
        """From the points that are left; nothing to the one that answers all the others."""
        name = batcher.model.name
        if not percent or self.by_name[name] is batcher:
            return
        shared = self.weighted.setdefault(name, [])
        end = shared[-1][0] if shared else 0
        shared.append((min(POINTS, end + round(percent * POINTS / 100)), batcher))

    def share_of(self, name: str) -> float:
        """What ``name``, as served, answers of the requests that name its model and no version; in
        percent."""
        batcher = self.by_name[name]
        model = batcher.model.name
        start = 0
        for end, one in self.weighted.get(model, ()):
            if one is batcher:
                return (end - start) * 100 / POINTS
            start = end
        return (POINTS - start) * 100 / POINTS if self.by_name[model] is batcher else 0.0

    def choose(self, name: str, routing_key: bytes) -> Batcher:
        """Of those that share the model ``name``, the one that answers who has ``routing_key``; any
        by its share where that is empty."""
        point = random() * POINTS
        if routing_key:
            point = crc32(routing_key, crc32(name.encode())) % POINTS
        for end, batcher in self.weighted[name]:
            if point < end:
                return batcher
        return self.by_name[name]
