"""Runs a client operation with retries.

An operation is a generator of calls. Calls are data of either protocol, so that the sync and the
async client share the operations and differ only in the sending.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from embedserve_client.core.retries import RetryState
from embedserve_client.errors import EmbedServeClientError

T = TypeVar("T")

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


def one_call(make: Callable[[float | None], Any], timeout_s: float | None) -> Operation[T]:
    """Returns an operation that consists of one call; ``make`` builds it from its time limit."""

    def steps(timeout_s: float | None) -> Steps[T]:
        answer: T = yield make(timeout_s)
        return answer

    return Operation(steps, timeout_s)


def answer(question: Operation[T], retries: int, send: Callable[[Any], Any]) -> T:
    """Runs an operation to its result. Retries up to ``retries`` times.

    Args:
        send: sends a call and returns its result, or raises its error.
    """
    tries, left_s = RetryState(retries, question.timeout_s), question.timeout_s
    while True:
        try:
            return _walk(question.steps(left_s), send)
        except EmbedServeClientError as error:
            pause_s = tries.pause_s(error)
            if pause_s is None:
                raise
        time.sleep(pause_s)
        left_s = tries.left_s()


def _walk(steps: Steps[T], send: Callable[[Any], Any]) -> T:
    try:
        call = next(steps)
        while True:
            try:
                answer = send(call)
            except BaseException as error:
                call = steps.throw(error)
            else:
                call = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


async def answer_async(
    question: Operation[T], retries: int, send: Callable[[Any], Awaitable[Any]]
) -> T:
    """Runs an operation to its result in the event loop; see `answer`."""
    tries, left_s = RetryState(retries, question.timeout_s), question.timeout_s
    while True:
        try:
            return await _walk_async(question.steps(left_s), send)
        except EmbedServeClientError as error:
            pause_s = tries.pause_s(error)
            if pause_s is None:
                raise
        await asyncio.sleep(pause_s)
        left_s = tries.left_s()


async def _walk_async(steps: Steps[T], send: Callable[[Any], Awaitable[Any]]) -> T:
    try:
        call = next(steps)
        while True:
            try:
                answer = await send(call)
            except BaseException as error:
                call = steps.throw(error)
            else:
                call = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result
