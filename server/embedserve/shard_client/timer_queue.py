"""Many deadlines with one timer of the event loop.

Times are time.monotonic() seconds, because uvloop's own clock ticks in whole milliseconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Protocol

logger = logging.getLogger(__name__)

TICK_S = 1e-3
"""Shortest delay of a timer. uvloop rounds shorter delays to 0, and would poll until they pass."""
LATE_S = 3e-3
"""Seconds by which a timer may be late. A later one means that the event loop was busy, and that
replies may have arrived which it has not read: uvloop runs timers before it reads from sockets."""


CallLater = Callable[[float, Callable[[], None]], asyncio.TimerHandle]


class Due(Protocol):
    """An item of the queue.

    Attributes:
        is_over: whether the item needs no more timers.
    """

    is_over: bool

    def on_due(self, now_s: float) -> None:
        """Handles a passed deadline."""


class TimerQueue:
    """A queue of items by deadline. Items that are over are dropped when their deadline passes.

    After the event loop was busy, replies that have arrived are read before deadlines count.

    Attributes:
        clock: monotonic clock, which also sets ``last_received_s`` of the connections.
        call_later: starts a timer.
    """

    def __init__(self, clock: Callable[[], float], call_later: CallLater) -> None:
        self.clock = clock
        self.call_later = call_later
        self._heap: list[tuple[float, int, Due]] = []
        self._count = 0  # breaks ties, so that items are not compared
        self._armed_s = float("inf")
        self._is_delayed = False  # whether the timer was late, and replies are read first
        self._timer: asyncio.TimerHandle | None = None

    def push(self, due_s: float, item: Due, now_s: float) -> None:
        """Calls ``item.on_due`` at ``due_s`` or up to a few ms later, unless it is over by then."""
        self._count += 1
        heappush(self._heap, (due_s, self._count, item))
        if due_s < self._armed_s - TICK_S:  # libuv's timers cost more than a tick's delay is worth
            self._arm(due_s, now_s)

    def _arm(self, due_s: float, now_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed_s = due_s
        self._timer = self.call_later(max(TICK_S, due_s - now_s), self._run)

    def _run(self) -> None:
        now_s = self.clock()
        self._is_delayed = not self._is_delayed and now_s - self._armed_s > LATE_S
        if self._is_delayed:
            self._timer = self.call_later(TICK_S, self._run)
            return
        self._timer, self._armed_s = None, float("inf")
        heap = self._heap
        while heap and (heap[0][0] <= now_s or heap[0][2].is_over):
            item = heappop(heap)[2]
            if item.is_over:
                continue
            try:
                item.on_due(now_s)
            except Exception:
                logger.exception("a deadline could not be processed")
        if heap and heap[0][0] < self._armed_s:
            self._arm(heap[0][0], now_s)
