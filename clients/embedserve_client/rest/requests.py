"""Builds the calls of the REST clients."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar
from urllib.parse import quote

from embedserve_client.core.messages import AnswerReader
from embedserve_client.core.models import (
    ModelInfo,
    ModelList,
    model_info_from_json,
    model_list_from_json,
)
from embedserve_client.core.result import EmbedResult
from embedserve_client.core.retry_loop import Operation, one_call
from embedserve_client.operations import Operations
from embedserve_client.rest.calls import Call
from embedserve_client.rest.shared_memory import RestSharedMemory
from embedserve_proto import embedding_pb2 as pb

T = TypeVar("T")

_PROTOBUF = "application/x-protobuf"
_JSON = "application/json"


class RestRequests(Operations):
    """Builds the HTTP calls of one client."""

    def __init__(self, timeout_s: float | None, shared_memory: str | None) -> None:
        super().__init__(timeout_s, shared_memory, RestSharedMemory)
        self._answers = AnswerReader()

    def models(self) -> Operation[ModelList]:
        """Returns the operation GET /models."""
        return self._get("/models", model_list_from_json)

    def model(self, name: str) -> Operation[ModelInfo]:
        """Returns the operation GET /models/{model}."""
        return self._get(f"/models/{quote(name, safe='')}", model_info_from_json)

    def _embed_call(
        self,
        request: pb.EmbedRequest,
        batch_size: int,
        timeout_s: float | None,
        routing: Mapping[str, str],
    ) -> Call[EmbedResult]:
        """Returns POST /embed; its message names the model."""
        return Call(
            method="POST",
            path="/embed",
            read=partial(self._answers.read_bytes, batch_size=batch_size),
            timeout_s=timeout_s,
            content=request.SerializeToString(),
            headers={"Content-Type": _PROTOBUF, "Accept": _PROTOBUF, **routing},
        )

    def _get(self, path: str, read: Callable[[bytes], T]) -> Operation[T]:
        def call(left_s: float | None) -> Call[T]:
            return Call("GET", path, read, left_s, headers={"Accept": _JSON})

        return one_call(call, self._timeout_s)
