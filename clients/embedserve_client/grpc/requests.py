"""Builds the unary calls of the gRPC clients; `stream` has the streams."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import grpc

from embedserve_client.core.messages import AnswerReader
from embedserve_client.core.models import ModelInfo, ModelList, model_info_of, model_list_of
from embedserve_client.core.result import EmbedResult
from embedserve_client.core.retry_loop import Operation, one_call
from embedserve_client.errors import (
    EmbedServeClientError,
    InvalidRequest,
    PermissionDenied,
    TooLarge,
    Unauthenticated,
    UnknownModel,
)
from embedserve_client.grpc.calls import Rpc, error_of
from embedserve_client.operations import Operations
from embedserve_client.shm.protocol import (
    BYTE_SIZE,
    DATATYPES,
    OFFSET,
    REGION,
    Answer,
    Lookup,
    SharedMemoryRejected,
    TensorSlice,
    answer_of,
    no_shared_memory,
    reading,
    wrong_shared_memory,
)
from embedserve_client.shm.regions import Region
from embedserve_proto import embedding_pb2 as pb
from embedserve_proto import embedding_pb2_grpc, open_inference_pb2, open_inference_pb2_grpc

_REJECTIONS = (InvalidRequest, UnknownModel, Unauthenticated, PermissionDenied, TooLarge)
_REJECTION_CODES = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED)


class GrpcRequests(Operations):
    """Builds the gRPC calls of one client.

    Attributes:
        stub: generated stub, which has no types.
        answers: reader of responses, also those of streams.
    """

    bytes_min = 512 << 10

    def __init__(self, channel: Any, timeout_s: float | None, shared_memory: str | None) -> None:
        super().__init__(timeout_s, shared_memory)
        make_stub: Any = embedding_pb2_grpc.EmbeddingServiceStub
        make_infer_stub: Any = open_inference_pb2_grpc.GRPCInferenceServiceStub
        self.stub, self._infer_stub = make_stub(channel), make_infer_stub(channel)
        self.answers = AnswerReader()

    def models(self) -> Operation[ModelList]:
        """Returns the operation ListModels."""
        request = pb.ListModelsRequest()
        return one_call(partial(Rpc, self.stub.ListModels, request, model_list_of), self._timeout_s)

    def model(self, name: str) -> Operation[ModelInfo]:
        """Returns the operation GetModel."""
        request = pb.GetModelRequest(model=name)
        return one_call(partial(Rpc, self.stub.GetModel, request, model_info_of), self._timeout_s)

    def _embed_call(
        self,
        request: pb.EmbedRequest,
        batch_size: int,
        timeout_s: float | None,
        routing: Mapping[str, str],
    ) -> Rpc[EmbedResult]:
        """Returns the call Embed."""
        return Rpc(
            method=self.stub.Embed,
            request=request,
            read=partial(self.answers.read, batch_size=batch_size),
            timeout_s=timeout_s,
            metadata=routing,
        )

    def register(self, region: Region, timeout_s: float | None) -> Rpc[None]:
        return Rpc(
            method=self._infer_stub.SystemSharedMemoryRegister,
            request=open_inference_pb2.SystemSharedMemoryRegisterRequest(
                name=region.name, key=region.key, offset=0, byte_size=region.nbytes
            ),
            read=lambda message: None,
            timeout_s=timeout_s,
            read_error=partial(_register_error, self._prefix),
        )

    def infer(
        self,
        region: Region,
        inputs: list[TensorSlice],
        outputs: list[TensorSlice],
        lookup: Lookup,
        model: str,
        timeout_s: float | None,
    ) -> Rpc[Answer]:
        request = open_inference_pb2.ModelInferRequest(model_name=model)
        request.parameters["output_dtype"].string_param = DATATYPES[lookup.output_dtype]
        for one in inputs:
            added = request.inputs.add(name=one.name, datatype=one.datatype, shape=[one.size])
            _set_location(added.parameters, region, one)
        for one in outputs:
            _set_location(request.outputs.add(name=one.name).parameters, region, one)
        return Rpc(
            method=self._infer_stub.ModelInfer,
            request=request,
            read=_read_answer,
            timeout_s=timeout_s,
            metadata=lookup.headers,
            read_error=_error,
        )


def _set_location(parameters: Any, region: Region, one: TensorSlice) -> None:
    parameters[REGION].string_param = region.name
    parameters[OFFSET].int64_param = one.offset
    parameters[BYTE_SIZE].int64_param = one.nbytes


def _read_answer(message: open_inference_pb2.ModelInferResponse) -> Answer:
    """Parses a response; raises ServerError if it is malformed."""
    with reading():
        outputs = [
            (one.name, one.shape, one.datatype, REGION in one.parameters) for one in message.outputs
        ]
        parameters = [(name, one.int64_param) for name, one in message.parameters.items()]
        return answer_of(message.model_name, message.model_version, outputs, parameters)


def _register_error(prefix: str, error: Any) -> EmbedServeClientError:
    if error.code() == grpc.StatusCode.UNIMPLEMENTED:
        return no_shared_memory(prefix)
    if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
        return wrong_shared_memory(prefix, error.details() or "")
    return _error(error)


def _error(error: Any) -> EmbedServeClientError:
    """Returns the error of a request with tensors in shared memory.

    A rejected request becomes SharedMemoryRejected, and is repeated over the connection. Overload
    and failures are returned as they are, because the connection would not help.
    """
    converted = error_of(error)
    if isinstance(converted, _REJECTIONS) or error.code() in _REJECTION_CODES:
        return SharedMemoryRejected(error.details() or "")
    return converted
