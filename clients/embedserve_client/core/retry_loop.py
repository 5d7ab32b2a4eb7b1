"""Runs a client operation with retries.

An operation is a generator of calls. Calls are data of either protocol. `run` and `run_async` send
them and sleep between attempts; they share everything else.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from embedserve_client.core.retries import RetryState
from embedserve_client.errors import EmbedServeClientError, Unavailable

T = TypeVar("T")

CLOSED = "the client was closed during the call"

Steps: TypeAlias = Generator[Any, Any, T]
"""Calls of one attempt, made one after another. The response of each call is sent into the
generator, and its error is thrown into it. The generator returns the result of the operation."""


@dataclass(frozen=True)
class Operation(Generic[T]):
    """A client operation that can be attempted several times.

    Attributes:
        steps: makes the calls of one attempt from its time limit in seconds.
        timeout_s: seconds for all attempts together; None is no limit.
    """

    steps: Callable[[float | None], Steps[T]]
    timeout_s: float | None


@dataclass(frozen=True)
class Pause:
    """A step between two attempts: the seconds to sleep."""

    seconds: float


def one_call(make: Callable[[float | None], Any], timeout_s: float | None) -> Operation[T]:
    """Returns an operation that consists of one call; ``make`` builds it from its time limit."""

    def steps(timeout_s: float | None) -> Steps[T]:
        answer: T = yield make(timeout_s)
        return answer

    return Operation(steps, timeout_s)


def attempts(operation: Operation[T], retries: int, is_closed: Callable[[], bool]) -> Steps[T]:
    """Yields the calls of up to ``retries`` + 1 attempts, with a Pause before each retry.

    A client that is closed meanwhile retries nothing. The transport's own error for calls after
    that is raised only if the client was closed before the operation began.
    """
    state, left_s = RetryState(retries, operation.timeout_s), operation.timeout_s
    was_closed = is_closed()
    while True:
        try:
            return (yield from operation.steps(left_s))
        except EmbedServeClientError as error:
            pause_s = state.pause_s(error)
            if pause_s is None or is_closed():
                raise
        except Exception as error:
            if was_closed or not is_closed():
                raise
            raise Unavailable(CLOSED) from error
        yield Pause(pause_s)
        left_s = state.left_s()


def run(
    operation: Operation[T],
    retries: int,
    send: Callable[[Any], Any],
    is_closed: Callable[[], bool],
) -> T:
    """Runs an operation to its result. Retries up to ``retries`` times.

    Args:
        send: sends a call and returns its result, or raises its error.
        is_closed: returns whether the client was closed.
    """
    steps = attempts(operation, retries, is_closed)
    try:
        step = next(steps)
        while True:
            try:
                answer = None
                if isinstance(step, Pause):
                    time.sleep(step.seconds)
                else:
                    answer = send(step)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


async def run_async(
    operation: Operation[T],
    retries: int,
    send: Callable[[Any], Awaitable[Any]],
    is_closed: Callable[[], bool],
) -> T:
    """Runs an operation to its result in the event loop; see `run`."""
    steps = attempts(operation, retries, is_closed)
    try:
        step = next(steps)
        while True:
            try:
                answer = None
                if isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                else:
                    answer = await send(step)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result
