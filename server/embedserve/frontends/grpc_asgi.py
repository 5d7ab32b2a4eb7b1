"""gRPC: embedserve.v1.EmbeddingService, health and reflection as an ASGI application.

For servers that speak HTTP/2 with trailers (pyvoy), in the service's event loop: it says what
grpc_server.py says, without a thread for a call. Messages stay bytes up to the codec.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from time import perf_counter
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from embedserve.codec import protobuf_codec
from embedserve.errors import DRAINING, INTERNAL, EmbedServeError, EngineError, NotReadyError
from embedserve.frontends.grpc_call import (
    Call,
    ClientGoneError,
    Incoming,
    Receive,
    Send,
    write_each,
)
from embedserve.frontends.grpc_embed import EmbedCall
from embedserve.frontends.grpc_gone import GoneClients
from embedserve.frontends.grpc_health import Health
from embedserve.frontends.grpc_server import SERVICE_NAME, error_status, list_models
from embedserve.frontends.grpc_stream import StreamReader, Window
from embedserve.frontends.grpc_wire import WireError, framed
from embedserve.service import Service
from embedserve_proto import embedding_pb2

logger = logging.getLogger(__name__)

Scope = dict[str, Any]
HEALTH_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
WRITE_BYTES_MAX = 64 << 10
"""Answers of a stream that are there already are sent together up to about this."""
UNSUPPORTED_MEDIA_TYPE = 415


class GrpcApp:
    """The ASGI application; not healthy until told.

    Attributes:
        open_calls: those that an end of the process waits for, as their tasks or without one.
    """

    def __init__(self, service: Service, *, waits_for_answers: bool = True) -> None:
        """``waits_for_answers``: return from Embed when it is answered, as ASGI has it. A server
        that sends what comes later as well is spared a task's wake-up."""
        self._service = service
        self._waits_for_answers = waits_for_answers
        self._metrics = service.metrics.protocols["grpc"]
        self._bytes_max = service.limits.body_bytes_max
        self._health = Health([SERVICE_NAME])
        names = (SERVICE_NAME, HEALTH_NAME, reflection.SERVICE_NAME)
        self._reflection = reflection.aio.ReflectionServicer(names)
        self._gone = GoneClients()
        self._windows: set[Window] = set()
        self._is_draining = False
        self.open_calls: set[asyncio.Task[None] | EmbedCall] = set()
        self._one_ended = asyncio.Event()
        self._endless_calls: set[asyncio.Task[None]] = set()
        self._methods: dict[str, Callable[[Call], Awaitable[None]]] = {
            f"/{SERVICE_NAME}/Embed": self._embed,
            f"/{SERVICE_NAME}/EmbedStream": self._embed_stream,
            f"/{SERVICE_NAME}/ListModels": self._list_models,
            f"/{SERVICE_NAME}/GetModel": self._get_model,
            f"/{HEALTH_NAME}/Check": self._check,
        }
        self._endless_methods: dict[str, Callable[[Call], Awaitable[None]]] = {
            f"/{HEALTH_NAME}/Watch": self._watch,
            f"/{reflection.SERVICE_NAME}/ServerReflectionInfo": self._reflect,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        method = self._methods.get(path)
        calls: set[Any] = self.open_calls
        if method is None:
            method = self._endless_methods.get(path, _unknown_method)
            calls = self._endless_calls
        task = asyncio.current_task()
        assert task is not None
        calls.add(task)
        try:
            await self._run(method, scope["headers"], receive, send)
        except ClientGoneError:
            pass  # there is nobody to tell
        finally:
            calls.discard(task)
            self._one_ended.set()

    async def _run(
        self,
        method: Callable[[Call], Awaitable[None]],
        headers: Iterable[tuple[bytes, bytes]],
        receive: Receive,
        send: Send,
    ) -> None:
        """One call to its status."""
        call = Call(receive, send)
        try:
            call.read_headers(headers)
            if not call.is_grpc:
                return call.refuse(UNSUPPORTED_MEDIA_TYPE)
            await method(call)
        except EmbedServeError as error:
            call.end(*error_status(error))
        except WireError as error:
            call.end(grpc.StatusCode[error.code], error.message)
        except DecodeError:
            call.end(grpc.StatusCode.INTERNAL, "the message is not one of this method's")
        except asyncio.CancelledError:
            if not self._is_draining:
                raise ClientGoneError from None
            call.end(*error_status(NotReadyError(DRAINING)))
        except ClientGoneError:
            raise
        except Exception:
            logger.exception("a call failed")
            call.end(*error_status(EngineError(INTERNAL)))

    async def _embed(self, call: Call) -> None:
        start_s = perf_counter()
        message = await call.message(self._bytes_max)
        waiting = EmbedCall(call, start_s, self._metrics, self._forget)
        self.open_calls.add(waiting)
        self._gone.add(call, waiting)
        try:
            if self._is_draining:
                raise NotReadyError(DRAINING)
            self._service.check_open("")
            request = protobuf_codec.decode_request(message)
            self._service.enqueue(request, waiting, call.time_remaining())
        except EmbedServeError as error:
            waiting.refuse(error)
        except Exception as error:
            waiting.fail(error)
        if self._waits_for_answers and waiting.is_waiting:
            waiting.ended = asyncio.get_running_loop().create_future()
            try:
                await waiting.ended
            except asyncio.CancelledError:
                waiting.cancel()
                raise

    def _forget(self, waiting: EmbedCall, call: Call) -> None:
        self.open_calls.discard(waiting)
        self._gone.remove(call)
        self._one_ended.set()

    async def _embed_stream(self, call: Call) -> None:
        try:
            async with asyncio.timeout(call.timeout_s):
                await self._answer_stream(call)
        except TimeoutError:
            call.end(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline of the stream passed")

    async def _answer_stream(self, call: Call) -> None:
        """Answers in order; reading goes on while answers are awaited."""
        incoming = Incoming(call, self._bytes_max)
        window = Window()
        reader = StreamReader(self._service, self._metrics, window)
        reading = asyncio.create_task(reader.read(incoming.messages(), call.time_remaining))
        reading.add_done_callback(lambda done: _close(window, done))
        watching = asyncio.create_task(self._read_ahead(call, incoming, asyncio.current_task()))
        self._windows.add(window)
        if self._is_draining:
            window.close()
        try:
            while (answer := await window.first()) is not None:
                await call.write(_joined(await answer, window))
            if not reading.done() or not reading.result():
                raise NotReadyError(DRAINING)
            call.end()
        finally:
            self._windows.discard(window)
            self._gone.remove(call)
            window.cancel()
            reading.cancel()
            watching.cancel()

    async def _read_ahead(
        self, call: Call, incoming: Incoming, task: asyncio.Task[None] | None
    ) -> None:
        """Reads a stream to its end, then looks whether its client stays; else cancels ``task``."""
        assert task is not None
        try:
            await incoming.read_ahead()
        except ClientGoneError:
            task.cancel()
        else:
            self._gone.add(call, task)

    async def _list_models(self, call: Call) -> None:
        embedding_pb2.ListModelsRequest.FromString(await call.message(self._bytes_max))
        call.answer(framed(list_models(self._service).SerializeToString()))

    async def _get_model(self, call: Call) -> None:
        request = embedding_pb2.GetModelRequest.FromString(await call.message(self._bytes_max))
        model = protobuf_codec.model_message(self._service.model(request.model))
        call.answer(framed(model.SerializeToString()))

    async def _check(self, call: Call) -> None:
        answer = self._health.check(await call.message(self._bytes_max))
        if answer is None:
            return call.end(grpc.StatusCode.NOT_FOUND)
        call.answer(framed(answer))

    async def _watch(self, call: Call) -> None:
        message = await call.message(self._bytes_max)
        await self._write_while_there(call, self._health.watch(message))

    async def _reflect(self, call: Call) -> None:
        incoming = Incoming(call, self._bytes_max)
        watching = asyncio.create_task(self._read_ahead(call, incoming, asyncio.current_task()))
        try:
            await write_each(call, self._reflected(incoming.messages()))
            call.end()
        finally:
            watching.cancel()
            self._gone.remove(call)

    async def _reflected(self, messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        from_string = reflection_pb2.ServerReflectionRequest.FromString
        requests = (from_string(message) async for message in messages)
        async for answer in self._reflection.ServerReflectionInfo(requests, None):
            yield answer.SerializeToString()

    async def _write_while_there(self, call: Call, answers: AsyncIterator[bytes]) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._gone.add(call, task)
        try:
            await write_each(call, answers)
        finally:
            self._gone.remove(call)

    def set_serving(self, is_serving: bool) -> None:
        """What health says from now on."""
        self._health.set_serving(is_serving)

    def drain(self) -> None:
        """Takes no more requests; streams answer what they accepted, and end."""
        self._is_draining = True
        for window in self._windows:
            window.close()

    async def finish(self, grace_s: float) -> None:
        """Waits up to ``grace_s`` for the calls under way, then ends what is left."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self.open_calls:
                    self._one_ended.clear()
                    await self._one_ended.wait()
        for call in [one for one in self.open_calls if isinstance(one, EmbedCall)]:
            call.refuse(NotReadyError(DRAINING))
        await asyncio.sleep(0)  # tasks that waited for these end
        left = self.open_calls | self._endless_calls
        if tasks := [one for one in left if isinstance(one, asyncio.Task)]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


def _joined(first: bytes, window: Window) -> bytes:
    """The first answer of the window, and those after it that are there, framed."""
    window.remove_first()
    answers = [framed(first)]
    nbytes = len(first)
    while nbytes < WRITE_BYTES_MAX and (answer := window.first_done()) is not None:
        window.remove_first()
        answers.append(framed(answer))
        nbytes += len(answer)
    return b"".join(answers)


def _close(window: Window, reading: asyncio.Task[bool]) -> None:
    """Ends a stream that was read to its end or could not be read, which is told later."""
    window.close()
    if not reading.cancelled():
        reading.exception()


async def _unknown_method(call: Call) -> None:
    raise WireError("UNIMPLEMENTED", "Method not found!")
