"""Pipelined lookups over one gRPC stream; results arrive in the order of the requests.

grpc pulls the requests from `_outgoing` in its own thread; `_send_all` sends them in a task. For
each item both put a step into a queue: the request was sent with its batch size, or the client
rejected it.

The reading side takes a step and then the response for it. A failed item therefore keeps its
position, and the stream continues. A last step marks the end of the requests, or of the call.
"""

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Sequence,
)
from dataclasses import dataclass
from enum import Enum
from queue import SimpleQueue
from typing import Any, TypeAlias

import grpc

from embedserve_client.core.batch import Features, Weights, batch_of
from embedserve_client.core.messages import AnswerReader, request_of
from embedserve_client.core.result import EmbedResult, OutputDType
from embedserve_client.errors import EmbedServeClientError, InvalidRequest, ServerError
from embedserve_client.grpc.calls import (
    Ending,
    check_message,
    closed_errors,
    grpc_errors,
    status_error,
)
from embedserve_proto import embedding_pb2 as pb


@dataclass(frozen=True)
class StreamRequest:
    """One item of a stream with options: weights, a model, float16 output, selected keys, or a
    smallest seq. Items without options may be plain features."""

    features: Features
    weights: Weights | None = None
    model: str | None = None
    output_dtype: OutputDType = "float32"
    output_keys: Sequence[str] = ()
    min_seq: int | None = None


StreamItem: TypeAlias = StreamRequest | Features
StreamAnswer: TypeAlias = EmbedResult | EmbedServeClientError


@dataclass(frozen=True)
class _Sent:
    batch_size: int


@dataclass(frozen=True)
class _Broken:
    """The caller's own iterable raised an exception."""

    error: Exception | SystemExit


class _End(Enum):
    ALL_SENT = "every request was sent"
    CUT = "the call ended first"


_Step: TypeAlias = _Sent | InvalidRequest | _Broken | _End
_PutStep: TypeAlias = Callable[[_Step], None]


def stream_answers(
    open_call: Callable[[Iterator[pb.EmbedRequest]], Any],
    items: Iterable[StreamItem],
    answers: AnswerReader,
) -> Generator[StreamAnswer, None, None]:
    """Yields the results of a sync stream. Closing the generator early cancels the stream."""
    steps: SimpleQueue[_Step] = SimpleQueue()
    call = open_call(_outgoing(items, steps.put))
    if not call.add_callback(lambda: steps.put(_End.CUT)):
        steps.put(_End.CUT)
    try:
        while not isinstance(step := steps.get(), _End):
            answer = _receive(call) if isinstance(step, _Sent) else None
            yield _outcome(step, answer, answers)
        _check_end(step, _receive(call))
    finally:
        call.cancel()


async def stream_answers_async(
    open_call: Callable[[], Any],
    items: Iterable[StreamItem] | AsyncIterable[StreamItem],
    answers: AnswerReader,
    is_closed: Callable[[], bool],
) -> AsyncGenerator[StreamAnswer, None]:
    """Yields the results of an async stream; see `stream_answers`.

    Args:
        is_closed: returns whether the client was closed.
    """
    steps: asyncio.Queue[_Step] = asyncio.Queue()
    call = open_call()
    responses, ending = aiter(call), Ending(call)
    sender = asyncio.create_task(_send_all(call, items, steps.put_nowait))

    def end(_: Any) -> None:
        sender.cancel()  # before it takes an item that the call cannot send any more
        steps.put_nowait(_End.CUT)

    call.add_done_callback(end)

    async def receive() -> pb.EmbedResponse | None:
        with closed_errors(is_closed):
            return await _receive_async(responses, ending)

    try:
        while not isinstance(step := await steps.get(), _End):
            yield _outcome(step, await receive() if isinstance(step, _Sent) else None, answers)
        _check_end(step, await receive())
    finally:
        call.cancel()


def _outgoing(items: Iterable[StreamItem], put_step: _PutStep) -> Iterator[pb.EmbedRequest]:
    try:
        for item in items:
            message, step = _encoded(item)
            put_step(step)
            if message is not None:
                yield message
    except (Exception, SystemExit) as error:  # an exit would end grpc's thread alone
        put_step(_Broken(error))
    else:
        put_step(_End.ALL_SENT)


async def _send_all(
    call: Any, items: Iterable[StreamItem] | AsyncIterable[StreamItem], put_step: _PutStep
) -> None:
    """Sends the requests until the call ends.

    grpc.aio would cancel a call that ends while it sends, and its status would be lost.
    """
    try:
        async for item in _each(items):
            message, step = _encoded(item)
            put_step(step)
            if message is not None and not await _has_sent(call.write(message)):
                return
    except (Exception, SystemExit) as error:
        put_step(_Broken(error))
    except asyncio.CancelledError:
        call.cancel()  # the items raised it, unless the call has ended
        raise
    else:
        put_step(_End.ALL_SENT)
        await _has_sent(call.done_writing())


async def _has_sent(write: Awaitable[None]) -> bool:
    """Returns whether a write has not failed, as it does once the call has ended."""
    try:
        await write
    except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
        return False
    return True


async def _each(
    items: Iterable[StreamItem] | AsyncIterable[StreamItem],
) -> AsyncIterator[StreamItem]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


def _encoded(item: StreamItem) -> tuple[pb.EmbedRequest | None, _Step]:
    request = item if isinstance(item, StreamRequest) else StreamRequest(item)
    try:
        batch = batch_of(request.features, request.weights)
        message = request_of(
            batch, request.model, request.output_dtype, request.output_keys, request.min_seq
        )
    except InvalidRequest as error:
        return None, error
    return message, _Sent(batch.batch_size)


def _receive(call: Any) -> pb.EmbedResponse | None:
    """Returns the next response; None after the last."""
    with grpc_errors():
        return next(call, None)


async def _receive_async(
    responses: AsyncIterator[pb.EmbedResponse], ending: Ending
) -> pb.EmbedResponse | None:
    """Returns the next response, also after a write has failed: the status follows the last one."""
    try:
        answer = await anext(responses, grpc.aio.EOF)
    except grpc.RpcError as raised:
        code, details, trailing = await ending.status()
        if code is grpc.StatusCode.OK:
            return None
        raise status_error(code, details, trailing) from raised
    return None if answer is grpc.aio.EOF else check_message(answer)


def _outcome(
    step: _Sent | InvalidRequest | _Broken,
    answer: pb.EmbedResponse | None,
    answers: AnswerReader,
) -> StreamAnswer:
    if isinstance(step, _Broken):
        raise step.error
    if isinstance(step, InvalidRequest):
        return step
    if answer is None:
        raise ServerError("the server ended the stream before it answered every request")
    return answers.outcome(answer, step.batch_size)


def _check_end(step: _End, answer: pb.EmbedResponse | None) -> None:
    if answer is not None:
        raise ServerError("the server sent more answers than it got requests")
    if step is _End.CUT:
        raise ServerError("the server ended the stream before it got every request")
