"""What takes long to decode or to encode, done beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from embedserve.errors import EmbedServeError, OverloadedError

T = TypeVar("T")
ASIDE_BYTES_MAX = 256 << 20
"""Of large bodies and answers that wait to be decoded or encoded, all together; a lone one is
always taken."""


class PendingCall(Protocol):
    """Whoever waits for it: is told what went wrong, unless it went away."""

    is_waiting: bool

    def reject(self, error: EmbedServeError) -> None: ...

    def fail(self) -> None: ...


class CodecExecutor:
    """A thread, which the event loop shares the interpreter with, and the bytes that wait for it.

    Used from the event loop.
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
        """Has ``work`` done in the thread, and ``go_on`` called in the event loop with what it
        made, unless ``call`` is not waiting any more.

        Args:
            what: it is, "body" or "answer", and its bytes.

        Raises:
            OverloadedError: too much waits for that already.
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
                made.exception()  # asked for, or asyncio would log it
                return
            try:
                result = made.result()
                assert result is not None  # it was wanted to the end
                go_on(result)
            except EmbedServeError as error:
                call.reject(error)
            except Exception:
                call.fail()

        loop = asyncio.get_running_loop()
        loop.run_in_executor(self._thread, work_if_wanted).add_done_callback(done)
