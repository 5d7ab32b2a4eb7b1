"""Finds out which waiting calls have lost their client, and cancels them.

An ASGI server that has handed over a whole request tells of a disconnect only when it is asked
(pyvoy answers each receive() with an empty body until then). So calls that have waited for a while
are asked about, less and less often, and not many at a time.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from embedserve.frontends.grpc_call import Call, ClientGoneError

TICK_S = 0.02
ASKED_PER_TICK_MAX = 64
"""About a millisecond of work in each second for every one of these."""
TICKS_BETWEEN_MAX = 32


class Cancellable(Protocol):
    """A task, or what waits without one."""

    def cancel(self) -> object: ...


class _Waiting:
    """A call whose answer is awaited by ``waiter``."""

    __slots__ = ("call", "is_asked", "is_over", "next_tick", "ticks_between", "waiter")

    def __init__(self, call: Call, waiter: Cancellable, tick: int) -> None:
        self.call = call
        self.waiter = waiter
        self.is_asked = False
        self.is_over = False
        self.ticks_between = 1
        self.next_tick = tick + 1

    async def ask(self) -> None:
        """Cancels the waiter if the client has gone."""
        self.is_asked = True
        try:
            await self.call.receive()
        except ClientGoneError:
            if not self.is_over:
                self.waiter.cancel()
        self.is_asked = False


class GoneClients:
    """The calls that wait, and who of their clients went away."""

    def __init__(self) -> None:
        self._waiting: dict[Call, _Waiting] = {}
        self._asking: set[asyncio.Task[None]] = set()
        self._tick_number = 0
        self._is_ticking = False

    def add(self, call: Call, waiter: Cancellable) -> None:
        """From now on ``waiter`` is cancelled if the client of ``call`` goes; nobody else receives.

        That is noticed within milliseconds for a call that has just begun to wait, and within a
        second for one that has waited for long, unless hundreds wait."""
        self._waiting[call] = _Waiting(call, waiter, self._tick_number)
        if not self._is_ticking:
            self._is_ticking = True
            asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def remove(self, call: Call) -> None:
        """``call`` waits no more; none that was not added is minded."""
        one = self._waiting.pop(call, None)
        if one is not None:
            one.is_over = True

    def _tick(self) -> None:
        self._is_ticking = bool(self._waiting)
        if not self._is_ticking:
            return
        asyncio.get_running_loop().call_later(TICK_S, self._tick)
        self._tick_number += 1
        due = []
        for one in self._waiting.values():
            if one.next_tick <= self._tick_number and not one.is_asked:
                due.append(one)
                if len(due) == ASKED_PER_TICK_MAX:
                    break
        for one in due:
            self._ask(one)

    def _ask(self, one: _Waiting) -> None:
        one.next_tick = self._tick_number + one.ticks_between
        one.ticks_between = min(2 * one.ticks_between, TICKS_BETWEEN_MAX)
        asking = asyncio.create_task(one.ask())
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        # Those that were asked go behind those that were not.
        self._waiting[one.call] = self._waiting.pop(one.call)
