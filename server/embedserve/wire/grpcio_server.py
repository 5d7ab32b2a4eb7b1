"""gRPC server based on grpcio's asyncio server, over the same pipeline.

Selected by `serve --grpc-server grpcio`. It is the reference for the gRPC implementation in
``wire/grpc``, and a fallback for operators. It serves the methods of GrpcService, without TLS,
tokens and shared memory, with which config_checks.py rejects it. grpcio handles the transport,
health and reflection.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from functools import partial
from time import perf_counter
from typing import NoReturn
from urllib.parse import unquote

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from embedserve.codec.codec import Codec
from embedserve.codec.predictor_codec import MIN_SEQ_HEADER
from embedserve.errors import DRAINING, INTERNAL, EmbedServeError, EngineError, NotReadyError
from embedserve.lookup_types import ResponseChunks
from embedserve.pipeline import RequestContext, RequestOptions, RequestPipeline, ResponseWriter
from embedserve.tracing.request_id import REQUEST_ID, ExtraHeaders, request_id_header
from embedserve.wire.grpc import open_inference_grpc
from embedserve.wire.grpc.embed_stream import REQUESTS_MAX
from embedserve.wire.grpc.open_inference_grpc import PlainFunction
from embedserve.wire.grpc.service import (
    PREDICTOR_NAME,
    SERVICE_NAME,
    SERVICES,
    GrpcService,
    embed_methods,
)
from embedserve.wire.grpc.statuses import error_trailers
from embedserve.wire.http_stream import Headers

logger = logging.getLogger(__name__)

_PEER = re.compile(r"ipv[46]:(.*):[0-9]+")
TIMEOUT_S_MAX = 1e9
"""Seconds above which a remaining time means no deadline; grpcio then reports a huge number."""
PING_INTERVAL_MS_MIN = 10_000
"""Milliseconds between two pings of a client with an idle stream. grpcio's default of 300 s would
end the streams of clients that send keepalives."""
OTHER_CALLS_S = 1.0
"""Seconds after which a drain cancels the other calls, if no embed call is in flight."""


class GrpcioWriter(ResponseWriter):
    """Response writer of an embed request received through grpcio.

    Attributes:
        ended: future of the encoded response message, or of the error.
        trailers: extra trailing metadata, such as the request id.
    """

    __slots__ = ("_metadata", "_peer", "ended", "trailers")

    def __init__(self, metadata: Iterable[tuple[str, str | bytes]], peer: str) -> None:
        """
        Args:
            metadata: invocation metadata of the call.
            peer: address of the client in grpcio's format, such as ipv4:192.0.2.1:40000.
        """
        self.trailers: ExtraHeaders = []
        self._metadata = metadata
        self._peer = peer
        self.ended: asyncio.Future[bytes | EmbedServeError] = (
            asyncio.get_running_loop().create_future()
        )

    @property
    def peer(self) -> str:
        found = _PEER.fullmatch(unquote(self._peer))
        return self._peer if found is None else found[1].strip("[]")

    def header(self, name: bytes) -> bytes | None:
        return _header(self._metadata, name)

    def write_response(
        self, chunks: ResponseChunks, nbytes: int, headers: ExtraHeaders | None = None
    ) -> None:
        self.trailers = headers or []
        self._end(b"".join(chunks))

    def write_error(self, error: EmbedServeError, headers: ExtraHeaders) -> None:
        self.trailers = headers
        self._end(error)

    def _end(self, end: bytes | EmbedServeError) -> None:
        if not self.ended.done():
            self.ended.set_result(end)


Call = tuple[RequestContext, GrpcioWriter]


class GrpcioServer:
    """grpcio's asyncio server, which is bound at construction and listens after ``start``.

    Attributes:
        port: bound port.
    """

    def __init__(
        self, pipeline: RequestPipeline, address: str, *, shares_port: bool = False
    ) -> None:
        """Binds ``address`` (HOST:PORT).

        Args:
            shares_port: whether other processes of this server bind the same port.

        Raises:
            OSError: the address cannot be bound.
        """
        self._pipeline = pipeline
        self._service = GrpcService(pipeline)
        self._draining = asyncio.Event()
        self._calls_in_flight = 0
        options = [
            ("grpc.max_receive_message_length", pipeline.limits.body_bytes_max),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", int(shares_port)),
            ("grpc.http2.min_ping_interval_without_data_ms", PING_INTERVAL_MS_MIN),
        ]
        if age_s := pipeline.limits.connection_age_s_max:
            options.append(("grpc.max_connection_age_ms", round(1000 * age_s)))
        self._server = grpc.aio.server(options=options)
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(*one) for one in self._handlers().items()]
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        try:
            self.port: int = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address} (gRPC)") from error

    def _handlers(self) -> dict[str, dict[str, grpc.RpcMethodHandler]]:
        """Returns the handlers of the methods by service and name."""
        infer = self._service.open_inference
        handlers = {
            SERVICE_NAME: _unary(self._service.model_methods),
            open_inference_grpc.SERVICE_NAME: _unary(infer.health | infer.management),
            PREDICTOR_NAME: {"Predict": grpc.unary_unary_rpc_method_handler(self._predict)},
        }
        for service, name, codec, is_stream in embed_methods(self._pipeline.codecs):
            handlers[service][name] = (
                grpc.stream_stream_rpc_method_handler(partial(self._embed_stream, codec))
                if is_stream
                else grpc.unary_unary_rpc_method_handler(partial(self._embed, codec))
            )
        return handlers

    async def start(self) -> None:
        await self._server.start()
        for name in ("", *SERVICES):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def begin_drain(self, drain_s: float) -> asyncio.Task[None]:
        """Rejects new calls, and lets the calls in flight end within ``drain_s``.

        Returns:
            The task that ends with the last call.
        """
        await self._health.enter_graceful_shutdown()
        self._draining.set()
        stopped = asyncio.create_task(self._server.stop(drain_s))
        # grpcio stops listening in the first step of that task.
        await asyncio.sleep(0)
        return asyncio.create_task(self._wait_drained(stopped))

    async def _wait_drained(self, stopped: asyncio.Task[None]) -> None:
        """Waits until the server has stopped, and cancels calls that would never end.

        A call that grpcio handles without this class, such as a health watch, may never end, and
        grpcio 1.85 can lose a call that it accepts at the moment of the stop. Once no embed call is
        in flight, they are cancelled, so that their clients do not wait for their own deadline.
        """
        while not stopped.done():
            await asyncio.wait((stopped,), timeout=OTHER_CALLS_S)
            if not self._calls_in_flight:
                await self._server.stop(None)
        await stopped

    def _count(self, context: grpc.aio.ServicerContext) -> None:
        """Counts a call in flight until its last byte is sent."""

        def end(_: object) -> None:
            self._calls_in_flight -= 1

        self._calls_in_flight += 1
        context.add_done_callback(end)

    def _make_call(self, codec: Codec, context: grpc.aio.ServicerContext) -> Call:
        """Returns the context of a request, which is not submitted yet, and its writer."""
        remaining_s = context.time_remaining()
        if remaining_s is not None and remaining_s > TIMEOUT_S_MAX:
            remaining_s = None
        metrics = self._pipeline.metrics.protocols["grpc"]
        metadata = context.invocation_metadata() or ()
        has_id = any(name == REQUEST_ID.decode() for name, _ in metadata)
        options = RequestOptions("", codec, codec, remaining_s, metrics, has_id)
        writer = GrpcioWriter(metadata, context.peer())
        return RequestContext(options, perf_counter(), self._pipeline, writer), writer

    async def _embed(self, codec: Codec, body: bytes, context: grpc.aio.ServicerContext) -> bytes:
        self._count(context)
        call, writer = self._make_call(codec, context)
        self._pipeline.submit(call, body)
        try:
            end = await writer.ended
        finally:
            call.cancel()
        if isinstance(end, EmbedServeError):
            await _abort(context, end, writer.trailers)
        context.set_trailing_metadata(_metadata(writer.trailers))
        return end

    async def _predict(self, body: bytes, context: grpc.aio.ServicerContext) -> bytes:
        min_seq = _header(context.invocation_metadata() or (), MIN_SEQ_HEADER)
        codec = self._pipeline.codecs.predict_from(min_seq)
        return await self._embed(codec, body, context)

    async def _embed_stream(
        self, codec: Codec, bodies: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        """Yields responses in request order; a task reads ahead while responses are awaited."""
        self._count(context)
        calls: deque[Call] = deque()
        changed = asyncio.Event()
        reading = asyncio.create_task(self._read(codec, bodies, context, calls, changed))
        try:
            while True:
                changed.clear()
                if calls:
                    _, writer = calls[0]
                    end = await writer.ended
                    calls.popleft()
                    changed.set()
                    yield (
                        codec.encode_streamed_error(end)
                        if isinstance(end, EmbedServeError)
                        else end
                    )
                elif reading.done():
                    break
                else:
                    await changed.wait()
            if not reading.result():
                await _abort(context, NotReadyError(DRAINING))
        finally:
            reading.cancel()
            for call, _ in calls:
                call.cancel()

    async def _read(
        self,
        codec: Codec,
        bodies: AsyncIterator[bytes],
        context: grpc.aio.ServicerContext,
        calls: deque[Call],
        changed: asyncio.Event,
    ) -> bool:
        """Submits the requests of a stream. Returns False if a drain ended it before the client."""
        draining = asyncio.create_task(self._draining.wait())
        try:
            while True:
                coming = asyncio.ensure_future(anext(bodies, None))
                await asyncio.wait((coming, draining), return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    coming.cancel()
                    return False
                body = coming.result()
                if body is None:
                    return True
                call, writer = self._make_call(codec, context)
                calls.append((call, writer))
                self._pipeline.submit(call, body)
                changed.set()
                while len(calls) >= REQUESTS_MAX:
                    changed.clear()
                    await changed.wait()
        finally:
            draining.cancel()
            changed.set()


def _header(metadata: Iterable[tuple[str, str | bytes]], name: bytes) -> bytes | None:
    value = dict(metadata).get(name.decode())
    return value.encode() if isinstance(value, str) else value


def _unary(functions: Mapping[str, PlainFunction]) -> dict[str, grpc.RpcMethodHandler]:
    return {
        name: grpc.unary_unary_rpc_method_handler(partial(_call_plain, function))
        for name, function in functions.items()
    }


async def _call_plain(
    function: PlainFunction, body: bytes, context: grpc.aio.ServicerContext
) -> bytes:
    try:
        return function(None, body)
    except EmbedServeError as error:
        await _abort(context, error)
    except Exception:
        logger.exception("a call failed")
        await _abort(context, EngineError(INTERNAL))


async def _abort(
    context: grpc.aio.ServicerContext, error: EmbedServeError, headers: ExtraHeaders | None = None
) -> NoReturn:
    if headers is None:
        headers = request_id_header(_header(context.invocation_metadata() or (), REQUEST_ID))
    metadata = _metadata([*error_trailers(error), *headers])
    await context.abort(grpc.StatusCode[error.code], error.message[:500], metadata)
    raise AssertionError("abort raises")


def _metadata(headers: Headers) -> tuple[tuple[str, str], ...]:
    """Converts headers to grpcio's metadata, without the status headers that grpcio sets itself."""
    return tuple(
        (name.decode(), value.decode()) for name, value in headers if not name.startswith(b"grpc-")
    )
