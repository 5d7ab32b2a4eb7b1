"""Builds the operations of the gRPC clients; `stream` has the streams.

Performs no network I/O, so that the sync and the async client share it. If the client uses shared
memory, ids are written there.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from embedserve_client.core.batch import Features, Weights, batch_of
from embedserve_client.core.deadline import timeout_of
from embedserve_client.core.messages import AnswerReader, request_of
from embedserve_client.core.models import ModelInfo, ModelList, model_info_of, model_list_of
from embedserve_client.core.result import EmbedResult, OutputDType
from embedserve_client.core.retry_loop import Operation, one_call
from embedserve_client.core.routing import routing_headers
from embedserve_client.grpc.calls import Rpc
from embedserve_client.grpc.shared_memory import GrpcSharedMemory
from embedserve_client.shm.lookups import SharedMemory, ask
from embedserve_client.shm.protocol import Lookup
from embedserve_proto import embedding_pb2 as pb
from embedserve_proto import embedding_pb2_grpc as pb_grpc


class GrpcRequests:
    """Builds the gRPC calls of one client.

    Attributes:
        stub: generated stub, which has no types.
        answers: reader of responses, also those of streams.
    """

    def __init__(self, channel: Any, timeout_s: float | None, shared_memory: str | None) -> None:
        self._timeout_s = timeout_s
        make_stub: Any = pb_grpc.EmbeddingServiceStub
        self.stub = make_stub(channel)
        self.answers = AnswerReader()
        self._shared: SharedMemory | None = None
        if shared_memory is not None:
            self._shared = SharedMemory(shared_memory, GrpcSharedMemory(shared_memory, channel))

    def embed(
        self,
        features: Features,
        weights: Weights | None,
        model: str | None,
        timeout_s: float | None,
        output_dtype: OutputDType,
        output_keys: Sequence[str],
        routing_key: str | None,
    ) -> Operation[EmbedResult]:
        """Returns the lookup: Embed, or an inference request through shared memory if it
        qualifies."""
        batch = batch_of(features, weights)
        routing = routing_headers(routing_key)

        def over_the_connection(left_s: float | None) -> Rpc[EmbedResult]:
            return Rpc(
                method=self.stub.Embed,
                request=request_of(batch, model, output_dtype, output_keys),
                read=partial(self.answers.read, batch_size=batch.batch_size),
                timeout_s=left_s,
                metadata=routing,
            )

        lookup = Lookup(batch, model, output_dtype, routing, over_the_connection)
        return ask(self._shared, lookup, output_keys, timeout_of(timeout_s, self._timeout_s))

    def models(self) -> Operation[ModelList]:
        """Returns the operation ListModels."""
        request = pb.ListModelsRequest()
        return one_call(partial(Rpc, self.stub.ListModels, request, model_list_of), self._timeout_s)

    def model(self, name: str) -> Operation[ModelInfo]:
        """Returns the operation GetModel."""
        request = pb.GetModelRequest(model=name)
        return one_call(partial(Rpc, self.stub.GetModel, request, model_info_of), self._timeout_s)

    def close(self) -> None:
        """Removes the client's shared-memory files."""
        if self._shared is not None:
            self._shared.close()
