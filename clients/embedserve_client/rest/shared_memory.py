"""REST calls of requests with tensors in shared memory."""

import json
from functools import partial
from typing import Any
from urllib.parse import quote

import httpx

from embedserve_client.errors import EmbedServeClientError
from embedserve_client.rest.calls import Call, error_of, said_by
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


class RestSharedMemory:
    """Builds the REST calls; implements `shm.protocol.PlacedCalls`."""

    bytes_min = 256 << 10

    def __init__(self, prefix: str) -> None:
        """Keeps the prefix for error messages.

        Args:
            prefix: value of the server's --shared-memory.
        """
        self._prefix = prefix

    def register(self, region: Region, timeout_s: float | None) -> Call[None]:
        told = {"key": region.key, "offset": 0, "byte_size": region.nbytes}
        return Call(
            method="POST",
            path=f"/v2/systemsharedmemory/region/{quote(region.name, safe='')}/register",
            read=lambda body: None,
            timeout_s=timeout_s,
            content=json.dumps(told).encode(),
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
                | _placed(region, one)
                for one in inputs
            ],
            "outputs": [{"name": one.name} | _placed(region, one) for one in outputs],
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


def _placed(region: Region, one: TensorSlice) -> dict[str, Any]:
    return {"parameters": {REGION: region.name, OFFSET: one.offset, BYTE_SIZE: one.nbytes}}


def _read_answer(body: bytes) -> Answer:
    """Parses a response; raises ServerError if it is malformed."""
    with reading():
        told = json.loads(body)
        outputs = [
            (one["name"], one["shape"], one["datatype"], REGION in one["parameters"])
            for one in told["outputs"]
        ]
        parameters = told.get("parameters", {}).items()
        return answer_of(told["model_name"], told["model_version"], outputs, parameters)


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
    return error_of(response)


def _message(response: httpx.Response) -> str:
    """Returns the message of an error response in the format of the Open Inference Protocol."""
    try:
        return str(json.loads(response.content)["error"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return said_by(response)
