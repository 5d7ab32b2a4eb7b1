"""Who waits for the answer to a request: what the batcher knows of its callers.

A caller is told once, on the event loop's thread, and must not raise: what goes wrong in telling
one must not reach the requests that shared its batch.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from embedserve.errors import EmbedServeError
from embedserve.types import LookupResult


class Caller(Protocol):
    """One request's caller.

    Attributes:
        is_waiting: False once it went away: its request leaves the queue before it costs a
            lookup, and it is told nothing.
    """

    @property
    def is_waiting(self) -> bool: ...

    def answer(self, result: LookupResult) -> None: ...

    def refuse(self, error: EmbedServeError) -> None: ...


class FutureCaller:
    """A caller that awaits a future, and goes away by cancelling it."""

    __slots__ = ("future",)

    def __init__(self, future: asyncio.Future[LookupResult]) -> None:
        self.future = future

    @property
    def is_waiting(self) -> bool:
        return not self.future.done()

    def answer(self, result: LookupResult) -> None:
        self.future.set_result(result)

    def refuse(self, error: EmbedServeError) -> None:
        self.future.set_exception(error)
