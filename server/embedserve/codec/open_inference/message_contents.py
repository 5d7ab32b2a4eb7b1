"""Values of an input in a ModelInferRequest: raw bytes, typed fields, or extracted fields."""

from __future__ import annotations

from math import prod

import numpy as np

from embedserve.codec.open_inference.strings import read_strings, text_of
from embedserve.codec.open_inference.tensors import BYTES, DTYPES, InputTensor, TensorData, wrong
from embedserve.codec.protobuf_fields import I32, VARINT, count_varints, field_tag, read_varints
from embedserve.config import Limits
from embedserve.errors import RequestTooLargeError
from embedserve_proto import open_inference_pb2 as pb

CONTENTS = {
    "INT64": "int64_contents",
    "INT32": "int_contents",
    "FP32": "fp32_contents",
    BYTES: "bytes_contents",
}
"""The field of InferTensorContents with an input's values, by its datatype."""
CONTENTS_TAGS = {field_tag(pb.InferTensorContents, field): field for field in CONTENTS.values()} | {
    # not packed, each number in a field of its own: parsers accept both
    field_tag(pb.InferTensorContents, "int64_contents", VARINT): "int64_contents",
    field_tag(pb.InferTensorContents, "int_contents", VARINT): "int_contents",
    field_tag(pb.InferTensorContents, "fp32_contents", I32): "fp32_contents",
}
Contents = dict[str, list[memoryview]]


def raw_strings(tensor: InputTensor, raw: bytes | memoryview, limits: Limits) -> list[str]:
    if len(raw) > limits.request_text_bytes_max:
        raise RequestTooLargeError(
            f"{tensor} has {len(raw)} bytes, {limits.describe('request_text_bytes_max')}", "inputs"
        )
    return read_strings(tensor, memoryview(raw), limits)


def from_message(tensor: InputTensor, message: pb.ModelInferRequest.InferInputTensor) -> TensorData:
    """Returns the values of an input that the protobuf library has parsed."""
    field = CONTENTS.get(tensor.datatype)
    if field is None:
        return b""  # tensors.py rejects an unsupported datatype
    values = getattr(message.contents, field)[:]
    _check_field(tensor, field, len(values))
    if tensor.datatype == BYTES:
        return [text_of(tensor, at, one) for at, one in enumerate(values)]
    return np.array(values, DTYPES[tensor.datatype])


def from_contents(tensor: InputTensor, contents: Contents, limits: Limits) -> TensorData:
    """Returns the values of an input whose contents were located in the message's bytes."""
    field = CONTENTS.get(tensor.datatype)
    if field is None:
        return b""
    values = contents.get(field, [])
    if tensor.datatype == BYTES:
        _check_field(tensor, field, len(values))
        return [text_of(tensor, at, bytes(one)) for at, one in enumerate(values)]
    joined = b"".join(values)
    if tensor.datatype == "FP32":
        return joined
    count = count_varints(joined)
    if count > limits.request_ids_max:
        raise RequestTooLargeError(
            f"{tensor} has {count} values, {limits.describe('request_ids_max')}", "inputs"
        )
    _check_field(tensor, field, count)
    try:
        return read_varints(joined).astype(DTYPES[tensor.datatype], copy=False)
    except ValueError as error:
        raise wrong(tensor, f"is not packed integers: {error}") from error


def _check_field(tensor: InputTensor, field: str, count: int) -> None:
    if len(tensor.shape) > 2:
        return  # tensors.py rejects such a shape
    expected = prod(tensor.shape)
    if count != expected:
        raise wrong(tensor, f"has {count} values in {field}, not {expected}")
