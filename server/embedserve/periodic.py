"""Periodic work on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn


async def repeat(every_s: float, work: Callable[[], Awaitable[None] | None]) -> NoReturn:
    """Calls ``work`` every ``every_s`` seconds until it is cancelled; awaits its result if it has
    one."""
    while True:
        await asyncio.sleep(every_s)
        pending = work()
        if pending is not None:
            await pending
