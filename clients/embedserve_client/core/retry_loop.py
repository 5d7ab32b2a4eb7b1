"""What a client is asked, as the calls that answer it, and their answers.

Calls are data of either protocol: who asks sends them, the sync or the async client.
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
"""Calls, one after the other: what each was answered is sent back, and what it raised is thrown.
What it returns answers the question."""


@dataclass(frozen=True)
class Operation(Generic[T]):
    """What a client is asked.

    Attributes:
        steps: those of one try, which may take so long.
        timeout_s: of all tries together; None is no limit.
    """

    steps: Callable[[float | None], Steps[T]]
    timeout_s: float | None


def one_call(make: Callable[[float | None], Any], timeout_s: float | None) -> Operation[T]:
    """That one call answers, which may take so long."""

    def steps(timeout_s: float | None) -> Steps[T]:
        answer: T = yield make(timeout_s)
        return answer

    return Operation(steps, timeout_s)


def answer(question: Operation[T], retries: int, send: Callable[[Any], Any]) -> T:
    """``send`` gives what a call is answered, or raises; it is tried again as ``retries`` says."""
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
    """The same of an event loop."""
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
