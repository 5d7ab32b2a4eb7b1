"""The methods that gRPC clients may call, and what opens a call of each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from google.protobuf.message import DecodeError

from embedserve.access.access import Access, Client, headers_by_name, one_header
from embedserve.codec import protobuf_answers
from embedserve.codec.codec import INFER_MESSAGE, INFER_STREAMED, PREDICT, PROTOBUF, Codec
from embedserve.errors import EmbedServeError, InvalidRequestError
from embedserve.exchange import ROUTING_KEY, Asked, Exchange
from embedserve.models.served_models import ServedModels
from embedserve.shared_memory.regions import EVERYBODY
from embedserve.tracing.request_id import REQUEST_ID, told_id
from embedserve.types import ModelInfo
from embedserve.wire.grpc import health, open_inference, reflection
from embedserve.wire.grpc.calls import EmbedCall, UnaryCall
from embedserve.wire.grpc.embed_stream import EmbedStream
from embedserve.wire.grpc.messages import Deframer, WireError, timeout_s
from embedserve.wire.grpc.statuses import error_block, only_trailers, wire_error_trailers
from embedserve.wire.http2.header_blocks import encode
from embedserve.wire.http2.requests import Request
from embedserve.wire.http2.stream import ENDED, Handler, Stream
from embedserve.wire.rest import check_once
from embedserve_proto import embedding_pb2, predictor_pb2

SERVICE_NAME = embedding_pb2.DESCRIPTOR.services_by_name["EmbeddingService"].full_name
PREDICTOR_NAME = predictor_pb2.DESCRIPTOR.services_by_name["Predictor"].full_name
SERVICES = (SERVICE_NAME, open_inference.SERVICE_NAME, PREDICTOR_NAME)

Open = Callable[[Stream], Handler]
HeadersByName = dict[bytes, bytes]
Method = Callable[[bytes, Asked, HeadersByName], Open]
"""What opens calls with such an encoding, asking so, with these headers."""
ONCE_METADATA = frozenset({ROUTING_KEY, b"grpc-timeout", b"grpc-encoding"})
"""Rejected where a call has two, of which each end could read another."""
EMBEDDERS = frozenset({"embed"})
CALLERS = frozenset({"embed", "admin"})


class GrpcService:
    """embedserve.v1.EmbeddingService, inference.GRPCInferenceService, TorchRec's
    predictor.Predictor, health and reflection.

    Attributes:
        health: which services are ready.
    """

    def __init__(
        self, exchange: Exchange, *, has_management: bool = True, asks_admins: bool = True
    ) -> None:
        """
        Args:
            has_management: tells of its models and its services, and not of its health alone.
            asks_admins: who they are, before it does so.
        """
        self._exchange = exchange
        access = exchange.access if asks_admins else None
        self._metrics = exchange.metrics.protocols["grpc"]
        self._bytes_max = exchange.limits.body_bytes_max
        models = exchange.models
        self.health = health.Health((*SERVICES, health.SERVICE_NAME), lambda: models.is_ready)
        self._names = (*SERVICES, health.SERVICE_NAME, *reflection.SERVICE_NAMES)
        self._methods: dict[bytes, Method] = {
            _path(health.SERVICE_NAME, "Check"): self._unary(self.health.check),
            _path(health.SERVICE_NAME, "Watch"): self._watch,
        }
        for service, unary, streamed, codecs in (
            (SERVICE_NAME, "Embed", "EmbedStream", (PROTOBUF, PROTOBUF)),
            (
                open_inference.SERVICE_NAME,
                "ModelInfer",
                "ModelStreamInfer",
                (INFER_MESSAGE, INFER_STREAMED),
            ),
        ):
            self._methods[_path(service, unary)] = partial(self._embed, codecs[0])
            self._methods[_path(service, streamed)] = self._guarded(
                partial(self._embed_stream, codecs[1]), exchange.access, EMBEDDERS, pays=False
            )
        self._methods[_path(PREDICTOR_NAME, "Predict")] = partial(self._embed, PREDICT)
        self.open_inference = open_inference.OpenInferenceService(exchange)
        for name, function in self.open_inference.health.items():
            self._methods[_path(open_inference.SERVICE_NAME, name)] = self._unary(function)
        for name, of_owner in self.open_inference.shared_memory.items():
            owned = self._of_client(partial(_owned, of_owner), exchange.access, EMBEDDERS)
            self._methods[_path(open_inference.SERVICE_NAME, name)] = owned
        if not has_management:
            return
        for name, function in (("ListModels", self.list_models), ("GetModel", self.get_model)):
            self._methods[_path(SERVICE_NAME, name)] = self._guarded(self._unary(function), access)
        for name, function in self.open_inference.management.items():
            guarded = self._guarded(self._unary(function), access)
            self._methods[_path(open_inference.SERVICE_NAME, name)] = guarded
        statistics = self._of_client(self.open_inference.statistics, access, CALLERS)
        self._methods[_path(open_inference.SERVICE_NAME, "ModelStatistics")] = statistics
        for name in reflection.SERVICE_NAMES:
            reflected = self._guarded(self._reflection, access)
            self._methods[_path(name, "ServerReflectionInfo")] = reflected

    def open(self, request: Request) -> Open:
        """What opens calls with such a head."""
        encoding = b"identity"
        wanted_s = None
        try:
            check_once(request.headers, ONCE_METADATA)
            for name, value in request.headers:
                if name == b"grpc-encoding":
                    encoding = value
                elif name == b"grpc-timeout":
                    wanted_s = timeout_s(value)
            method = self._methods.get(request.target)
            if method is None:
                shown = request.target.decode("latin-1")
                raise WireError("UNIMPLEMENTED", f"there is no method {shown}")
            headers = headers_by_name(request.headers)
            has_id = REQUEST_ID in headers
            asked = Asked("", PROTOBUF, PROTOBUF, wanted_s, self._metrics, has_id)
            return method(encoding, asked, headers)
        except (WireError, InvalidRequestError) as error:
            wrong = WireError(error.code, error.message)
            return refused(wrong, one_header(request.headers, REQUEST_ID))

    def _embed(self, codec: Codec, encoding: bytes, asked: Asked, headers: HeadersByName) -> Open:
        return partial(EmbedCall, asked.in_codec(codec), self._exchange, encoding, headers)

    def _embed_stream(
        self, codec: Codec, encoding: bytes, asked: Asked, headers: HeadersByName
    ) -> Open:
        check_encoding(encoding)
        asked = asked.in_codec(codec)
        return lambda stream: EmbedStream(asked, self._exchange, encoding, headers, stream)

    def _unary(self, function: Callable[[bytes], bytes]) -> Method:
        return lambda encoding, asked, headers: (
            lambda stream: UnaryCall(function, encoding, self._bytes_max, headers, stream)
        )

    def _watch(self, encoding: bytes, asked: Asked, headers: HeadersByName) -> Open:
        check_encoding(encoding)
        return lambda stream: health.Watch(self.health, encoding, self._bytes_max, headers, stream)

    def _reflection(self, encoding: bytes, asked: Asked, headers: HeadersByName) -> Open:
        check_encoding(encoding)
        return lambda stream: reflection.ServerReflection(
            self._names, encoding, self._bytes_max, headers, stream
        )

    def _guarded(
        self,
        method: Method,
        access: Access | None,
        roles: frozenset[str] = CALLERS,
        *,
        pays: bool = True,
    ) -> Method:
        """``method`` for those of ``roles`` alone, where there is ``access``; its calls are paid
        for by themselves, or by their messages. An Embed call sees to all that by itself, and
        health is everybody's."""
        if access is None:
            return method

        def open_call(encoding: bytes, asked: Asked, headers: HeadersByName) -> Open:
            opened = method(encoding, asked, headers)

            def open_if_right(stream: Stream) -> Handler:
                authorization = headers.get(b"authorization")
                try:
                    access.check(authorization, stream.connection.certificate, roles, pays=pays)
                except EmbedServeError as error:
                    return _denied(stream, error, headers)
                return opened(stream)

            return open_if_right

        return open_call

    def _of_client(
        self,
        function: Callable[[Client | None, bytes], bytes],
        access: Access | None,
        roles: frozenset[str],
    ) -> Method:
        """Returns ``function`` as a method for clients of ``roles``, who pay for its calls; its
        client is None where there is no ``access``."""

        def open_call(encoding: bytes, asked: Asked, headers: HeadersByName) -> Open:
            def open_of_client(stream: Stream) -> Handler:
                client, authorization = None, headers.get(b"authorization")
                try:
                    if access is not None:
                        certificate = stream.connection.certificate
                        client = access.check(authorization, certificate, roles)
                except EmbedServeError as error:
                    return _denied(stream, error, headers)
                return self._unary(partial(function, client))(encoding, asked, headers)(stream)

            return open_of_client

        return open_call

    def list_models(self, message: bytes) -> bytes:
        models = self._exchange.models
        return embedding_pb2.ListModelsResponse(
            models=[_message(models, model) for model in models.models()],
            default_model=models.default_model,
        ).SerializeToString()

    def get_model(self, message: bytes) -> bytes:
        try:
            name = embedding_pb2.GetModelRequest.FromString(message).model
        except DecodeError as error:
            raise InvalidRequestError(f"body is not a GetModelRequest: {error}", "body") from error
        models = self._exchange.models
        return _message(models, models.model(name)).SerializeToString()


def _owned(function: Callable[[str, bytes], bytes], client: Client | None, message: bytes) -> bytes:
    """Calls ``function`` with the name of its caller."""
    return function(EVERYBODY if client is None else client.grant.name, message)


def _message(models: ServedModels, model: ModelInfo) -> embedding_pb2.Model:
    return protobuf_answers.model_message(model, models.status(model))


def _denied(stream: Stream, error: EmbedServeError, headers: HeadersByName) -> Handler:
    told = encode(told_id(headers.get(REQUEST_ID)))
    stream.send_head(error_block(error) + told, is_end=True)
    return ENDED


def _path(service: str, method: str) -> bytes:
    return f"/{service}/{method}".encode()


def check_encoding(encoding: bytes) -> None:
    """Raises WireError: UNIMPLEMENTED, messages are not decompressed from it."""
    Deframer(0, encoding)


def refused(error: WireError, given_id: bytes | None = None) -> Open:
    """Opens calls only to end them; ``given_id`` is their callers' x-request-id."""
    block = only_trailers(wire_error_trailers(error))

    def open_refused(stream: Stream) -> Handler:
        stream.send_head(block + encode(told_id(given_id)), is_end=True)
        return ENDED

    return open_refused
