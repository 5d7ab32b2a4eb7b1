"""Work beside the event loop that may take long, and that no process waits for when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


_running: set[threading.Thread] = set()


async def run_in_daemon_thread(name: str, work: Callable[[], T]) -> T:
    """What ``work`` gives, done in a thread of its own; raises what it raises."""
    # No frame that an error passes has a name for the future that holds it: they would hold each
    # other, and all that failed, until Python collects its garbage.
    return await _begun(name, work)


def _begun(name: str, work: Callable[[], T]) -> asyncio.Future[T]:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: Exception | None) -> None:
        if done.cancelled():
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
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(tell, result, failure)
        del result, failure  # as above

    thread = threading.Thread(target=run, name=name, daemon=True)
    _running.add(thread)
    thread.start()
    return done


def is_any_running() -> bool:
    """Whether such a thread works on: an interpreter that ends meanwhile may end it within C++."""
    return bool(_running)
