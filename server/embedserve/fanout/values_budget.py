"""Bounds of the batches that a router has in flight, and of the values that their parts return."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

BATCHES_MAX = 8
"""Batches in flight of one version. More would be smaller, and each costs a call to every part."""
VALUES_BYTES_MAX = 256 << 20
"""Bytes of values that batches in flight may get from their parts, unless a single batch gets more;
256 MiB."""


class ValuesBudget:
    """Lets batches begin while the values that they may get fit the bound, in their order. Used on
    one event loop."""

    def __init__(self) -> None:
        self._used = 0
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()

    def begin(self, nbytes: int, start: Callable[[], None]) -> None:
        """Calls ``start``, which raises nothing, now or once there is room. ``end`` follows each
        start."""
        self._waiting.append((nbytes, start))
        self._start_waiting()

    def end(self, nbytes: int) -> None:
        """Returns the bytes of a batch."""
        self._used -= nbytes
        self._start_waiting()

    def _start_waiting(self) -> None:
        while self._waiting:
            nbytes, start = self._waiting[0]
            if self._used and self._used + nbytes > VALUES_BYTES_MAX:
                return
            del self._waiting[0]
            self._used += nbytes
            start()
