"""gRPC methods of the server, with a handler factory for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from embedserve.access.authenticator import Authenticator, headers_by_name
from embedserve.access.caller_quota import CallerQuota
from embedserve.access.grants import CALLERS, EMBEDDERS
from embedserve.codec.codec import Codec, Codecs
from embedserve.codec.model_description import model_message
from embedserve.codec.predictor_codec import MIN_SEQ_HEADER
from embedserve.errors import EmbedServeError
from embedserve.model_info import ModelInfo
from embedserve.models.model_registry import ModelRegistry
from embedserve.pipeline import ROUTING_KEY, RequestOptions, RequestPipeline
from embedserve.tracing.request_id import REQUEST_ID
from embedserve.wire.early_rejection import EarlyRejection
from embedserve.wire.grpc import health, open_inference_grpc, reflection
from embedserve.wire.grpc.calls import GrpcEmbedCall, GrpcPlainCall
from embedserve.wire.grpc.embed_stream import EmbedStream
from embedserve.wire.grpc.grpc_framing import GrpcCallError, GrpcHeaders, parse_timeout
from embedserve.wire.grpc.open_inference_grpc import PlainFunction
from embedserve.wire.grpc.statuses import error_block
from embedserve.wire.http2.header_blocks import encode
from embedserve.wire.http2.stream import Stream
from embedserve.wire.http_stream import NULL_HANDLER, Handler, Headers, HttpRequest
from embedserve.wire.rest.headers import check_once
from embedserve_proto import embedding_pb2, predictor_pb2

SERVICE_NAME = embedding_pb2.DESCRIPTOR.services_by_name["EmbeddingService"].full_name
PREDICTOR_NAME = predictor_pb2.DESCRIPTOR.services_by_name["Predictor"].full_name
SERVICES = (SERVICE_NAME, open_inference_grpc.SERVICE_NAME, PREDICTOR_NAME)
PREDICT_PATH = f"/{PREDICTOR_NAME}/Predict".encode()

ONCE_METADATA = frozenset({ROUTING_KEY, MIN_SEQ_HEADER, b"grpc-timeout", b"grpc-encoding"})
"""Metadata that may occur once: with two, a proxy and the server could each read another value."""


MakeCall = Callable[[Stream], Handler]


class GrpcMethod(NamedTuple):
    """A method whose caller is authenticated when a call begins.

    Attributes:
        make: factory of the handler of a call, called with its headers, its stream and the quota of
            its caller.
        authenticator: authenticator of callers; None: everybody may call.
        roles: allowed roles; a caller needs one.
        charge: whether a call counts against the caller's rate.
    """

    make: Callable[[GrpcHeaders, Stream, CallerQuota | None], Handler]
    authenticator: Authenticator | None = None
    roles: frozenset[str] = CALLERS
    charge: bool = True


def embed_methods(codecs: Codecs) -> tuple[tuple[str, str, Codec, bool], ...]:
    """Returns service, name and codec of the methods that look up vectors, and whether they are
    streams.

    TorchRec's Predict is not among them: its codec depends on a header, so ``GrpcService.resolve``
    has it.
    """
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
        model_methods: functions of ListModels and GetModel, by name.
        open_inference: plain methods of inference.GRPCInferenceService.
    """

    def __init__(
        self,
        pipeline: RequestPipeline,
        *,
        has_management: bool = True,
        authenticates: bool = True,
        lists_models: bool = False,
    ) -> None:
        """
        Args:
            pipeline: request pipeline.
            has_management: whether models, statistics and reflection are served, besides inference
                and health.
            authenticates: whether callers of management methods are authenticated, if the server
                has an authenticator.
            lists_models: whether models are served without the rest of management, as on a shard,
                whose router asks which versions it holds.
        """
        self._pipeline = pipeline
        authenticator = pipeline.authenticator if authenticates else None
        self._metrics = pipeline.metrics.protocols["grpc"]
        models = pipeline.models
        self.health = health.HealthStatuses(
            (*SERVICES, health.SERVICE_NAME), lambda: models.is_ready
        )
        self._codecs = pipeline.codecs
        self.model_methods = {"ListModels": self._list_models, "GetModel": self._get_model}
        infer = self.open_inference = open_inference_grpc.OpenInferenceMethods(pipeline)
        self._lookups: dict[bytes, Codec] = {}  # of the unary methods that look up vectors
        self._methods = {
            _path(health.SERVICE_NAME, "Watch"): GrpcMethod(
                lambda headers, stream, _: health.Watch(self.health, headers, stream)
            )
        }
        for service, name, codec, is_stream in embed_methods(pipeline.codecs):
            path = _path(service, name)
            if not is_stream:
                self._lookups[path] = codec
                continue
            make = partial(self._embed_stream, codec)
            # The messages of a stream count against the caller's rate.
            self._methods[path] = GrpcMethod(make, pipeline.authenticator, EMBEDDERS, charge=False)
        self._add(health.SERVICE_NAME, {"Check": self.health.check}, None)
        infer_name = open_inference_grpc.SERVICE_NAME
        self._add(infer_name, infer.health, None)
        self._add(infer_name, infer.shared_memory, pipeline.authenticator, EMBEDDERS)
        if has_management or lists_models:
            self._add(SERVICE_NAME, self.model_methods, authenticator)
        if has_management:
            self._add(infer_name, infer.management, authenticator)
            names = (*SERVICES, health.SERVICE_NAME, *reflection.SERVICE_NAMES)
            reflect = GrpcMethod(
                lambda headers, stream, _: reflection.ServerReflection(names, headers, stream),
                authenticator,
            )
            for name in reflection.SERVICE_NAMES:
                self._methods[_path(name, "ServerReflectionInfo")] = reflect

    def _add(
        self,
        service: str,
        functions: Mapping[str, PlainFunction],
        authenticator: Authenticator | None,
        roles: frozenset[str] = CALLERS,
    ) -> None:
        """Adds plain methods for callers with one of ``roles``; for all without
        ``authenticator``."""
        for name, function in functions.items():
            make = partial(GrpcPlainCall, function)
            self._methods[_path(service, name)] = GrpcMethod(make, authenticator, roles)

    def resolve(self, request: HttpRequest) -> MakeCall:
        """Returns the handler factory for calls with the headers of ``request``."""
        try:
            check_once(request.headers, ONCE_METADATA)
            by_name = headers_by_name(request.headers)
            timeout = by_name.get(b"grpc-timeout")
            timeout_s = None if timeout is None else parse_timeout(timeout)
            headers = GrpcHeaders(by_name.get(b"grpc-encoding", b"identity"), timeout_s, by_name)
            codec = self._lookups.get(request.target)
            if request.target == PREDICT_PATH:
                codec = self._codecs.predict_from(by_name.get(MIN_SEQ_HEADER))
            if codec is not None:
                options = self._options(codec, headers)
                return partial(GrpcEmbedCall, options, self._pipeline, headers)
            method = self._methods.get(request.target)
            if method is None:
                shown = request.target.decode("latin-1")
                raise GrpcCallError("UNIMPLEMENTED", f"there is no method {shown}")
        except EmbedServeError as error:
            return self.rejection_factory(error, request.headers)
        return partial(self._begin, method, headers)

    def rejection_factory(self, error: EmbedServeError, headers: Headers) -> MakeCall:
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

    def _embed_stream(
        self, codec: Codec, headers: GrpcHeaders, stream: Stream, quota: CallerQuota | None
    ) -> Handler:
        return EmbedStream(self._options(codec, headers), self._pipeline, headers, stream)

    def _begin(self, method: GrpcMethod, headers: GrpcHeaders, stream: Stream) -> Handler:
        """Returns the handler of a call. Rejects a caller that may not make it, and an unsupported
        encoding; such calls are counted and logged."""
        authenticator, roles, quota = method.authenticator, method.roles, None
        try:
            if authenticator is not None:
                authorization = headers.by_name.get(b"authorization")
                certificate = stream.connection.certificate
                quota = authenticator.check(authorization, certificate, roles, charge=method.charge)
            return method.make(headers, stream, quota)
        except EmbedServeError as error:
            return self.rejection_factory(error, [*headers.by_name.items()])(stream)

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
    return model_message(model, models.status(model))


def _path(service: str, method: str) -> bytes:
    return f"/{service}/{method}".encode()
