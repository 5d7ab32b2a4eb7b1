"""Ends a single-process server whose event loop hangs, so that it is restarted from outside.

Workers are watched by their supervisor instead. Here a thread watches the event loop. Before the
process ends, faulthandler writes the stack of every thread, from its own thread that needs no lock
of Python's.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import sys
import threading
from collections.abc import AsyncIterator
from time import monotonic

from embedserve.daemon_threads import is_any_running
from embedserve.periodic import repeat
from embedserve.processes.forked import LAST_WORDS_S
from embedserve.processes.supervisor import POLL_S, PREPARING_HANG_S

logger = logging.getLogger(__name__)

BEAT_S = 0.5
"""Seconds between two heartbeats of the event loop."""


class Watchdog:
    """Thread that ends this process with exit code 1 once its event loop hangs."""

    def __init__(self, hang_s: float) -> None:
        """``hang_s``: seconds that the event loop may go without a heartbeat."""
        self._hang_s = hang_s
        self._beats = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def beat(self) -> None:
        self._beats += 1

    def _watch(self) -> None:
        """Polls the heartbeats every POLL_S. Time in which this thread did not run either, as when
        the whole process is frozen, does not count."""
        beats, silent_s, polled_s = self._beats, 0.0, monotonic()
        while not self._stopped.wait(POLL_S):
            now_s = monotonic()
            passed_s, polled_s = min(now_s - polled_s, 2 * POLL_S), now_s
            if beats != self._beats:
                beats, silent_s = self._beats, 0.0
                continue
            silent_s += passed_s
            # Compiling a large model blocks the event loop.
            hang_s = max(self._hang_s, PREPARING_HANG_S) if is_any_running() else self._hang_s
            if silent_s > hang_s:
                _end(silent_s)
                return


def _end(silent_s: float) -> None:
    # Before logging, because the hung thread may hold the lock of the log.
    faulthandler.dump_traceback_later(LAST_WORDS_S, exit=True, file=sys.stderr)
    logger.error("the event loop hangs: no heartbeat for %.0f s; the server is ended", silent_s)


@contextlib.asynccontextmanager
async def watched(hang_s: float) -> AsyncIterator[None]:
    """Ends this process if its event loop hangs for ``hang_s`` seconds within the block; 0:
    never."""
    if not hang_s:
        yield
        return
    watchdog = Watchdog(hang_s)
    beating = asyncio.create_task(repeat(BEAT_S, watchdog.beat))
    watchdog.start()
    try:
        yield
    finally:
        beating.cancel()
        watchdog.stop()
