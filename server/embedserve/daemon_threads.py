"""Runs long work off the event loop, in daemon threads that a process does not wait for at its
end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import Callable
from typing import TypeVar
from weakref import ref

T = TypeVar("T")


_running: set[threading.Thread] = set()


async def run_in_daemon_thread(name: str, work: Callable[[], T]) -> T:
    """Returns the result of ``work``, run in a new daemon thread; raises the exception of ``work``.

    Raises:
        BlockingIOError: no thread can be started.
    """
    # No frame that the exception passes through may have a name for the future that holds it. Frame
    # and exception would form a reference cycle, and keep everything that failed alive until Python
    # collects garbage.
    return await _begun(name, work)


def _begun(name: str, work: Callable[[], T]) -> asyncio.Future[T]:
    loop = asyncio.get_running_loop()
    begun: asyncio.Future[T] = loop.create_future()
    waiting = ref(begun)  # frames of ``run`` and ``work`` reach ``tell``, and so what it refers to

    def tell(result: T | None, error: Exception | None) -> None:
        done = waiting()
        if done is None or done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        finally:
            _running.discard(threading.current_thread())
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(tell, result, failure)
        del result, failure  # avoids the same reference cycle

    thread = threading.Thread(target=run, name=name, daemon=True)
    _running.add(thread)
    try:
        thread.start()
    except RuntimeError as error:
        _running.discard(thread)
        raise BlockingIOError(errno.EAGAIN, str(error)) from error
    return begun


def is_any_running() -> bool:
    """Returns whether such a thread is running. If the interpreter exits meanwhile, the thread may
    be killed within C++ code."""
    return bool(_running)
