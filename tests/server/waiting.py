"""Waits for something to become true, without guessing how long it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

WAIT_S_MAX = 10.0


async def until(is_true: Callable[[], object]) -> None:
    """Returns when ``is_true`` does; TimeoutError after 10 seconds."""
    async with asyncio.timeout(WAIT_S_MAX):
        while not is_true():  # noqa: ASYNC110  what is waited for knows no event
            await asyncio.sleep(0.001)
