"""Builds the unary calls of the gRPC clients; `stream` has the streams."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from embedserve_client.core.messages import AnswerReader
from embedserve_client.core.models import ModelInfo, ModelList, model_info_of, model_list_of
from embedserve_client.core.result import EmbedResult
from embedserve_client.core.retry_loop import Operation, one_call
from embedserve_client.grpc.calls import Rpc
from embedserve_client.grpc.shared_memory import GrpcSharedMemory
from embedserve_client.operations import Operations
from embedserve_proto import embedding_pb2 as pb
from embedserve_proto import embedding_pb2_grpc as pb_grpc


class GrpcRequests(Operations):
    """Builds the gRPC calls of one client.

    Attributes:
        stub: generated stub, which has no types.
        answers: reader of responses, also those of streams.
    """

    def __init__(self, channel: Any, timeout_s: float | None, shared_memory: str | None) -> None:
        super().__init__(timeout_s, shared_memory, partial(GrpcSharedMemory, channel=channel))
        make_stub: Any = pb_grpc.EmbeddingServiceStub
        self.stub = make_stub(channel)
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
