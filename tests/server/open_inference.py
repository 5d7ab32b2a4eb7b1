"""Requests of the Open Inference Protocol in each format, and the parsing of the responses."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from embedserve_proto import open_inference_pb2 as pb

DTYPES: Mapping[str, Any] = {"INT64": "<i8", "INT32": "<i4", "FP32": "<f4", "FP16": "<f2"}
CONTENTS = {
    "INT64": "int64_contents",
    "INT32": "int_contents",
    "FP32": "fp32_contents",
    "BYTES": "bytes_contents",
}
LENGTH_HEADER = "Inference-Header-Content-Length"


@dataclass(frozen=True)
class Input:
    """An input tensor; the ``values`` of BYTES are strings."""

    name: str
    datatype: str
    values: Any
    shape: Sequence[int] | None = None

    @property
    def flat(self) -> list[Any]:
        return [one for row in self.values for one in (row if isinstance(row, list) else [row])]

    @property
    def sizes(self) -> list[int]:
        if self.shape is not None:
            return list(self.shape)
        first = self.values[0] if self.values else None
        rows = [len(self.values)]
        return [*rows, len(first)] if isinstance(first, list) else rows

    @property
    def raw(self) -> bytes:
        if self.datatype == "BYTES":
            strings = [one.encode() for one in self.flat]
            return b"".join(len(one).to_bytes(4, "little") + one for one in strings)
        return np.array(self.flat, DTYPES[self.datatype]).tobytes()

    @property
    def head(self) -> dict[str, Any]:
        return {"name": self.name, "datatype": self.datatype, "shape": self.sizes}


def jagged(bags: Mapping[str, Sequence[Sequence[Any]]]) -> list[Input]:
    """Returns the inputs F.ids and F.lengths of each feature."""
    inputs = []
    for feature, of_feature in bags.items():
        ids = [one for bag in of_feature for one in bag]
        datatype = "BYTES" if ids and isinstance(ids[0], str) else "INT64"
        inputs.append(Input(f"{feature}.ids", datatype, ids))
        inputs.append(Input(f"{feature}.lengths", "INT32", [len(bag) for bag in of_feature]))
    return inputs


@dataclass(frozen=True)
class Place:
    """Location of a tensor in a region of shared memory: offset and size in bytes."""

    region: str
    offset: int
    nbytes: int

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters as Triton's clients send them, without an offset of 0."""
        at = {"shared_memory_offset": self.offset} if self.offset else {}
        return {"shared_memory_region": self.region, "shared_memory_byte_size": self.nbytes} | at


@dataclass(frozen=True)
class InferRequest:
    """A request, independent of its format.

    Attributes:
        ins: locations of the inputs that are in shared memory, by position.
        outs: locations for the outputs that are to be in shared memory, by name.
    """

    inputs: Sequence[Input]
    outputs: Sequence[str] = ()
    request_id: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    ins: Mapping[int, Place] = field(default_factory=dict)
    outs: Mapping[str, Place] = field(default_factory=dict)

    def json_body(self) -> bytes:
        inputs = [{"data": one.values} for one in self.inputs]
        return self._dumped(inputs, {"binary_data_output": False} if self.outs else {})

    def binary_body(self) -> tuple[bytes, dict[str, str]]:
        """Returns (body, headers) of a request for a binary response."""
        inputs = [{"parameters": {"binary_data_size": len(one.raw)}} for one in self.inputs]
        head = self._dumped(inputs, {"binary_data_output": True})
        in_body = [one.raw for at, one in enumerate(self.inputs) if at not in self.ins]
        return head + b"".join(in_body), {LENGTH_HEADER: str(len(head))}

    def _dumped(self, contents: Iterable[dict[str, Any]], parameters: dict[str, Any]) -> bytes:
        inputs = [
            one.head | ({"parameters": self.ins[at].parameters} if at in self.ins else content)
            for at, (one, content) in enumerate(zip(self.inputs, contents, strict=True))
        ]
        body: dict[str, Any] = {"inputs": inputs, "parameters": parameters | dict(self.parameters)}
        places = {
            name: {"parameters": place.parameters | {"binary_data": False}}
            for name, place in self.outs.items()
        }
        if self.outputs:
            body["outputs"] = [{"name": name} | places.get(name, {}) for name in self.outputs]
        if self.request_id:
            body["id"] = self.request_id
        return json.dumps(body).encode()

    def message(self, model: str, *, is_raw: bool, version: str = "") -> pb.ModelInferRequest:
        request = pb.ModelInferRequest(model_name=model, model_version=version, id=self.request_id)
        for at, one in enumerate(self.inputs):
            message = request.inputs.add(name=one.name, datatype=one.datatype, shape=one.sizes)
            if at in self.ins:
                set_parameters(message.parameters, self.ins[at].parameters)
            elif is_raw:
                request.raw_input_contents.append(one.raw)
            else:
                values = [v.encode() if isinstance(v, str) else v for v in one.flat]
                getattr(message.contents, CONTENTS[one.datatype]).extend(values)
        for name in self.outputs:
            output = request.outputs.add(name=name)
            if name in self.outs:
                set_parameters(output.parameters, self.outs[name].parameters)
        set_parameters(request.parameters, self.parameters)
        return request


def set_parameters(parameters: Any, values: Mapping[str, str | int]) -> None:
    """Adds ``values`` to the parameters of a message or of a tensor."""
    for name, value in values.items():
        kind = "string_param" if isinstance(value, str) else "int64_param"
        setattr(parameters[name], kind, value)


def values_of(parameters: Mapping[str, pb.InferParameter]) -> dict[str, Any]:
    return {
        name: getattr(one, one.WhichOneof("parameter_choice") or "")
        for name, one in parameters.items()
    }


@dataclass(frozen=True)
class InferResponse:
    """A response, independent of its format.

    Attributes:
        shared: (datatype, shape, parameters) of each output in shared memory, by name.
    """

    model: str
    version: str
    request_id: str
    parameters: dict[str, Any]
    outputs: dict[str, np.ndarray]
    shared: dict[str, tuple[str, list[int], dict[str, Any]]]


def read_body(body: bytes, head_bytes: str | None) -> InferResponse:
    """Returns a REST response; ``head_bytes`` is the value of its header."""
    end = len(body) if head_bytes is None else int(head_bytes)
    parsed, rest = json.loads(body[:end]), body[end:]
    outputs, shared = {}, {}
    for one in parsed["outputs"]:
        dtype, place = np.dtype(DTYPES[one["datatype"]]), one.get("parameters", {})
        if "shared_memory_region" in place:
            assert "data" not in one
            shared[one["name"]] = one["datatype"], one["shape"], place
            continue
        if (size := place.get("binary_data_size")) is None:
            values = np.array([np.inf if v is None else v for v in one["data"]]).astype(dtype)
        else:
            values, rest = np.frombuffer(rest[:size], dtype), rest[size:]
        outputs[one["name"]] = values.reshape(one["shape"])
    assert rest == b""
    return InferResponse(
        parsed["model_name"],
        parsed["model_version"],
        parsed.get("id", ""),
        parsed.get("parameters", {}),
        outputs,
        shared,
    )


def read_message(message: pb.ModelInferResponse) -> InferResponse:
    outputs, shared = {}, {}
    for one, raw in zip(message.outputs, message.raw_output_contents, strict=True):
        if one.parameters:
            assert raw == b""
            shared[one.name] = one.datatype, list(one.shape), values_of(one.parameters)
        else:
            values = np.frombuffer(raw, DTYPES[one.datatype])
            outputs[one.name] = values.reshape(list(one.shape))
    named = message.model_name, message.model_version, message.id, values_of(message.parameters)
    return InferResponse(*named, outputs, shared)
