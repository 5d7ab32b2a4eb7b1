"""Runs a client operation with retries.

An operation is a coroutine that sends calls, which are data of either protocol. The sync and the
async client share it: `run` gives it functions that block in place of those that await.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from embedserve_client.core.retries import RetryState
from embedserve_client.errors import EmbedServeClientError, Unavailable

A = TypeVar("A")
T = TypeVar("T")

CLOSED = "the client was closed during the call"

Send: TypeAlias = Callable[[Any], Awaitable[Any]]
"""Sends a call and returns its result, or raises its error."""


@dataclass(frozen=True)
class Operation(Generic[T]):
    """A client operation that can be attempted several times.

    Attributes:
        attempt: makes one attempt, given the function that sends its calls and its time limit in
            seconds.
        timeout_s: seconds for all attempts together; None is no limit.
    """

    attempt: Callable[[Send, float | None], Coroutine[Any, Any, T]]
    timeout_s: float | None


def one_call(make: Callable[[float | None], Any], timeout_s: float | None) -> Operation[T]:
    """Returns an operation that consists of one call; ``make`` builds it from its time limit."""

    async def attempt(send: Send, timeout_s: float | None) -> T:
        answer: T = await send(make(timeout_s))
        return answer

    return Operation(attempt, timeout_s)


async def run_async(
    operation: Operation[T],
    retries: int,
    send: Send,
    is_closed: Callable[[], bool],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> T:
    """Runs an operation to its result. Retries up to ``retries`` times, after a pause.

    A client that is closed meanwhile retries nothing. The transport's own error for calls after
    that is raised only if the client was closed before the operation began.

    Args:
        is_closed: returns whether the client was closed.
        sleep: waits for some seconds.
    """
    state, left_s = RetryState(retries, operation.timeout_s), operation.timeout_s
    was_closed = is_closed()
    while True:
        try:
            return await operation.attempt(send, left_s)
        except EmbedServeClientError as error:
            pause_s = state.pause_s(error)
            if pause_s is None or is_closed():
                raise
        except Exception as error:
            if was_closed or not is_closed():
                raise
            raise Unavailable(CLOSED) from error
        await sleep(pause_s)
        left_s = state.left_s()


def run(
    operation: Operation[T],
    retries: int,
    send: Callable[[Any], Any],
    is_closed: Callable[[], bool],
) -> T:
    """Runs an operation to its result without an event loop; see `run_async`."""
    running = run_async(operation, retries, _as_async(send), is_closed, _as_async(time.sleep))
    try:
        running.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a sync operation never waits for an event loop")


def _as_async(function: Callable[[A], T]) -> Callable[[A], Awaitable[T]]:
    async def call(argument: A) -> T:
        return function(argument)

    return call
