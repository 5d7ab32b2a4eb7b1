"""Text of /metrics, rendered once for all scrapes that wait at that time."""

from __future__ import annotations

import math
from time import perf_counter

from prometheus_client import CollectorRegistry, generate_latest

RECEIVED_S = "embedserve.received_s"
"""The key of an ASGI scope for the perf_counter time at which the request was complete."""


class ScrapeText:
    """Renders a registry, and reuses the text for scrapes received before it was rendered.

    A flood of scrapes thus costs few renderings, and every scrape gets values that are no older
    than itself.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._text = b""
        self._rendered_s = -math.inf

    def render(self, received_s: float) -> bytes:
        """Returns the values at ``received_s`` (perf_counter) or later, in Prometheus's format."""
        if received_s >= self._rendered_s:
            start_s = perf_counter()
            self._text = generate_latest(self._registry)
            self._rendered_s = start_s
        return self._text
