"""Threads that transfer parts of files. Their calls of a store end if the transfer is interrupted.

A store that hangs would otherwise delay Ctrl-C, or the end of a server, by the timeout of a part.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

_pools = threading.local()


class TransferPool(ThreadPoolExecutor):
    """Pool of ``count`` threads, for a with block.

    If an Exception leaves the block, parts in transfer still end, so that the next transfer can
    use them. After an interrupt, as by Ctrl-C, their calls are cancelled.
    """

    def __init__(self, count: int, name: str) -> None:
        super().__init__(count, name, initializer=lambda: setattr(_pools, "own", self))
        self.calls: set[Future[Any]] = set()
        self.is_interrupted = False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown(wait=False, cancel_futures=True)
        if kind is not None and not issubclass(kind, Exception):
            self.is_interrupted = True
            for call in list(self.calls):
                call.cancel()
        self.shutdown()


def run(loop: asyncio.AbstractEventLoop, call: Coroutine[Any, Any, Any], limit_s: float) -> Any:
    """Returns the result of ``call`` on the event loop of another thread.

    Raises:
        TimeoutError: it took more than ``limit_s``.
        CancelledError: the transfer was interrupted.
    """
    future = asyncio.run_coroutine_threadsafe(call, loop)
    pool: TransferPool | None = getattr(_pools, "own", None)
    try:
        if pool is not None:
            pool.calls.add(future)
            if pool.is_interrupted:  # between two calls
                future.cancel()
        return future.result(limit_s)
    finally:
        future.cancel()
        if pool is not None:
            pool.calls.discard(future)
