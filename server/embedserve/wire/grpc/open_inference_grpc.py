"""Plain methods of inference.GRPCInferenceService (Open Inference Protocol).

ModelInfer and ModelStreamInfer are Embed and EmbedStream with another codec. The other methods are
plain: functions without a lookup, and are implemented here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError, Message

from embedserve.access.caller_quota import CallerQuota
from embedserve.errors import InvalidRequestError, UnknownModelError
from embedserve.model_info import ModelInfo
from embedserve.open_inference_service import (
    configuration,
    model_metadata,
    repository,
    served,
    served_versions,
    server_metadata,
    statistics,
)
from embedserve.pipeline import RequestPipeline
from embedserve.shared_memory.region_registry import EVERYBODY, RegionRegistry
from embedserve_proto import open_inference_pb2 as pb

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
M = TypeVar("M", bound=Message)
PlainFunction = Callable[[CallerQuota | None, bytes], bytes]
"""Plain method: unary, and without a lookup. Takes the quota of the caller, None without
authentication, and the request message. Returns the response message, or raises EmbedServeError."""


class OpenInferenceMethods:
    """Methods with one message and without a lookup.

    Attributes:
        health: functions by method name; they need no authentication.
        management: functions by method name.
        shared_memory: functions of Triton's extension by method name; empty if that is off.
    """

    def __init__(self, pipeline: RequestPipeline) -> None:
        self._pipeline = pipeline
        self.health: dict[str, PlainFunction] = {
            "ServerLive": self._live,
            "ServerReady": self._ready,
        }
        self.management: dict[str, PlainFunction] = {
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server,
            "ModelMetadata": self._model,
            "ModelConfig": self._configuration,
            "ModelStatistics": self._statistics,
            "RepositoryIndex": self._repository,
        }
        # Encoding takes 40 ms for a thousand features, too long for each call. A version that is no
        # longer served leaves the caches.
        self._metadata: WeakKeyDictionary[ModelInfo, bytes] = WeakKeyDictionary()
        self._configurations: WeakKeyDictionary[ModelInfo, bytes] = WeakKeyDictionary()
        self.shared_memory: dict[str, PlainFunction] = {}
        if pipeline.shared_memory is not None:
            self.shared_memory = {
                "SystemSharedMemoryStatus": self._region_status,
                "SystemSharedMemoryRegister": self._register_region,
                "SystemSharedMemoryUnregister": self._unregister_region,
            }

    def _live(self, quota: CallerQuota | None, message: bytes) -> bytes:
        return pb.ServerLiveResponse(live=True).SerializeToString()

    def _ready(self, quota: CallerQuota | None, message: bytes) -> bytes:
        return pb.ServerReadyResponse(ready=self._pipeline.models.is_ready).SerializeToString()

    def _model_ready(self, quota: CallerQuota | None, message: bytes) -> bytes:
        request = read_message(message, pb.ModelReadyRequest)
        try:
            served(self._pipeline, request.name, request.version)
        except UnknownModelError:
            return pb.ModelReadyResponse(ready=False).SerializeToString()
        return pb.ModelReadyResponse(ready=self._pipeline.models.is_ready).SerializeToString()

    def _server(self, quota: CallerQuota | None, message: bytes) -> bytes:
        return _written(server_metadata(self._pipeline), pb.ServerMetadataResponse())

    def _model(self, quota: CallerQuota | None, message: bytes) -> bytes:
        request = read_message(message, pb.ModelMetadataRequest)
        info = served(self._pipeline, request.name, request.version)
        encoded = self._metadata.get(info)
        if encoded is None:
            encoded = _written(model_metadata(info, []), pb.ModelMetadataResponse())
            self._metadata[info] = encoded
        numbers = [info.version] if request.version else served_versions(self._pipeline, info)
        # Two encoded messages in sequence are one message with the fields of both.
        versions = pb.ModelMetadataResponse(versions=map(str, numbers))
        return encoded + versions.SerializeToString()

    def _configuration(self, quota: CallerQuota | None, message: bytes) -> bytes:
        request = read_message(message, pb.ModelConfigRequest)
        info = served(self._pipeline, request.name, request.version)
        encoded = self._configurations.get(info)
        if encoded is None:
            fields = {"config": configuration(info)}
            encoded = self._configurations[info] = _written(fields, pb.ModelConfigResponse())
        return encoded

    def _statistics(self, quota: CallerQuota | None, message: bytes) -> bytes:
        """Answers ModelStatistics for the models that the caller of ``quota`` may use."""
        request = read_message(message, pb.ModelStatisticsRequest)
        fields = {"model_stats": statistics(self._pipeline, request.name, request.version, quota)}
        return _written(fields, pb.ModelStatisticsResponse())

    def _repository(self, quota: CallerQuota | None, message: bytes) -> bytes:
        request = read_message(message, pb.RepositoryIndexRequest)
        models = repository(self._pipeline, only_ready=request.ready)
        return _written({"models": models}, pb.RepositoryIndexResponse())

    def _regions_and_owner(self, quota: CallerQuota | None) -> tuple[RegionRegistry, str]:
        """Returns the regions of shared memory, and the name of the caller, who owns some."""
        assert self._pipeline.shared_memory is not None
        self._pipeline.models.check_loaded()
        return self._pipeline.shared_memory, EVERYBODY if quota is None else quota.grant.name

    def _region_status(self, quota: CallerQuota | None, message: bytes) -> bytes:
        shared, owner = self._regions_and_owner(quota)
        request = read_message(message, pb.SystemSharedMemoryStatusRequest)
        fields = pb.SystemSharedMemoryStatusResponse()
        for one in shared.status(owner, request.name):
            status = fields.regions[one.name]
            status.name, status.key = one.name, one.key
            status.offset, status.byte_size = one.offset, one.byte_size
        return fields.SerializeToString()

    def _register_region(self, quota: CallerQuota | None, message: bytes) -> bytes:
        shared, owner = self._regions_and_owner(quota)
        request = read_message(message, pb.SystemSharedMemoryRegisterRequest)
        shared.register(owner, request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse().SerializeToString()

    def _unregister_region(self, quota: CallerQuota | None, message: bytes) -> bytes:
        shared, owner = self._regions_and_owner(quota)
        request = read_message(message, pb.SystemSharedMemoryUnregisterRequest)
        shared.unregister(owner, request.name)
        return pb.SystemSharedMemoryUnregisterResponse().SerializeToString()


def read_message(message: bytes, kind: type[M]) -> M:
    """Parses a request message.

    Raises:
        InvalidRequestError: ``message`` is no ``kind``.
    """
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise InvalidRequestError(f"body is not a {kind.__name__}: {error}", "body") from error


def _written(fields: dict[str, Any], message: Message) -> bytes:
    return ParseDict(fields, message).SerializeToString()
