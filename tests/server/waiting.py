"""Waits until something becomes true, without guessing how long that takes."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

WAIT_S_MAX = 60.0


async def until(is_true: Callable[[], object]) -> None:
    """Returns when ``is_true`` does; raises TimeoutError after a minute."""
    async with asyncio.timeout(WAIT_S_MAX):
        while not is_true():  # noqa: ASYNC110  the condition has no event
            await asyncio.sleep(0.001)


@contextmanager
def given_up_after(seconds: int) -> Iterator[None]:
    """Fails a test whose block runs for ``seconds``, for instance because no response comes."""

    def give_up(*_: object) -> NoReturn:
        raise TimeoutError(f"the test ran for {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
