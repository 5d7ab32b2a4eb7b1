"""Runs pushes one at a time: in the caller, or in a thread while training continues."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
PushCall = Callable[[], int]
"""Writes a delta and returns its seq; a collective of all ranks, over the writer's own group."""


class PushRunner:
    """Runs the pushes of one rank. At most one is in flight.

    A push in a thread makes its collectives over the writer's own group of ranks, which nobody else
    uses until the push is joined. So all ranks run them in the same order, whatever training does
    at the same time over its own groups. A push ends with a collective: it succeeds on all ranks or
    on none.
    """

    def __init__(self) -> None:
        self._in_flight: tuple[Future[int], Callable[[], None]] | None = None
        """The push, and the function to call if it raises."""

    def run(self, push: PushCall, on_failure: Callable[[], None]) -> int:
        """Runs ``push``, and returns its result. If it raises, calls ``on_failure`` and raises."""
        try:
            return push()
        except BaseException:
            on_failure()
            raise

    def start(self, push: PushCall, on_failure: Callable[[], None]) -> Future[int]:
        """Runs ``push`` in a thread. Until it is joined, no other push may begin.

        If no thread can be started, it runs in the caller, because the other ranks wait for it.
        The interpreter does not exit before the thread has ended.

        Args:
            on_failure: is called by ``join``, on its thread, if the push raised.
        """
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()  # cannot be cancelled: other ranks would wait
        self._in_flight = future, on_failure
        thread = threading.Thread(target=_run, args=(push, future), name="delta-push")
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            logger.warning("training waits: there is no thread for a push: %s", error)
            _run(push, future)
        return future

    def join(self) -> None:
        """Waits for the push in flight, if there is one, and raises its error once."""
        if self._in_flight is None:
            return
        future, on_failure = self._in_flight
        wait([future])
        self._in_flight = None
        self.run(future.result, on_failure)

    def leave(self) -> None:
        """Leaves the push in flight to itself: it ends by itself, and an error is logged."""
        if self._in_flight is not None:
            self._in_flight[0].add_done_callback(_log_failure)


def evaluate(call: Callable[[], Result]) -> Callable[[], Result]:
    """Calls ``call``, and returns a function that returns its result or raises its error."""
    future: Future[Result] = Future()
    _run(call, future)
    return future.result


def _run(call: Callable[[], Result], future: Future[Result]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


def _log_failure(future: Future[int]) -> None:
    if (error := future.exception()) is not None:
        logger.error("the last push failed: %s: %s", type(error).__name__, error)
