"""Text of /metrics, rendered once for all scrapes that wait at that time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from time import perf_counter

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

RECEIVED_S = "embedserve.received_s"
"""The key of an ASGI scope for the perf_counter time at which the request was complete."""
TURN_S = 0.002
"""Seconds of rendering in an event-loop iteration. A server of twenty models takes 40 ms in all."""


class ScrapeText:
    """Renders a registry, and reuses the text for scrapes received before it was rendered.

    A flood of scrapes thus costs few renderings, and every scrape gets values that are no older
    than itself. The values are read in one event-loop iteration, and rendered in several.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._text = b""
        self._rendered_s = -math.inf
        self._lock = asyncio.Lock()

    async def render(self, received_s: float) -> bytes:
        """Returns the values at ``received_s`` (perf_counter) or later, in Prometheus's format."""
        async with self._lock:
            if received_s >= self._rendered_s:
                start_s = perf_counter()
                self._text = await self._render()
                self._rendered_s = start_s
            return self._text

    async def _render(self) -> bytes:
        texts, turn_s = [], perf_counter()
        for family in self._registry.collect():
            if perf_counter() - turn_s > TURN_S:
                await asyncio.sleep(0)
                turn_s = perf_counter()
            texts.append(generate_latest(_OneFamily(family)))
        return b"".join(texts)


class _OneFamily(Collector):
    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family
