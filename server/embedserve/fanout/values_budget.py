"""Bounds the values that the parts of a router's batches return: large batches wait until those in
flight have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

BATCHES_MAX = 8
"""Batches in flight of one version. More would be smaller, and each costs a call to every part."""
SMALL_BYTES_MAX = 8 << 20
"""Bytes of the values of a batch that never waits for others; 8 MiB."""
VALUES_BYTES_MAX = 256 << 20
"""Bytes of the values of all larger batches in flight, unless a single one has more; 256 MiB. The
responses that they are copied from come on top."""
PADDED_TIMES = 2
"""Maximum columns of vectors with padding, as a multiple of those without."""


@dataclass(eq=False)
class _Waiting:
    nbytes: int
    start: Callable[[], None]
    timer: asyncio.TimerHandle


class ValuesBudget:
    """Lets the large batches of a process begin, in their order, while the values that their parts
    may return fit the bound. Used on one event loop."""

    def __init__(self) -> None:
        self._used = 0
        self._waiting: list[_Waiting] = []

    def begin(
        self, nbytes: int, start: Callable[[], None], until_s: float, expire: Callable[[], None]
    ) -> None:
        """Calls ``start``, which raises nothing, now or once there is room. ``end`` follows it.

        Args:
            nbytes: bytes of the values.
            until_s: time.monotonic() at which ``expire`` is called in its place.
        """
        if nbytes <= SMALL_BYTES_MAX:
            start()
        elif not self._waiting and self._has_room(nbytes):
            self._used += nbytes
            start()
        else:
            loop, left_s = asyncio.get_running_loop(), until_s - monotonic()
            timer = loop.call_later(left_s, self._expire, start, expire)
            self._waiting.append(_Waiting(nbytes, start, timer))

    def end(self, nbytes: int) -> None:
        """Returns the bytes of a batch."""
        if nbytes > SMALL_BYTES_MAX:
            self._used -= nbytes
            self._start_waiting()

    def _has_room(self, nbytes: int) -> bool:
        return not self._used or self._used + nbytes <= VALUES_BYTES_MAX

    def _expire(self, start: Callable[[], None], expire: Callable[[], None]) -> None:
        self._waiting = [one for one in self._waiting if one.start is not start]
        expire()
        self._start_waiting()  # the next one may be smaller

    def _start_waiting(self) -> None:
        while self._waiting and self._has_room(self._waiting[0].nbytes):
            waiting = self._waiting.pop(0)
            waiting.timer.cancel()
            self._used += waiting.nbytes
            waiting.start()
