"""Open Inference Protocol, as Triton implements it: requests for a jagged batch, and model loading.

There are three formats: JSON, JSON followed by binary tensors, and the protobuf messages of gRPC.
The messages are written and read here by field number, because the benchmark's environment has no
generated code of Triton's. The field numbers are from grpc_service.proto: ModelInferRequest,
ModelInferResponse and RepositoryModelLoadRequest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import orjson

from servers.base import Way

INFER = "/inference.GRPCInferenceService/ModelInfer"
HEAD_LENGTH = "Inference-Header-Content-Length"
DATATYPES = {np.dtype("<i8"): "INT64", np.dtype("<i4"): "INT32"}
HEAD_END = b'"binary_data_output":true}}'


@dataclass(frozen=True)
class Tensor:
    name: str
    values: np.ndarray

    @property
    def head(self) -> dict[str, object]:
        datatype = DATATYPES[self.values.dtype]
        return {"name": self.name, "shape": self.values.shape, "datatype": datatype}


def infer_ways(model: str) -> tuple[Way, Way, Way]:
    """Returns the ways of the three formats."""
    path = f"/v2/models/{model}/infer"
    return (
        Way("JSON", "http", path, {"Content-Type": "application/json"}),
        Way("binary", "http", path, {"Content-Type": "application/octet-stream"}),
        Way("gRPC", "grpc", INFER),
    )


def infer_body(way: Way, model: str, tensors: Sequence[Tensor], output: str = "") -> bytes:
    """Returns a request for ``output``; for all outputs if it is ""."""
    if way.name == "JSON":
        return json_request(tensors, output)
    if way.name == "binary":
        return binary_request(tensors, output)
    return grpc_request(model, tensors, output)


def infer_headers(way: Way, body: bytes) -> dict[str, str]:
    if way.name != "binary":
        return dict(way.headers)
    return {**way.headers, HEAD_LENGTH: str(head_length(body))}


def infer_values(way: Way, answer: bytes) -> np.ndarray:
    """Returns the values of the only output, float32."""
    read = {"JSON": json_values, "binary": binary_values, "gRPC": grpc_values}[way.name]
    return read(answer)


def json_request(tensors: Sequence[Tensor], output: str = "") -> bytes:
    inputs = [{**tensor.head, "data": tensor.values.ravel().tolist()} for tensor in tensors]
    return orjson.dumps({"inputs": inputs, **_outputs(output)})


def json_values(answer: bytes) -> np.ndarray:
    """Returns the values of the first output, float32."""
    output = orjson.loads(answer)["outputs"][0]
    return np.array(output["data"], np.float32).reshape(output["shape"])


def binary_request(tensors: Sequence[Tensor], output: str = "") -> bytes:
    """Returns a body of JSON, followed by the tensors' bytes."""
    inputs = [
        {**tensor.head, "parameters": {"binary_data_size": tensor.values.nbytes}}
        for tensor in tensors
    ]
    parameters = {"binary_data_output": True}
    head = orjson.dumps({"inputs": inputs, **_outputs(output), "parameters": parameters})
    return head + b"".join(tensor.values.tobytes() for tensor in tensors)


def _outputs(output: str) -> dict[str, object]:
    return {"outputs": [{"name": output}]} if output else {}


def head_length(body: bytes) -> int:
    """Returns the bytes of JSON in a body of ``binary_request``."""
    return body.index(HEAD_END) + len(HEAD_END)


def binary_values(answer: bytes) -> np.ndarray:
    """Returns the values of the only output, float32. The tensor's bytes follow the JSON."""
    return binary_answer(answer)[1]


def binary_answer(answer: bytes) -> tuple[int, np.ndarray]:
    """Returns (version of the model, values)."""
    marker = b'"binary_data_size":'
    start = answer.index(marker) + len(marker)
    end = start
    while answer[end : end + 1].isdigit():
        end += 1
    size = int(answer[start:end])
    head = orjson.loads(answer[:-size])
    values = np.frombuffer(answer[-size:], "<f4").reshape(head["outputs"][0]["shape"])
    return int(head["model_version"]), values


def grpc_request(model: str, tensors: Sequence[Tensor], output: str = "") -> bytes:
    message = _field(1, model.encode())
    for tensor in tensors:
        shape = b"".join(map(_varint, tensor.values.shape))
        datatype = DATATYPES[tensor.values.dtype]
        head = _field(1, tensor.name.encode()) + _field(2, datatype.encode()) + _field(3, shape)
        message += _field(5, head)
    if output:
        message += _field(6, _field(1, output.encode()))
    return message + b"".join(_field(7, tensor.values.tobytes()) for tensor in tensors)


def grpc_values(answer: bytes) -> np.ndarray:
    """Returns the values of the only output, float32."""
    return grpc_answer(answer)[1]


def grpc_answer(answer: bytes) -> tuple[int, np.ndarray]:
    """Returns (version of the model, values)."""
    fields = dict(_fields(answer))
    output = dict(_fields(fields[5]))
    values = np.frombuffer(fields[6], "<f4").reshape(list(_varints(output[3])))
    return int(fields[2]), values


def grpc_load(model: str) -> bytes:
    """Returns a request to load a model according to the current content of its folder."""
    return _field(2, model.encode())


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def _varints(data: bytes) -> Iterator[int]:
    value, shift = 0, 0
    for byte in data:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            yield value
            value, shift = 0, 0


def _field(number: int, data: bytes) -> bytes:
    """Encodes a length-delimited field."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields the length-delimited fields of a message. Raises ValueError for other wire types."""
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        if key & 7 != 2:
            raise ValueError(f"field {key >> 3} has wire type {key & 7}, expected 2")
        size, at = _read_varint(message, at)
        yield key >> 3, message[at : at + size]
        at += size


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    end = at
    while message[end] > 127:
        end += 1
    return next(_varints(message[at : end + 1])), end + 1
