"""Slowest requests of the last minutes of one process, kept for operators."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from time import perf_counter
from typing import Any

from embedserve.model_info import now_iso

KEPT_MAX = 20
"""Slow requests kept per process."""
KEPT_S = 600.0
"""Seconds for which a slow request is kept after its end."""
LogFields = dict[str, Any]


class SlowRequests:
    """Keeps the KEPT_MAX slowest of the added requests that ended less than KEPT_S ago."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        # Seconds, time of the end and fields of each request, the slowest first.
        self._kept: list[tuple[float, float, LogFields]] = []

    def add(self, seconds: float, fields: Callable[[], LogFields]) -> None:
        """Adds a request that took ``seconds``; calls ``fields`` only if the request is kept."""
        self._forget()
        if len(self._kept) == KEPT_MAX and seconds <= self._kept[-1][0]:
            return
        slow = (seconds, self._clock(), {"when": now_iso()} | fields())
        insort(self._kept, slow, key=lambda one: -one[0])
        del self._kept[KEPT_MAX:]

    def fields(self) -> list[LogFields]:
        """Returns the log fields and end time ("when") of each kept request, the slowest first."""
        self._forget()
        return [fields for _, _, fields in self._kept]

    def _forget(self) -> None:
        oldest_s = self._clock() - KEPT_S
        self._kept = [one for one in self._kept if one[1] > oldest_s]
