"""Open Inference Protocol, as Triton implements it: requests for a jagged batch, and model loading.

There are three formats: JSON, JSON followed by binary tensors, and the protobuf messages of gRPC.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import orjson

from embedserve_proto.open_inference_pb2 import ModelInferRequest, ModelInferResponse
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
        inputs = [{**tensor.head, "data": tensor.values.ravel().tolist()} for tensor in tensors]
        return orjson.dumps({"inputs": inputs, **_outputs(output)})
    if way.name == "binary":
        return _binary_request(tensors, output)
    return ModelInferRequest(
        model_name=model,
        inputs=[tensor.head for tensor in tensors],
        outputs=[{"name": output}] if output else [],
        raw_input_contents=[tensor.values.tobytes() for tensor in tensors],
    ).SerializeToString()


def infer_headers(way: Way, body: bytes) -> dict[str, str]:
    if way.name != "binary":
        return dict(way.headers)
    return {**way.headers, HEAD_LENGTH: str(body.index(HEAD_END) + len(HEAD_END))}


def infer_values(way: Way, answer: bytes) -> np.ndarray:
    """Returns the values of the only output, float32."""
    if way.name == "JSON":
        output = orjson.loads(answer)["outputs"][0]
        return np.array(output["data"], np.float32).reshape(output["shape"])
    return (binary_answer if way.name == "binary" else grpc_answer)(answer)[1]


def _binary_request(tensors: Sequence[Tensor], output: str) -> bytes:
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


def binary_answer(answer: bytes) -> tuple[int, np.ndarray]:
    """Returns (version of the model, values). The tensor's bytes follow the JSON."""
    found = re.search(rb'"binary_data_size":(\d+)', answer)
    assert found, answer
    size = int(found[1])
    head = orjson.loads(answer[:-size])
    values = np.frombuffer(answer[-size:], "<f4").reshape(head["outputs"][0]["shape"])
    return int(head["model_version"]), values


def grpc_answer(answer: bytes) -> tuple[int, np.ndarray]:
    """Returns (version of the model, values)."""
    message = ModelInferResponse.FromString(answer)
    values = np.frombuffer(message.raw_output_contents[0], "<f4").reshape(message.outputs[0].shape)
    return int(message.model_version), values


def grpc_load(model: str) -> bytes:
    """Returns a request to load a model according to the current content of its folder: the
    RepositoryModelLoadRequest of Triton's grpc_service.proto, whose field 2 is the name."""
    return b"\x12%c%b" % (len(model), model.encode())
