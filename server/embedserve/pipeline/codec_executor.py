"""Runs slow decoding and encoding in a thread, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from embedserve.errors import EmbedServeError, OverloadedError

if TYPE_CHECKING:
    from embedserve.pipeline.request_context import RequestContext

T = TypeVar("T")
WAITING_BYTES_MAX = 256 << 20
"""Maximum bytes of large request bodies and responses that wait for the codec thread, in total. It
bounds the memory that they hold. A single call is accepted at any size while no other waits."""


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
        context: RequestContext,
        what: str,
        nbytes: int,
        work: Callable[[], T],
        then: Callable[[T], None],
    ) -> None:
        """Runs ``work`` in the codec thread, then calls ``then`` with its result on the event
        loop.

        Once ``context`` is no longer waiting, ``work`` is skipped or its result is dropped. An
        error from ``work`` or ``then`` rejects or fails ``context``.

        Args:
            what: name of the data in error messages, "body" or "answer".
            nbytes: bytes of that data, which count against the budget until the work is done.

        Raises:
            OverloadedError: the budget is exhausted.
        """
        if self._bytes and self._bytes + nbytes > WAITING_BYTES_MAX:
            raise OverloadedError(
                f"{what} has {nbytes} bytes, and {self._bytes} of other large requests and "
                "answers wait to be read and written"
            )
        self._bytes += nbytes

        def work_if_waiting() -> T | None:
            return work() if context.is_waiting else None

        def done(future: asyncio.Future[T | None]) -> None:
            self._bytes -= nbytes
            if not context.is_waiting:
                future.exception()  # retrieved, or asyncio would log it
                return
            try:
                result = future.result()
                assert result is not None  # call was waiting throughout, so work ran
                then(result)
            except EmbedServeError as error:
                context.reject(error)
            except Exception:
                context.fail()

        loop = asyncio.get_running_loop()
        loop.run_in_executor(self._thread, work_if_waiting).add_done_callback(done)
