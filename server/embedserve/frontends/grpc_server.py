"""gRPC: embedserve.v1.EmbeddingService on grpcio's asyncio server, in the service's event loop.

Messages stay bytes up to the codec. Health (grpc.health.v1) and reflection are served beside.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from time import perf_counter
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from embedserve.codec import protobuf_codec
from embedserve.errors import DRAINING, INTERNAL, EmbedServeError, EngineError, NotReadyError
from embedserve.frontends.grpc_stream import StreamReader, Window
from embedserve.service import Service
from embedserve.types import LookupResult
from embedserve_proto import embedding_pb2

logger = logging.getLogger(__name__)

SERVICE_NAME = embedding_pb2.DESCRIPTOR.services_by_name["EmbeddingService"].full_name
MESSAGE_BYTES_MAX = 2000
"""Of a status message: percent-encoding triples it, and clients refuse trailers over 8 KiB."""
FIELD_CHARACTERS_MAX = 500
"""Of an error's field, which goes into the same trailers."""


class EmbeddingService:
    """The service's methods. Embed and EmbedStream take and give serialized messages."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._metrics = service.metrics.protocols["grpc"]
        self._windows: set[Window] = set()
        self._is_draining = False

    async def embed(self, body: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        start = perf_counter()
        try:
            answer = protobuf_codec.encode_result(
                await self._submit(body, context.time_remaining())
            )
        except EmbedServeError as error:
            self._metrics.failed(error.code, perf_counter() - start)
            await _abort(context, error)
        except asyncio.CancelledError:
            self._metrics.failed("CANCELLED", perf_counter() - start)
            raise
        except Exception:
            logger.exception("Embed failed")
            self._metrics.failed(EngineError.code, perf_counter() - start)
            await _abort(context, EngineError(INTERNAL))
        self._metrics.answered(perf_counter() - start, len(answer))
        return answer

    def _submit(self, body: bytes, timeout_s: float | None) -> asyncio.Future[LookupResult]:
        return self._service.submit(protobuf_codec.decode_request(body), timeout_s)

    async def embed_stream(
        self, bodies: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[bytes]:
        """Answers in order; reading goes on while answers are awaited.

        The reading task is never cancelled: grpcio would free the buffer of a read that its
        core still writes to. It ends with the call.
        """
        window = Window()
        reading = asyncio.create_task(
            StreamReader(self._service, self._metrics, window).read(bodies, context.time_remaining)
        )
        reading.add_done_callback(lambda done: _close(window, done))
        self._windows.add(window)
        if self._is_draining:
            window.close()
        try:
            while (answer := await window.first()) is not None:
                yield await answer
                window.remove_first()
            if not reading.done() or not reading.result():
                await _abort(context, NotReadyError(DRAINING))
        finally:
            self._windows.discard(window)
            window.cancel()

    def drain(self) -> None:
        """Streams answer what they accepted, and end."""
        self._is_draining = True
        for window in self._windows:
            window.close()

    async def list_models(
        self,
        request: embedding_pb2.ListModelsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> embedding_pb2.ListModelsResponse:
        return embedding_pb2.ListModelsResponse(
            models=[protobuf_codec.model_message(model) for model in self._service.models()],
            default_model=self._service.default_model,
        )

    async def get_model(
        self, request: embedding_pb2.GetModelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> embedding_pb2.Model:
        try:
            return protobuf_codec.model_message(self._service.model(request.model))
        except EmbedServeError as error:
            await _abort(context, error)

    def handlers(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Embed": grpc.unary_unary_rpc_method_handler(self.embed),
                "EmbedStream": grpc.stream_stream_rpc_method_handler(self.embed_stream),
                "ListModels": grpc.unary_unary_rpc_method_handler(
                    self.list_models,
                    request_deserializer=embedding_pb2.ListModelsRequest.FromString,
                    response_serializer=embedding_pb2.ListModelsResponse.SerializeToString,
                ),
                "GetModel": grpc.unary_unary_rpc_method_handler(
                    self.get_model,
                    request_deserializer=embedding_pb2.GetModelRequest.FromString,
                    response_serializer=embedding_pb2.Model.SerializeToString,
                ),
            },
        )


def _close(window: Window, reading: asyncio.Task[bool]) -> None:
    """Ends a stream that was read to its end, or whose end cut a read off: that one raises."""
    window.close()
    if not reading.cancelled():
        reading.exception()


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: EmbedServeError) -> NoReturn:
    """Ends the call with the error's status; the field goes along as trailing metadata."""
    metadata = []
    if error.field:
        metadata.append(("embedserve-field", _printable(error.field)))
    if error.retry_after_s:
        metadata.append(("retry-after", str(error.retry_after_s)))
    message = error.message.encode()[:MESSAGE_BYTES_MAX].decode(errors="ignore")
    await context.abort(grpc.StatusCode[error.code], message, tuple(metadata))
    raise AssertionError("abort raises")


def _printable(text: str) -> str:
    """``text`` as a metadata value may be: printable ASCII, and not too long."""
    return "".join(c if " " <= c <= "~" else "?" for c in text[:FIELD_CHARACTERS_MAX])


class GrpcServer:
    """grpcio's server with the embedding service, health and reflection; bound, not started."""

    def __init__(self, service: Service, address: str) -> None:
        """Binds ``address`` (HOST:PORT).

        Raises:
            OSError: it cannot be bound.
        """
        limits = service.limits
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", limits.body_bytes_max),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
            ],
        )
        self._embedding = EmbeddingService(service)
        self._server.add_generic_rpc_handlers((self._embedding.handlers(),))
        self._health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE_NAME, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), self._server)
        try:
            self.port: int = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address} (gRPC)") from error

    async def start(self) -> None:
        await self._server.start()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def stop_being_ready(self) -> None:
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Takes no more calls, and waits up to ``grace_s`` for those that are running.

        A stream answers what it had accepted, then ends: with UNAVAILABLE if its client had
        not sent all.
        """
        self._embedding.drain()
        await self._server.stop(grace_s)

    async def _set_health(self, status: Any) -> None:
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)
