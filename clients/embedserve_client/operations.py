"""Builds the operations of a client, the same for REST and gRPC.

Performs no network I/O, so that the sync and the async client share it. If the client uses shared
memory, ids are written there.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from embedserve_client.core.batch import Features, Weights, batch_of
from embedserve_client.core.deadline import check_timeout, timeout_of
from embedserve_client.core.messages import request_of
from embedserve_client.core.models import ModelInfo, ModelList
from embedserve_client.core.result import EmbedResult, OutputDType
from embedserve_client.core.retry_loop import Operation, one_call
from embedserve_client.core.routing import routing_headers
from embedserve_client.shm.lookups import SharedMemory
from embedserve_client.shm.protocol import Lookup, SharedMemoryCalls, may_use_shared_memory
from embedserve_proto import embedding_pb2 as pb


class Operations(SharedMemoryCalls):
    """Operations of one client, made of the calls of a transport."""

    def __init__(self, timeout_s: float | None, shared_memory: str | None) -> None:
        """Checks the client's settings.

        Args:
            timeout_s: default time limit of an operation in seconds; None is no limit.
            shared_memory: value of the server's --shared-memory; None uses the connection only.
        """
        self._timeout_s = check_timeout(timeout_s)
        self._prefix = shared_memory or ""
        self._shared: SharedMemory | None = None
        if shared_memory is not None:
            self._shared = SharedMemory(shared_memory, self)

    def embed(
        self,
        features: Features,
        weights: Weights | None,
        model: str | None,
        timeout_s: float | None,
        output_dtype: OutputDType,
        output_keys: Sequence[str],
        routing_key: str | None,
        min_seq: int | None,
    ) -> Operation[EmbedResult]:
        """Returns the lookup, through shared memory if it qualifies."""
        batch = batch_of(features, weights)
        timeout_s = timeout_of(timeout_s, self._timeout_s)
        routing = routing_headers(routing_key)

        def over_the_connection(left_s: float | None) -> Any:
            message = request_of(batch, model, output_dtype, output_keys, min_seq)
            return self._embed_call(message, batch.batch_size, left_s, routing)

        shared = self._shared if min_seq is None else None
        if shared is None or not may_use_shared_memory(batch, output_dtype, output_keys):
            return one_call(over_the_connection, timeout_s)
        lookup = Lookup(batch, model, output_dtype, routing, over_the_connection)
        return Operation(partial(shared.look_up, lookup), timeout_s)

    @abstractmethod
    def models(self) -> Operation[ModelList]:
        """Returns the operation that lists all served models."""

    @abstractmethod
    def model(self, name: str) -> Operation[ModelInfo]:
        """Returns the operation that describes one served model."""

    @abstractmethod
    def _embed_call(
        self,
        request: pb.EmbedRequest,
        batch_size: int,
        timeout_s: float | None,
        routing: Mapping[str, str],
    ) -> Any:
        """Returns the call of a lookup over the connection, which reads an EmbedResult.

        Args:
            timeout_s: time limit of the call in seconds; None is no limit.
            routing: header of the routing key.
        """

    def close(self) -> None:
        """Removes the client's shared-memory files."""
        if self._shared is not None:
            self._shared.close()
