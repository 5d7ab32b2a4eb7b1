"""Builds the calls of the REST clients."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

import httpx

from embedserve_client.core.messages import AnswerReader
from embedserve_client.core.models import (
    ModelInfo,
    ModelList,
    model_info_from_json,
    model_list_from_json,
)
from embedserve_client.core.result import EmbedResult
from embedserve_client.core.retry_loop import Operation, one_call
from embedserve_client.core.short_repr import short
from embedserve_client.errors import EmbedServeClientError, UnknownModel
from embedserve_client.operations import Operations
from embedserve_client.rest.calls import Call, describe_response, error_of
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

T = TypeVar("T")

_PROTOBUF = "application/x-protobuf"
_JSON = "application/json"


class RestRequests(Operations):
    """Builds the HTTP calls of one client."""

    bytes_min = 256 << 10

    def __init__(self, timeout_s: float | None, shared_memory: str | None) -> None:
        super().__init__(timeout_s, shared_memory)
        self._answers = AnswerReader()

    def models(self) -> Operation[ModelList]:
        """Returns the operation GET /models."""
        return self._get("/models", model_list_from_json)

    def model(self, name: str) -> Operation[ModelInfo]:
        """Returns the operation GET /models/{model}. Raises UnknownModel for a name that would make
        it another path: httpx resolves dots, and servers read %2F as a slash."""
        if "/" in name or name in ("", ".", ".."):
            raise UnknownModel(f"model is {short(name)}, which no model is called")
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

    def register(self, region: Region, timeout_s: float | None) -> Call[None]:
        body = {"key": region.key, "offset": 0, "byte_size": region.nbytes}
        return Call(
            method="POST",
            path=f"/v2/systemsharedmemory/region/{quote(region.name, safe='')}/register",
            read=lambda body: None,
            timeout_s=timeout_s,
            content=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
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
    ) -> Call[Answer]:
        body = {
            "inputs": [
                {"name": one.name, "datatype": one.datatype, "shape": [one.size]}
                | _location(region, one)
                for one in inputs
            ],
            "outputs": [{"name": one.name} | _location(region, one) for one in outputs],
            "parameters": {"output_dtype": DATATYPES[lookup.output_dtype]},
        }
        return Call(
            method="POST",
            path=f"/v2/models/{quote(model, safe='@')}/infer",
            read=_read_answer,
            timeout_s=timeout_s,
            content=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **lookup.headers},
            read_error=_error,
        )


def _location(region: Region, one: TensorSlice) -> dict[str, Any]:
    return {"parameters": {REGION: region.name, OFFSET: one.offset, BYTE_SIZE: one.nbytes}}


def _read_answer(body: bytes) -> Answer:
    """Parses a response; raises ServerError if it is malformed."""
    with reading():
        response = json.loads(body)
        outputs = [
            (one["name"], one["shape"], one["datatype"], REGION in one["parameters"])
            for one in response["outputs"]
        ]
        parameters = response.get("parameters", {}).items()
        return answer_of(response["model_name"], response["model_version"], outputs, parameters)


def _register_error(prefix: str, response: httpx.Response) -> EmbedServeClientError:
    if response.status_code == httpx.codes.NOT_FOUND:
        return no_shared_memory(prefix)
    if response.status_code == httpx.codes.BAD_REQUEST:
        return wrong_shared_memory(prefix, _message(response))
    return _error(response)


def _error(response: httpx.Response) -> EmbedServeClientError:
    """Returns the error of a request with tensors in shared memory.

    A rejected request becomes SharedMemoryRejected, and is repeated over the connection. Overload
    and failures are returned as they are, because the connection would not help.
    """
    status = response.status_code
    if 400 <= status < 500 and status != httpx.codes.TOO_MANY_REQUESTS:
        return SharedMemoryRejected(_message(response))
    error = error_of(response)  # by the status, because the body has no code
    return type(error)(_message(response), retry_after_s=error.retry_after_s)


def _message(response: httpx.Response) -> str:
    """Returns the message of an error response in the format of the Open Inference Protocol."""
    try:
        message = json.loads(response.content)["error"]
    except (ValueError, LookupError, TypeError, RecursionError):
        message = None
    return message if isinstance(message, str) else describe_response(response)
