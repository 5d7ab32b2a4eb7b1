"""Formats of the Open Inference Protocol with ids and vectors in shared memory."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from grpc_messages import unframed
from protocols.formats import metadata
from protocols.inference_formats import INFER, Infer, InferMessage, infer_request, vectors_of_result
from protocols.requests import EncodedRequest, RawResponse, Request, Vectors
from server.fake_engine import FakeEngine
from server.open_inference import (
    DTYPES,
    InferRequest,
    InferResponse,
    Place,
    read_body,
    read_message,
)

from embedserve_proto import open_inference_pb2 as inference

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

    def place(self, request: Request, engine: FakeEngine) -> InferRequest:
        """Writes the ids; returns the request for vectors in the same file."""
        self._count += 1
        self.last = self.folder / f"region-{self._count}"
        tensors, data = infer_request(request), bytearray()
        ins, outs = {}, {}
        for at, one in enumerate(tensors.inputs):
            ins[at] = Place(self.last.name, len(data), len(one.raw))
            data += one.raw
        keys = request.output_keys or engine.model.keys
        for key in keys:
            outs[key] = Place(self.last.name, len(data), OUTPUT_BYTES)
            data += bytes(OUTPUT_BYTES)
        self.last.write_bytes(data)
        return replace(tensors, outputs=keys, ins=ins, outs=outs)

    def read(self, response: InferResponse) -> Vectors:
        """Returns the vectors of a response, all of whose outputs are in shared memory."""
        assert response.outputs == {}
        by_key = {}
        for key, (datatype, shape, place) in response.shared.items():
            data = (self.folder / place["shared_memory_region"]).read_bytes()
            start = place["shared_memory_offset"]
            end = start + place["shared_memory_byte_size"]
            by_key[key] = np.frombuffer(data[start:end], DTYPES[datatype]).reshape(shape)
        return vectors_of_result(replace(response, outputs=by_key))


class SharedMemory(Infer):
    """The Open Inference Protocol over REST, with ids and vectors in shared memory."""

    def encode(self, request: Request, engine: FakeEngine) -> EncodedRequest:
        sent = super().encode(request, engine)
        return replace(sent, body=self.shared_folder.place(request, engine).json_body())

    def decode(self, raw: RawResponse) -> Vectors:
        return self.shared_folder.read(read_body(raw.body, None))


class SharedMemoryMessage(InferMessage):
    """The Open Inference Protocol over gRPC, with ids and vectors in shared memory."""

    def encode(self, request: Request, engine: FakeEngine) -> EncodedRequest:
        model, version = request.model or engine.model.name, request.version
        placed = self.shared_folder.place(request, engine)
        message = placed.message(model, is_raw=True, version=version)
        return EncodedRequest(INFER, metadata(request), message.SerializeToString())

    def decode(self, raw: RawResponse) -> Vectors:
        (message,) = unframed(raw.body)
        return self.shared_folder.read(
            read_message(inference.ModelInferResponse.FromString(message))
        )
