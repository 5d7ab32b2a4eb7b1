"""Decodes bodies of POST /v2/…/infer: JSON, or JSON followed by the bytes of tensors.

If a header has the length of the JSON, the tensors with a `binary_data_size` follow it, in their
order. json_template.py reads bodies that differ from an earlier body only in their numbers.
"""

from __future__ import annotations

from array import array
from codecs import getincrementaldecoder
from typing import Any

import msgspec
import numpy as np

from embedserve.codec.json_codec import INLINE_JSON_BYTES_MAX, check_cost
from embedserve.codec.open_inference.body_structs import (
    InferBody,
    Input,
    Output,
    Parameters,
    SharedMemoryParameters,
    Sizes,
)
from embedserve.codec.open_inference.json_template import JsonTemplateCache
from embedserve.codec.open_inference.message_template import INLINE_JAGGED_BYTES_MAX
from embedserve.codec.open_inference.outputs import (
    MIN_SEQ,
    classification_error,
    set_output,
    set_output_dtype,
)
from embedserve.codec.open_inference.shared_memory_template import (
    SharedMemoryTemplateCache,
    read_request,
)
from embedserve.codec.open_inference.shared_memory_tensors import LocatedTensor, find_location
from embedserve.codec.open_inference.strings import read_strings
from embedserve.codec.open_inference.tensors import (
    BYTES,
    DTYPES,
    InputTensor,
    TensorData,
    count_bags_and_ids,
    wrong,
)
from embedserve.config import Limits
from embedserve.errors import InvalidRequestError, RequestTooLargeError
from embedserve.lookup_types import LookupRequest, WouldBlockError
from embedserve.request_checks import check_min_seq
from embedserve.shared_memory.region import MemorySlice, Regions

_DECODER = msgspec.json.Decoder(InferBody)
_SIZES_DECODER = msgspec.json.Decoder(Sizes)
COUNTED_INPUTS_MAX = 4096
"""Inputs of a request up to which its size is estimated."""
UTF8_BYTES = 64 << 10
"""Bytes that are decoded at a time to check whether JSON is UTF-8."""
_ARRAY_CODES = {"INT64": "q", "INT32": "i", "FP32": "d"}


class BodyDecoder:
    """Decodes the protocol's bodies of REST. It caches templates of their JSON."""

    def __init__(self) -> None:
        self.templates = JsonTemplateCache()
        self.shared_memory_templates = SharedMemoryTemplateCache()

    def decode_request(
        self,
        body: bytes,
        model: str,
        limits: Limits,
        json_bytes: int | None = None,
        regions: Regions | None = None,
        *,
        is_inline: bool = False,
    ) -> LookupRequest:
        """Returns the request in ``body``, addressed to ``model``.

        Args:
            json_bytes: bytes of the JSON at the start of ``body``; None if all of it is JSON.
            regions: shared-memory regions of the caller; None if the server has no shared memory.

        Raises:
            InvalidRequestError: the body is not a request of the protocol, or not a batch of jagged
                ids.
            RequestTooLargeError: the body has more than ``limits`` allow. Raised before it is
                decoded.
            WouldBlockError: ``is_inline``, and it would take long.
        """
        if is_inline:
            head_bytes = len(body) if json_bytes is None else json_bytes
            if head_bytes > INLINE_JSON_BYTES_MAX or len(body) > INLINE_JAGGED_BYTES_MAX:
                raise WouldBlockError
            if json_bytes is not None:
                cached = self.templates.read(body, json_bytes, model, limits)
                if cached is not None:
                    return cached
        if regions and json_bytes in (None, len(body)):
            cached = self.shared_memory_templates.read(
                body, regions, limits, model, is_inline=is_inline
            )
            if cached is not None:
                return cached
        head, rest = _split_body(body, json_bytes, limits)
        if len(head) > limits.request_values_max:  # a shorter JSON cannot hold that many values
            check_cost(head, limits)
        try:
            _check_utf8(head)
            parsed = _DECODER.decode(head)
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            # No local variable holds the new error, as in json_codec.py.
            problem = f"body is not an inference request: {error}"
            raise InvalidRequestError(problem, "body") from error
        tensors = _tensors(parsed.inputs, rest, limits, regions, is_inline=is_inline)
        request, template = read_request(model, *tensors, regions, limits, is_inline=is_inline)
        parameters = parsed.parameters or Parameters()
        is_binary = parameters.binary_data_output
        names = [one.name for one in parsed.outputs]
        are_binary = [_is_binary(one, is_binary) for one in parsed.outputs]
        locations = _locations(parsed.outputs, regions)
        set_output(request, parsed.id, names, are_binary, is_binary, limits, locations)
        set_output_dtype(request, parameters.output_dtype)
        if parameters.min_seq is not None:
            request.min_seq = check_min_seq(MIN_SEQ, parameters.min_seq)
        if parsed.id or request.min_seq is not None:  # these differ from request to request
            return request
        if is_inline and len(rest) and _is_plain(parsed, request):
            self.templates.cache_template(
                head, request, lambda marked: _sizes_of_same(marked, parsed)
            )
        if template is not None:
            self.shared_memory_templates.cache_template(head, template, request)
        return request


def estimate_size(body: bytes, json_bytes: int | None = None) -> tuple[int, int]:
    """Returns (bags, ids) according to the shapes in a request, without decoding values. Returns
    (0, 0) for an invalid request, and for more than COUNTED_INPUTS_MAX inputs."""
    head = body if json_bytes is None else body[:json_bytes]
    if head.count(b"shape") > COUNTED_INPUTS_MAX:
        return 0, 0
    try:
        inputs = _SIZES_DECODER.decode(head).inputs
    except (msgspec.DecodeError, RecursionError, ValueError):
        return 0, 0
    bags, ids = count_bags_and_ids([(one.name, one.shape) for one in inputs])
    return min(bags, len(body)), min(ids, len(body))


def _is_plain(parsed: InferBody, request: LookupRequest) -> bool:
    """Returns whether the inputs are F.ids and then F.lengths of each feature, integers in binary.
    No tensor may be in shared memory, which belongs to a single caller."""
    names = [f"{name}.{role}" for name in request.features for role in ("ids", "lengths")]
    parameters: list[SharedMemoryParameters | None] = [one.parameters for one in parsed.inputs]
    parameters += [one.parameters for one in parsed.outputs]
    is_other = bool(request.string_features) or any(
        map(_is_in_shared_memory, filter(None, parameters))
    )
    are_binary = all(one.data is None for one in parsed.inputs)
    return are_binary and not is_other and [one.name for one in parsed.inputs] == names


def _is_in_shared_memory(parameters: SharedMemoryParameters) -> bool:
    """Returns whether a tensor with these parameters is in shared memory."""
    return (
        parameters.shared_memory_region is not None
        or parameters.shared_memory_byte_size is not None
    )


def _location(
    tensor: InputTensor | str, parameters: SharedMemoryParameters, regions: Regions | None
) -> MemorySlice:
    region, byte_size = parameters.shared_memory_region, parameters.shared_memory_byte_size
    return find_location(tensor, region, byte_size, parameters.shared_memory_offset, regions)


def _locations(outputs: list[Output], regions: Regions | None) -> dict[str, MemorySlice] | None:
    """Returns the locations of the outputs that are requested in shared memory, by name."""
    parameters = [(one.name, one.parameters) for one in outputs if one.parameters is not None]
    return {
        name: _location(name, one, regions) for name, one in parameters if _is_in_shared_memory(one)
    } or None


def _sizes_of_same(head: bytes, parsed: InferBody) -> list[tuple[int, int]] | None:
    """Returns (elements, bytes) of each input in ``head``; None where it differs from ``parsed`` in
    anything else."""
    try:
        other = _DECODER.decode(head)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None
    sizes = []
    for one, was in zip(other.inputs, parsed.inputs, strict=False):
        if one.parameters is None or was.parameters is None or len(one.shape) != 1:
            return None
        sizes.append((one.shape[0], one.parameters.binary_data_size or 0))
        one.shape, one.parameters = was.shape, was.parameters
    return sizes if other == parsed else None


def _check_utf8(head: bytes) -> None:
    """Raises UnicodeDecodeError where JSON is not UTF-8 (RFC 8259, section 8.1). msgspec validates
    only the strings that it keeps."""
    if head.isascii():
        return
    decoder = getincrementaldecoder("utf-8")()
    for start in range(0, len(head), UTF8_BYTES):  # avoids a copy of all of it
        decoder.decode(head[start : start + UTF8_BYTES])
    decoder.decode(b"", final=True)


def _split_body(body: bytes, json_bytes: int | None, limits: Limits) -> tuple[bytes, memoryview]:
    """Returns (the JSON, the bytes of the tensors behind it)."""
    if json_bytes is None:
        return body, memoryview(b"")
    if json_bytes > len(body):
        raise InvalidRequestError(
            f"Inference-Header-Content-Length is {json_bytes}, but the body has {len(body)} bytes",
            "Inference-Header-Content-Length",
        )
    if json_bytes > limits.request_text_bytes_max:
        raise RequestTooLargeError(
            f"body has {json_bytes} bytes of JSON, {limits.describe('request_text_bytes_max')}",
            "body",
        )
    return body[:json_bytes], memoryview(body)[json_bytes:]


def _tensors(
    inputs: list[Input],
    rest: memoryview,
    limits: Limits,
    regions: Regions | None,
    *,
    is_inline: bool,
) -> tuple[list[InputTensor], list[LocatedTensor]]:
    """Returns (all inputs, the inputs in shared memory, which have no data yet)."""
    tensors, position = [], 0
    text_bytes = 0
    located: list[LocatedTensor] = []
    for one in inputs:
        tensor = InputTensor(one.name, one.datatype, one.shape, b"")
        parameters = one.parameters
        size = None if parameters is None else parameters.binary_data_size
        if parameters is not None and _is_in_shared_memory(parameters):
            if one.data is not None or size is not None:
                raise wrong(tensor, "has both data and a region of shared memory: send one")
            located.append((tensor, _location(tensor, parameters, regions)))
        elif size is None:
            tensor.data = _from_json(tensor, one.data)
        elif one.data is not None:
            raise wrong(tensor, "has data and a binary_data_size: send one")
        else:
            end = position + size
            if end > len(rest):
                raise wrong(
                    tensor,
                    f"has a binary_data_size of {size}, but of the {len(rest)} bytes behind the "
                    f"JSON {len(rest) - position} are left",
                )
            tensor.data = rest[position:end]
            position = end
            if one.datatype == BYTES:
                text_bytes += size
                if is_inline and text_bytes > INLINE_JSON_BYTES_MAX:
                    raise WouldBlockError
                _check_text(text_bytes, limits)
                tensor.data = read_strings(tensor, rest[end - size : end], limits)
        tensors.append(tensor)
    if position != len(rest):
        raise InvalidRequestError(
            f"body has {len(rest)} bytes behind its JSON, but the binary_data_size of all inputs "
            f"add up to {position}",
            "body",
        )
    return tensors, located


def _check_text(nbytes: int, limits: Limits) -> None:
    if nbytes > limits.request_text_bytes_max:
        raise RequestTooLargeError(
            f"inputs has {nbytes} bytes of strings, {limits.describe('request_text_bytes_max')}",
            "inputs",
        )


def _from_json(tensor: InputTensor, data: list[Any] | None) -> TensorData:
    """Returns the values of an input in its datatype. They are flat, or nested like its shape."""
    if data is None:
        raise wrong(tensor, "has neither data nor a binary_data_size")
    if len(tensor.shape) == 2 and data and type(data[0]) is list:
        width = tensor.shape[1]
        if any(type(row) is not list or len(row) != width for row in data):
            raise wrong(tensor, f"has data with rows that are not of {width} values")
        data = [value for row in data for value in row]
    if tensor.datatype == BYTES:
        if set(map(type, data)) - {str}:
            raise _wrong_value(tensor, data)
        return data
    code = _ARRAY_CODES.get(tensor.datatype)
    if code is None:
        return np.zeros(0, np.int64)  # tensors.py rejects an unsupported datatype
    try:
        values = np.frombuffer(array(code, data), code)
    except (TypeError, OverflowError) as error:
        raise _wrong_value(tensor, data) from error
    with np.errstate(over="ignore"):  # infinite weights are rejected later
        return values.astype(DTYPES[tensor.datatype], copy=False).tobytes()


def _wrong_value(tensor: InputTensor, data: list[Any]) -> InvalidRequestError:
    """Returns the error for the first value that does not have the tensor's datatype."""
    at, value = next(
        (at, value) for at, value in enumerate(data) if not _has_datatype(value, tensor.datatype)
    )
    shown = "a list" if type(value) is list else repr(value)[:64]
    return wrong(tensor, f"has {shown} at {at}, which is not {tensor.datatype}")


def _has_datatype(value: Any, datatype: str) -> bool:
    if datatype == BYTES:
        return type(value) is str
    try:
        array(_ARRAY_CODES[datatype], [value])
    except (TypeError, OverflowError):
        return False
    return True


def _is_binary(output: Output, is_binary: bool) -> bool:
    parameters = output.parameters
    if parameters is None:
        return is_binary
    if parameters.classification:
        raise classification_error(output.name)
    if _is_in_shared_memory(parameters):
        return False
    return is_binary if parameters.binary_data is None else parameters.binary_data
