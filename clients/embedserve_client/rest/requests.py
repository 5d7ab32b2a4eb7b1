"""Builds the operations of the REST clients.

Performs no network I/O, so that the sync and the async client share it. If the client uses shared
memory, ids are written there.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar
from urllib.parse import quote

from embedserve_client.core.batch import Features, Weights, batch_of
from embedserve_client.core.deadline import check_timeout, timeout_of
from embedserve_client.core.messages import AnswerReader, request_of
from embedserve_client.core.models import (
    ModelInfo,
    ModelList,
    model_info_from_json,
    model_list_from_json,
)
from embedserve_client.core.result import EmbedResult, OutputDType
from embedserve_client.core.retry_loop import Operation, one_call
from embedserve_client.core.routing import routing_headers
from embedserve_client.rest.calls import Call
from embedserve_client.rest.shared_memory import RestSharedMemory
from embedserve_client.shm.lookups import SharedMemory, ask
from embedserve_client.shm.protocol import Lookup

T = TypeVar("T")

_PROTOBUF = "application/x-protobuf"
_JSON = "application/json"


class RestRequests:
    """Builds the HTTP calls of one client."""

    def __init__(self, timeout_s: float | None, shared_memory: str | None) -> None:
        self._timeout_s = check_timeout(timeout_s)
        self._answers = AnswerReader()
        self._shared: SharedMemory | None = None
        if shared_memory is not None:
            self._shared = SharedMemory(shared_memory, RestSharedMemory(shared_memory))

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
        """Returns the lookup: POST /embed with an EmbedRequest, which names the model itself.
        Requests that qualify use shared memory."""
        batch = batch_of(features, weights)
        timeout_s = timeout_of(timeout_s, self._timeout_s)
        routing = routing_headers(routing_key)

        def over_the_connection(left_s: float | None) -> Call[EmbedResult]:
            return Call(
                method="POST",
                path="/embed",
                read=partial(self._answers.read_bytes, batch_size=batch.batch_size),
                timeout_s=left_s,
                content=request_of(batch, model, output_dtype, output_keys).SerializeToString(),
                headers={"Content-Type": _PROTOBUF, "Accept": _PROTOBUF, **routing},
            )

        lookup = Lookup(batch, model, output_dtype, routing, over_the_connection)
        return ask(self._shared, lookup, output_keys, timeout_s)

    def models(self) -> Operation[ModelList]:
        """Returns the operation GET /models."""
        return self._get("/models", model_list_from_json)

    def model(self, name: str) -> Operation[ModelInfo]:
        """Returns the operation GET /models/{model}."""
        return self._get(f"/models/{quote(name, safe='')}", model_info_from_json)

    def close(self) -> None:
        """Removes the client's shared-memory files."""
        if self._shared is not None:
            self._shared.close()

    def _get(self, path: str, read: Callable[[bytes], T]) -> Operation[T]:
        def call(left_s: float | None) -> Call[T]:
            return Call("GET", path, read, left_s, headers={"Accept": _JSON})

        return one_call(call, self._timeout_s)
