"""gRPC methods of the server, with a handler factory for each."""

from __future__ import annotations

from collections.abc import Callable
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
from embedserve.shared_memory.region_registry import EVERYBODY
from embedserve.tracing.request_id import REQUEST_ID
from embedserve.wire.early_rejection import EarlyRejection
from embedserve.wire.grpc import health, open_inference_grpc, reflection
from embedserve.wire.grpc.calls import GrpcEmbedCall, GrpcUnaryCall
from embedserve.wire.grpc.embed_stream import EmbedStream
from embedserve.wire.grpc.grpc_framing import Deframer, WireError, parse_timeout
from embedserve.wire.grpc.statuses import error_block
from embedserve.wire.http2.header_blocks import encode
from embedserve.wire.http2.stream import Stream
from embedserve.wire.http_stream import NULL_HANDLER, Handler, Headers, HttpRequest
from embedserve.wire.rest.headers import check_once
from embedserve_proto import embedding_pb2, predictor_pb2

SERVICE_NAME = embedding_pb2.DESCRIPTOR.services_by_name["EmbeddingService"].full_name
PREDICTOR_NAME = predictor_pb2.DESCRIPTOR.services_by_name["Predictor"].full_name
SERVICES = (SERVICE_NAME, open_inference_grpc.SERVICE_NAME, PREDICTOR_NAME)

MakeCall = Callable[[Stream], Handler]
HeadersByName = dict[bytes, bytes]
MakeOptions = Callable[[Codec], RequestOptions]
"""Returns the request options of a call whose messages a codec reads and writes."""
Method = Callable[[bytes, MakeOptions, HeadersByName], MakeCall]
"""Resolver of (encoding, factory of request options, headers) to a handler factory of calls."""
ONCE_METADATA = frozenset({ROUTING_KEY, MIN_SEQ_HEADER, b"grpc-timeout", b"grpc-encoding"})
"""Metadata that may occur once: with two, a proxy and the server could each read another value."""


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
        self._methods: dict[bytes, Method] = {
            _path(health.SERVICE_NAME, "Check"): _unary(self.health.check),
            _path(health.SERVICE_NAME, "Watch"): self._watch,
        }
        self._codecs = pipeline.codecs
        for service, name, codec, is_stream in embed_methods(pipeline.codecs):
            method: Method = partial(self._embed, codec)
            if is_stream:
                method = partial(self._embed_stream, codec)
            self._methods[_path(service, name)] = method
        self._methods[_path(PREDICTOR_NAME, "Predict")] = self._predict
        self.open_inference = open_inference_grpc.OpenInferenceMethods(pipeline)
        open_inference_path = partial(_path, open_inference_grpc.SERVICE_NAME)
        for name, function in self.open_inference.health.items():
            self._methods[open_inference_path(name)] = _unary(function)
        for name, function_of_owner in self.open_inference.shared_memory.items():
            self._methods[open_inference_path(name)] = self._unary_of_caller(
                partial(self._call_for_owner, function_of_owner), pipeline.authenticator, EMBEDDERS
            )
        if has_management or lists_models:
            for name, function in (("ListModels", self.list_models), ("GetModel", self.get_model)):
                self._methods[_path(SERVICE_NAME, name)] = self._restricted(
                    _unary(function), authenticator
                )
        if not has_management:
            return
        for name, function in self.open_inference.management.items():
            self._methods[open_inference_path(name)] = self._restricted(
                _unary(function), authenticator
            )
        self._methods[open_inference_path("ModelStatistics")] = self._unary_of_caller(
            self.open_inference.statistics, authenticator, CALLERS
        )
        for name in reflection.SERVICE_NAMES:
            self._methods[_path(name, "ServerReflectionInfo")] = self._restricted(
                self._reflection, authenticator
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
            headers = headers_by_name(request.headers)
            has_id = REQUEST_ID in headers

            def make_options(codec: Codec) -> RequestOptions:
                return RequestOptions("", codec, codec, timeout_s, self._metrics, has_id)

            return method(encoding, make_options, headers)
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

    def _embed(
        self, codec: Codec, encoding: bytes, make_options: MakeOptions, headers: HeadersByName
    ) -> MakeCall:
        return partial(GrpcEmbedCall, make_options(codec), self._pipeline, encoding, headers)

    def _predict(
        self, encoding: bytes, make_options: MakeOptions, headers: HeadersByName
    ) -> MakeCall:
        codec = self._codecs.predict_from(headers.get(MIN_SEQ_HEADER))
        return self._embed(codec, encoding, make_options, headers)

    def _embed_stream(
        self, codec: Codec, encoding: bytes, make_options: MakeOptions, headers: HeadersByName
    ) -> MakeCall:
        check_encoding(encoding)
        options, pipeline = make_options(codec), self._pipeline
        return self._admitting(
            lambda stream, _: EmbedStream(options, pipeline, encoding, headers, stream),
            pipeline.authenticator,
            EMBEDDERS,
            headers,
            charge=False,  # its messages count against the caller's rate
        )

    def _watch(
        self, encoding: bytes, make_options: MakeOptions, headers: HeadersByName
    ) -> MakeCall:
        check_encoding(encoding)
        return lambda stream: health.Watch(self.health, encoding, headers, stream)

    def _reflection(
        self, encoding: bytes, make_options: MakeOptions, headers: HeadersByName
    ) -> MakeCall:
        check_encoding(encoding)
        return lambda stream: reflection.ServerReflection(self._names, encoding, headers, stream)

    def _call_for_owner(
        self, function: Callable[[str, bytes], bytes], quota: CallerQuota | None, message: bytes
    ) -> bytes:
        """Calls ``function`` with the caller's name and the message; EVERYBODY without a quota."""
        self._pipeline.models.check_loaded()
        return function(EVERYBODY if quota is None else quota.grant.name, message)

    def _restricted(self, method: Method, authenticator: Authenticator | None) -> Method:
        """Returns ``method`` for callers only. Each call counts against the caller's rate."""

        def resolve(encoding: bytes, make_options: MakeOptions, headers: HeadersByName) -> MakeCall:
            make_call = method(encoding, make_options, headers)
            return self._admitting(
                lambda stream, _: make_call(stream), authenticator, CALLERS, headers
            )

        return resolve

    def _unary_of_caller(
        self,
        function: Callable[[CallerQuota | None, bytes], bytes],
        authenticator: Authenticator | None,
        roles: frozenset[str],
    ) -> Method:
        """Returns the method of ``function`` for callers with one of ``roles``. Each call counts
        against the caller's rate.

        Args:
            function: takes the caller's quota and the message. The quota is None without
                ``authenticator``.
        """
        return lambda encoding, make_options, headers: self._admitting(
            lambda stream, quota: GrpcUnaryCall(
                partial(function, quota), encoding, headers, stream
            ),
            authenticator,
            roles,
            headers,
        )

    def _admitting(
        self,
        make: Callable[[Stream, CallerQuota | None], Handler],
        authenticator: Authenticator | None,
        roles: frozenset[str],
        headers: HeadersByName,
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
            authorization, client = headers.get(b"authorization"), stream.connection
            try:
                quota = authenticator.check(authorization, client.certificate, roles, charge=charge)
            except EmbedServeError as error:
                return self.rejecting(error, [*headers.items()])(stream)
            return make(stream, quota)

        return make_or_reject

    def list_models(self, message: bytes) -> bytes:
        models = self._pipeline.models
        models.check_loaded()
        return embedding_pb2.ListModelsResponse(
            models=[_message(models, model) for model in models.models()],
            default_model=models.default_model,
        ).SerializeToString()

    def get_model(self, message: bytes) -> bytes:
        name = open_inference_grpc.read_message(message, embedding_pb2.GetModelRequest).model
        models = self._pipeline.models
        return _message(models, models.model(name)).SerializeToString()


def _message(models: ModelRegistry, model: ModelInfo) -> embedding_pb2.Model:
    return protobuf_responses.model_message(model, models.status(model))


def _unary(function: Callable[[bytes], bytes]) -> Method:
    return lambda encoding, make_options, headers: (
        lambda stream: GrpcUnaryCall(function, encoding, headers, stream)
    )


def _path(service: str, method: str) -> bytes:
    return f"/{service}/{method}".encode()


def check_encoding(encoding: bytes) -> None:
    """Raises WireError (UNIMPLEMENTED) if ``encoding`` is not supported."""
    Deframer(0, encoding)
