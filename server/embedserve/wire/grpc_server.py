"""gRPC: embedserve.v1.EmbeddingService on grpcio's threads, which hand over to the event loop.

grpcio answers twice as fast from a pool of threads as through its asyncio. A handler's thread only
waits: messages stay bytes up to the event loop (grpc_asks.py), where they join one batch. Health
(grpc.health.v1) and reflection are served beside.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from embedserve.codec import protobuf_codec
from embedserve.errors import DRAINING, EmbedServeError, NotReadyError
from embedserve.models.models import Service
from embedserve.wire.grpc_asks import LoopDoor
from embedserve.wire.grpc_threads import ThreadStreamReader, ThreadWindow
from embedserve_proto import embedding_pb2

SERVICE_NAME = embedding_pb2.DESCRIPTOR.services_by_name["EmbeddingService"].full_name
THREADS = 32
"""Unary calls that wait at a time; of 8, 16, 32 and 64 the fastest."""
CALLS_MAX = 1024
"""Calls under way, streams among them; a client with more is refused at once."""
TIMEOUT_S_MAX = 1e9
"""grpcio gives what is left of no deadline as a very large number."""
MESSAGE_BYTES_MAX = 2000
"""Of a status message: percent-encoding triples it, and clients refuse trailers over 8 KiB."""
FIELD_CHARACTERS_MAX = 500
"""Of an error's field, which goes into the same trailers."""


class EmbeddingService:
    """The service's methods. Embed and EmbedStream take and give serialized messages."""

    def __init__(self, service: Service, door: LoopDoor) -> None:
        self._service = service
        self._door = door
        self._windows: set[ThreadWindow] = set()
        self._is_draining = False

    def embed(self, body: bytes, context: grpc.ServicerContext) -> bytes:
        ask = self._door.new_ask(body, _timeout_s(context))
        if context.add_callback(lambda: self._door.give_up(ask)):
            self._door.hand(ask)
        else:
            self._door.give_up(ask)  # the call has ended already
        ask.wait()
        if ask.error is not None:
            _abort(context, ask.error)
        return ask.answer_body

    def embed_stream(
        self, bodies: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """Answers in order; another thread reads while answers are awaited."""
        window = ThreadWindow()
        self._windows.add(window)
        if self._is_draining:
            window.close()
        if not context.add_callback(lambda: self._leave(window)):
            self._leave(window)
        reader = ThreadStreamReader(self._service, self._door, window)
        threading.Thread(
            target=reader.read, args=(bodies, lambda: _timeout_s(context)), daemon=True
        ).start()
        while (ask := window.first()) is not None:
            ask.wait()
            yield protobuf_codec.encode_error(ask.error) if ask.error else ask.answer_body
            window.remove_first()
        if not window.is_complete:
            _abort(context, NotReadyError(DRAINING))

    def _leave(self, window: ThreadWindow) -> None:
        """The call has ended: what it still waits for leaves the queue before it costs a lookup."""
        self._windows.discard(window)
        window.close()
        for ask in window.waiting():
            self._door.give_up(ask)

    def drain(self) -> None:
        """Streams answer what they accepted, and end."""
        self._is_draining = True
        for window in list(self._windows):
            window.close()

    def list_models(
        self, request: embedding_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> embedding_pb2.ListModelsResponse:
        return list_models(self._service)

    def get_model(
        self, request: embedding_pb2.GetModelRequest, context: grpc.ServicerContext
    ) -> embedding_pb2.Model:
        try:
            return protobuf_codec.model_message(self._service.model(request.model))
        except EmbedServeError as error:
            _abort(context, error)

    def handlers(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Embed": grpc.unary_unary_rpc_method_handler(self.embed),
                "EmbedStream": grpc.stream_stream_rpc_method_handler(
                    _on_threads_of_its_own(self.embed_stream)
                ),
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


def list_models(service: Service) -> embedding_pb2.ListModelsResponse:
    return embedding_pb2.ListModelsResponse(
        models=[protobuf_codec.model_message(model) for model in service.models()],
        default_model=service.default_model,
    )


def _on_threads_of_its_own(behavior: Any) -> Any:
    """``behavior``, which holds a thread as long as its client likes, beside the other calls'."""
    apart = functools.partial(behavior)
    pool = ThreadPoolExecutor(CALLS_MAX, thread_name_prefix="grpc-stream")
    apart.experimental_thread_pool = pool  # type: ignore[attr-defined]  # of grpcio
    return apart


def _timeout_s(context: grpc.ServicerContext) -> float | None:
    remaining_s: float | None = context.time_remaining()
    return None if remaining_s is None or remaining_s > TIMEOUT_S_MAX else remaining_s


def error_status(
    error: EmbedServeError,
) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """(code, message, trailing metadata, which carries the field) that a call ends with."""
    metadata = []
    if error.field:
        metadata.append(("embedserve-field", _printable(error.field)))
    if error.retry_after_s:
        metadata.append(("retry-after", str(error.retry_after_s)))
    message = error.message.encode()[:MESSAGE_BYTES_MAX].decode(errors="ignore")
    return grpc.StatusCode[error.code], message, tuple(metadata)


def _abort(context: grpc.ServicerContext, error: EmbedServeError) -> NoReturn:
    code, message, metadata = error_status(error)
    context.set_trailing_metadata(metadata)
    context.abort(code, message)
    raise AssertionError("abort raises")


def _printable(text: str) -> str:
    """``text`` as a metadata value may be: printable ASCII, and not too long."""
    return "".join(c if " " <= c <= "~" else "?" for c in text[:FIELD_CHARACTERS_MAX])


class GrpcServer:
    """grpcio's server with the embedding service, health and reflection; bound, not started."""

    def __init__(self, service: Service, address: str, *, shares_port: bool = False) -> None:
        """Binds ``address`` (HOST:PORT).

        Args:
            shares_port: other processes of this server bind it, too.

        Raises:
            OSError: it cannot be bound.
        """
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="grpc")
        self._server = grpc.server(
            self._pool,
            options=[
                ("grpc.max_receive_message_length", service.limits.body_bytes_max),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", int(shares_port)),
            ],
            maximum_concurrent_rpcs=CALLS_MAX,
        )
        self._embedding = EmbeddingService(service, LoopDoor(service, asyncio.get_running_loop()))
        self._server.add_generic_rpc_handlers((self._embedding.handlers(),))
        self._health = health.HealthServicer(
            experimental_non_blocking=True, experimental_thread_pool=self._pool
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE_NAME, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), self._server)
        try:
            self.port: int = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address} (gRPC)") from error

    async def start(self) -> None:
        self._server.start()
        self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def stop_being_ready(self) -> None:
        self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Takes no more calls, and waits up to ``grace_s`` for those that are running.

        A stream answers what it had accepted, then ends: with UNAVAILABLE if its client had
        not sent all.
        """
        self._embedding.drain()
        stopped = self._server.stop(grace_s)
        await asyncio.to_thread(stopped.wait)
        self._pool.shutdown(wait=False)

    def _set_health(self, status: Any) -> None:
        for name in ("", SERVICE_NAME):
            self._health.set(name, status)
