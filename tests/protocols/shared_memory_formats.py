"""Formats of the Open Inference Protocol with ids and vectors in shared memory."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from protocols.connections import unframed
from protocols.formats import metadata
from protocols.inference_formats import INFER, Infer, InferMessage, infer_request, vectors_of_result
from protocols.requests import EncodedRequest, RawResponse, Request, Vectors
from server.fake_engine import FakeEngine
from server.open_inference import InferResponse

from embedserve_proto import open_inference_pb2 as inference
from server import open_inference

OUTPUT_BYTES = 1 << 16
"""Bytes reserved for an output in shared memory."""


class SharedMemoryFolder:
    """A folder that stands for /dev/shm. Each request has a file with its ids and room for outputs.

    Attributes:
        last: file of the last request, whose name is to be registered as a region.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.last = folder / "none"
        self._count = 0

    def write_request(self, request: Request, engine: FakeEngine) -> dict[str, Any]:
        """Writes the ids; returns the JSON of the request."""
        self._count += 1
        self.last = self.folder / f"region-{self._count}"
        tensors = infer_request(request)
        data = bytearray()
        inputs, outputs = [], []
        for one in tensors.inputs:
            inputs.append(one.head | {"parameters": self._part(len(data), len(one.raw))})
            data += one.raw
        for key in request.output_keys or engine.model.keys:
            outputs.append({"name": key, "parameters": self._part(len(data), OUTPUT_BYTES)})
            data += bytes(OUTPUT_BYTES)
        self.last.write_bytes(data)
        return {"inputs": inputs, "outputs": outputs, "parameters": dict(tensors.parameters)}

    def _part(self, offset: int, nbytes: int) -> dict[str, Any]:
        at = {"shared_memory_offset": offset} if offset else {}
        return {
            "shared_memory_region": self.last.name,
            "shared_memory_byte_size": nbytes,
            **at,
        }

    def read(self, outputs: Mapping[str, tuple[str, Any, Mapping[str, Any]]]) -> Any:
        """Returns the vectors by key, given (datatype, shape, location) of each output."""
        by_key = {}
        for key, (datatype, shape, place) in outputs.items():
            data = (self.folder / place["shared_memory_region"]).read_bytes()
            start = place["shared_memory_offset"]
            end = start + place["shared_memory_byte_size"]
            dtype = open_inference.DTYPES[datatype]
            by_key[key] = np.frombuffer(data[start:end], dtype).reshape(shape)
        return by_key


class SharedMemory(Infer):
    """The Open Inference Protocol over REST, with ids and vectors in shared memory."""

    def encode(self, request: Request, engine: FakeEngine) -> EncodedRequest:
        body = self.shared_folder.write_request(request, engine)
        sent = super().encode(request, engine)
        return EncodedRequest(sent.path, sent.headers, json.dumps(body).encode())

    def decode(self, raw: RawResponse) -> Vectors:
        result = json.loads(raw.body)
        outputs = {
            one["name"]: (one["datatype"], one["shape"], one["parameters"])
            for one in result["outputs"]
        }
        named = result["model_name"], result["model_version"], "", result.get("parameters", {})
        return vectors_of_result(InferResponse(*named, self.shared_folder.read(outputs)))


class SharedMemoryMessage(InferMessage):
    """The Open Inference Protocol over gRPC, with ids and vectors in shared memory."""

    def encode(self, request: Request, engine: FakeEngine) -> EncodedRequest:
        body = self.shared_folder.write_request(request, engine)
        model = request.model or engine.model.name
        message = inference.ModelInferRequest(model_name=model, model_version=request.version)
        _put(message.parameters, body["parameters"])
        for one in body["inputs"]:
            tensor = message.inputs.add(
                name=one["name"], datatype=one["datatype"], shape=one["shape"]
            )
            _put(tensor.parameters, one["parameters"])
        for one in body["outputs"]:
            _put(message.outputs.add(name=one["name"]).parameters, one["parameters"])
        return EncodedRequest(INFER, metadata(request), message.SerializeToString())

    def decode(self, raw: RawResponse) -> Vectors:
        (data,) = unframed(raw.body)
        message = inference.ModelInferResponse.FromString(data)
        assert not any(message.raw_output_contents)
        outputs: dict[str, tuple[str, Any, dict[str, Any]]] = {}
        for one in message.outputs:
            place: dict[str, Any] = {
                "shared_memory_region": one.parameters["shared_memory_region"].string_param,
                "shared_memory_offset": one.parameters["shared_memory_offset"].int64_param,
                "shared_memory_byte_size": one.parameters["shared_memory_byte_size"].int64_param,
            }
            outputs[one.name] = (one.datatype, list(one.shape), place)
        parameters = {name: one.int64_param for name, one in message.parameters.items()}
        named = message.model_name, message.model_version, "", parameters
        return vectors_of_result(InferResponse(*named, self.shared_folder.read(outputs)))


def _put(parameters: Any, place: Mapping[str, Any]) -> None:
    for name, value in place.items():
        kind = "string_param" if isinstance(value, str) else "int64_param"
        setattr(parameters[name], kind, value)
