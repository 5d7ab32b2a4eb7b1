"""Runs slow decoding and encoding in a thread, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from embedserve.errors import EmbedServeError, OverloadedError

T = TypeVar("T")
ASIDE_BYTES_MAX = 256 << 20
"""Maximum bytes of large request bodies and responses that wait for the codec thread, in total. It
bounds the memory that they hold. A single call is accepted at any size while no other waits."""


class PendingCall(Protocol):
    """The request that waits for the work. It is notified of an error, unless its client has
    disconnected."""

    is_waiting: bool

    def reject(self, error: EmbedServeError) -> None: ...

    def fail(self) -> None: ...


class CodecExecutor:
    """A single codec thread with a byte budget for queued work.

    The thread competes with the event loop for the interpreter lock. All methods are called on the
    event loop.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="codec")
        self._bytes = 0

    def submit(
        self,
        call: PendingCall,
        what: str,
        nbytes: int,
        work: Callable[[], T],
        go_on: Callable[[T], None],
    ) -> None:
        """Runs ``work`` in the codec thread, then calls ``go_on`` with its result on the event
        loop.

        If ``call`` has stopped waiting, ``work`` is skipped or its result is dropped. An error from
        ``work`` or ``go_on`` rejects or fails ``call``.

        Args:
            what: name of the data in error messages, "body" or "answer".
            nbytes: bytes of that data, which count against the budget until the work is done.

        Raises:
            OverloadedError: the budget is exhausted.
        """
        if self._bytes and self._bytes + nbytes > ASIDE_BYTES_MAX:
            raise OverloadedError(
                f"{what} has {nbytes} bytes, and {self._bytes} of other large requests and "
                "answers wait to be read and written"
            )
        self._bytes += nbytes

        def work_if_wanted() -> T | None:
            return work() if call.is_waiting else None

        def done(made: asyncio.Future[T | None]) -> None:
            self._bytes -= nbytes
            if not call.is_waiting:
                made.exception()  # retrieved, or asyncio would log it
                return
            try:
                result = made.result()
                assert result is not None  # call was waiting throughout, so work ran
                go_on(result)
            except EmbedServeError as error:
                call.reject(error)
            except Exception:
                call.fail()

        loop = asyncio.get_running_loop()
        loop.run_in_executor(self._thread, work_if_wanted).add_done_callback(done)
