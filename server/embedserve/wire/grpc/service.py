"""gRPC methods of the server, with a handler factory for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from embedserve.access.authenticator import Authenticator, headers_by_name
from embedserve.access.caller_quota import CallerQuota
from embedserve.access.grants import CALLERS, EMBEDDERS
from embedserve.codec import protobuf_responses
from embedserve.codec.codec import Codec, Codecs
from embedserve.codec.predictor_codec import MIN_SEQ_HEADER
from embedserve.errors import EmbedServeError
from embedserve.model_info import ModelInfo
from embedserve.models.model_registry import ModelRegistry
from embedserve.pipeline import ROUTING_KEY, RequestOptions, RequestPipeline
from embedserve.tracing.request_id import REQUEST_ID
from embedserve.wire.early_rejection import EarlyRejection
from embedserve.wire.grpc import health, open_inference_grpc, reflection
from embedserve.wire.grpc.calls import GrpcEmbedCall, GrpcUnaryCall
from embedserve.wire.grpc.embed_stream import EmbedStream
from embedserve.wire.grpc.grpc_framing import Deframer, GrpcHeaders, WireError, parse_timeout
from embedserve.wire.grpc.open_inference_grpc import UnaryFunction
from embedserve.wire.grpc.statuses import error_block
from embedserve.wire.http2.header_blocks import encode
from embedserve.wire.http2.stream import Stream
from embedserve.wire.http_stream import NULL_HANDLER, Handler, Headers, HttpRequest
from embedserve.wire.rest.headers import check_once
from embedserve_proto import embedding_pb2, predictor_pb2

SERVICE_NAME = embedding_pb2.DESCRIPTOR.services_by_name["EmbeddingService"].full_name
PREDICTOR_NAME = predictor_pb2.DESCRIPTOR.services_by_name["Predictor"].full_name
SERVICES = (SERVICE_NAME, open_inference_grpc.SERVICE_NAME, PREDICTOR_NAME)

ONCE_METADATA = frozenset({ROUTING_KEY, MIN_SEQ_HEADER, b"grpc-timeout", b"grpc-encoding"})
"""Metadata that may occur once: with two, a proxy and the server could each read another value."""


MakeCall = Callable[[Stream], Handler]
Method = Callable[[GrpcHeaders], MakeCall]
"""Function from the headers of calls to the factory of their handlers."""


def embed_methods(codecs: Codecs) -> tuple[tuple[str, str, Codec, bool], ...]:
    """Returns service, name and codec of the methods that look up vectors, and whether they are
    streams. The codec of Predict depends on the call."""
    return (
        (SERVICE_NAME, "Embed", codecs.protobuf, False),
        (SERVICE_NAME, "EmbedStream", codecs.protobuf, True),
        (open_inference_grpc.SERVICE_NAME, "ModelInfer", codecs.infer_message, False),
        (open_inference_grpc.SERVICE_NAME, "ModelStreamInfer", codecs.infer_streamed, True),
    )


class GrpcService:
    """Registry of the gRPC methods.

    The services are embedserve.v1.EmbeddingService, inference.GRPCInferenceService, TorchRec's
    predictor.Predictor, health and reflection.

    Attributes:
        health: health status of each service.
        models: functions of the methods of EmbeddingService without a lookup, by name.
        open_inference: unary methods of inference.GRPCInferenceService.
    """

    def __init__(
        self,
        pipeline: RequestPipeline,
        *,
        has_management: bool = True,
        asks_admins: bool = True,
        lists_models: bool = False,
    ) -> None:
        """
        Args:
            pipeline: request pipeline.
            has_management: whether models, statistics and reflection are served, besides inference
                and health.
            asks_admins: whether management methods require authentication.
            lists_models: whether models are served without the rest of management, as on a shard,
                whose router asks which versions it holds.
        """
        self._pipeline = pipeline
        authenticator = pipeline.authenticator if asks_admins else None
        self._metrics = pipeline.metrics.protocols["grpc"]
        models = pipeline.models
        self.health = health.HealthStatuses(
            (*SERVICES, health.SERVICE_NAME), lambda: models.is_ready
        )
        self._names = (*SERVICES, health.SERVICE_NAME, *reflection.SERVICE_NAMES)
        self._codecs = pipeline.codecs
        self.models = {"ListModels": self._list_models, "GetModel": self._get_model}
        infer = self.open_inference = open_inference_grpc.OpenInferenceMethods(pipeline)
        self._methods: dict[bytes, Method] = {
            _path(health.SERVICE_NAME, "Watch"): self._watch,
            _path(PREDICTOR_NAME, "Predict"): self._predict,
        }
        for service, name, codec, is_stream in embed_methods(pipeline.codecs):
            embed = self._embed_stream if is_stream else self._embed
            self._methods[_path(service, name)] = partial(embed, codec)
        self._add(health.SERVICE_NAME, {"Check": self.health.check}, None)
        infer_name = open_inference_grpc.SERVICE_NAME
        self._add(infer_name, infer.health, None)
        self._add(infer_name, infer.shared_memory, pipeline.authenticator, EMBEDDERS)
        if has_management or lists_models:
            self._add(SERVICE_NAME, self.models, authenticator)
        if has_management:
            self._add(infer_name, infer.management, authenticator)
            for name in reflection.SERVICE_NAMES:
                path = _path(name, "ServerReflectionInfo")
                self._methods[path] = partial(self._reflection, authenticator)

    def _add(
        self,
        service: str,
        functions: Mapping[str, UnaryFunction],
        authenticator: Authenticator | None,
        roles: frozenset[str] = CALLERS,
    ) -> None:
        """Adds unary methods for callers with one of ``roles``; for all without
        ``authenticator``."""
        for name, function in functions.items():
            self._methods[_path(service, name)] = partial(
                self._unary, function, authenticator, roles
            )

    def resolve(self, request: HttpRequest) -> MakeCall:
        """Returns the handler factory for calls with the headers of ``request``."""
        encoding = b"identity"
        timeout_s = None
        try:
            check_once(request.headers, ONCE_METADATA)
            for name, value in request.headers:
                if name == b"grpc-encoding":
                    encoding = value
                elif name == b"grpc-timeout":
                    timeout_s = parse_timeout(value)
            method = self._methods.get(request.target)
            if method is None:
                shown = request.target.decode("latin-1")
                raise WireError("UNIMPLEMENTED", f"there is no method {shown}")
            return method(GrpcHeaders(encoding, timeout_s, headers_by_name(request.headers)))
        except EmbedServeError as error:
            return self.rejecting(error, request.headers)

    def rejecting(self, error: EmbedServeError, headers: Headers) -> MakeCall:
        """Returns a handler factory that ends each call with ``error``; calls are counted and
        logged.

        Args:
            headers: headers of the calls.
        """
        block = error_block(error)
        rejection = EarlyRejection(
            self._pipeline, self._metrics, error.code, error.message, headers
        )

        def reject_call(stream: Stream) -> Handler:
            extra_trailers = rejection.record(stream.connection.peer)
            stream.send_head(block + encode(extra_trailers), is_end=True)
            return NULL_HANDLER

        return reject_call

    def _options(self, codec: Codec, headers: GrpcHeaders) -> RequestOptions:
        has_id = REQUEST_ID in headers.by_name
        return RequestOptions("", codec, codec, headers.timeout_s, self._metrics, has_id)

    def _embed(self, codec: Codec, headers: GrpcHeaders) -> MakeCall:
        options = self._options(codec, headers)
        return partial(GrpcEmbedCall, options, self._pipeline, headers)

    def _predict(self, headers: GrpcHeaders) -> MakeCall:
        return self._embed(self._codecs.predict_from(headers.by_name.get(MIN_SEQ_HEADER)), headers)

    def _embed_stream(self, codec: Codec, headers: GrpcHeaders) -> MakeCall:
        check_encoding(headers.encoding)
        options, pipeline = self._options(codec, headers), self._pipeline
        return self._admitting(
            lambda stream, _: EmbedStream(options, pipeline, headers, stream),
            pipeline.authenticator,
            EMBEDDERS,
            headers,
            charge=False,  # its messages count against the caller's rate
        )

    def _watch(self, headers: GrpcHeaders) -> MakeCall:
        check_encoding(headers.encoding)
        return lambda stream: health.Watch(self.health, headers, stream)

    def _reflection(self, authenticator: Authenticator | None, headers: GrpcHeaders) -> MakeCall:
        check_encoding(headers.encoding)
        return self._admitting(
            lambda stream, _: reflection.ServerReflection(self._names, headers, stream),
            authenticator,
            CALLERS,
            headers,
        )

    def _unary(
        self,
        function: UnaryFunction,
        authenticator: Authenticator | None,
        roles: frozenset[str],
        headers: GrpcHeaders,
    ) -> MakeCall:
        return self._admitting(
            lambda stream, quota: GrpcUnaryCall(partial(function, quota), headers, stream),
            authenticator,
            roles,
            headers,
        )

    def _admitting(
        self,
        make: Callable[[Stream, CallerQuota | None], Handler],
        authenticator: Authenticator | None,
        roles: frozenset[str],
        headers: GrpcHeaders,
        *,
        charge: bool = True,
    ) -> MakeCall:
        """Returns a handler factory for callers with one of ``roles``; for all without
        ``authenticator``. It rejects other callers, which are counted and logged.

        Args:
            make: called with the stream and the caller's quota.
            charge: whether the call counts against the caller's rate.
        """

        def make_or_reject(stream: Stream) -> Handler:
            if authenticator is None:
                return make(stream, None)
            authorization, client = headers.by_name.get(b"authorization"), stream.connection
            try:
                quota = authenticator.check(authorization, client.certificate, roles, charge=charge)
            except EmbedServeError as error:
                return self.rejecting(error, [*headers.by_name.items()])(stream)
            return make(stream, quota)

        return make_or_reject

    def _list_models(self, quota: CallerQuota | None, message: bytes) -> bytes:
        models = self._pipeline.models
        models.check_loaded()
        return embedding_pb2.ListModelsResponse(
            models=[_message(models, model) for model in models.models()],
            default_model=models.default_model,
        ).SerializeToString()

    def _get_model(self, quota: CallerQuota | None, message: bytes) -> bytes:
        name = open_inference_grpc.read_message(message, embedding_pb2.GetModelRequest).model
        models = self._pipeline.models
        return _message(models, models.model(name)).SerializeToString()


def _message(models: ModelRegistry, model: ModelInfo) -> embedding_pb2.Model:
    return protobuf_responses.model_message(model, models.status(model))


def _path(service: str, method: str) -> bytes:
    return f"/{service}/{method}".encode()


def check_encoding(encoding: bytes) -> None:
    """Raises WireError (UNIMPLEMENTED) if ``encoding`` is not supported."""
    Deframer(0, encoding)
