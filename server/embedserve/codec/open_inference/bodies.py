"""Bodies of POST /v2/…/infer: JSON, or JSON with the bytes of tensors behind it.

Where a header says how long the JSON is, what follows are the tensors that have a
`binary_data_size`, in their order; those that are alike but for their numbers are read by
known_bodies.py.
"""

from __future__ import annotations

from array import array
from codecs import getincrementaldecoder
from typing import Annotated, Any

import msgspec
import numpy as np

from embedserve.codec.json_codec import NOW_BYTES_MAX, check_cost
from embedserve.codec.open_inference import shared_memory_template
from embedserve.codec.open_inference.answers import (
    set_output,
    set_output_dtype,
)
from embedserve.codec.open_inference.json_template import forms
from embedserve.codec.open_inference.shared_memory_tensors import PlacedTensor, find_place
from embedserve.codec.open_inference.strings import read_strings
from embedserve.codec.open_inference.tensors import (
    BYTES,
    DTYPES,
    Data,
    count,
    wrong,
)
from embedserve.codec.open_inference.tensors import (
    InputTensor as Input,
)
from embedserve.config import Limits
from embedserve.errors import EmbedServeError, InvalidRequestError, RequestTooLargeError
from embedserve.lookup import LookupRequest
from embedserve.shared_memory.memory_slice import MemorySlice
from embedserve.shared_memory.region import Regions

_Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _Placed(msgspec.Struct, gc=False):
    shared_memory_region: str | None = None
    shared_memory_byte_size: _Size | None = None
    shared_memory_offset: _Size = 0


class _InputParameters(_Placed, gc=False):
    binary_data_size: _Size | None = None


class _Input(msgspec.Struct, gc=False):
    name: str
    datatype: str
    shape: list[_Size]
    data: list[list[int | float | str] | int | float | str] | None = None
    parameters: _InputParameters | None = None


class _OutputParameters(_Placed, gc=False):
    binary_data: bool | None = None
    classification: int = 0


class _Output(msgspec.Struct, gc=False):
    name: str
    parameters: _OutputParameters | None = None


class _Parameters(msgspec.Struct, gc=False):
    binary_data_output: bool = False
    output_dtype: str | None = None


class _InferBody(msgspec.Struct, gc=False):
    inputs: list[_Input]
    outputs: list[_Output] = []
    parameters: _Parameters | None = None
    id: str = ""


class _Sized(msgspec.Struct, gc=False):
    name: str
    shape: list[_Size]


class _Sizes(msgspec.Struct, gc=False):
    inputs: list[_Sized]


_DECODER = msgspec.json.Decoder(_InferBody)
_SIZES_DECODER = msgspec.json.Decoder(_Sizes)
COUNTED_INPUTS_MAX = 4096
UTF8_BYTES = 64 << 10
"""Decoded at a time, to see whether JSON is UTF-8."""
_ARRAY_CODES = {"INT64": "q", "INT32": "i", "FP32": "d"}


def try_decode_inline(
    body: bytes,
    model: str,
    limits: Limits,
    json_bytes: int | None = None,
    regions: Regions | None = None,
) -> LookupRequest | None:
    """As decode_request, or None where that would take long: of numbers in binary it never does."""
    if (len(body) if json_bytes is None else json_bytes) > NOW_BYTES_MAX:
        return None
    return _decode(body, model, limits, json_bytes, regions, is_now=True)


def decode_request(
    body: bytes,
    model: str,
    limits: Limits,
    json_bytes: int | None = None,
    regions: Regions | None = None,
) -> LookupRequest:
    """The request in ``body``, to ``model``.

    Args:
        json_bytes: of the JSON that ``body`` begins with; None: all of it.
        regions: of shared memory that the caller has; None: the server has none.

    Raises:
        InvalidRequestError: it is no request of the protocol, or not a batch of jagged ids.
        RequestTooLargeError: it has more than ``limits`` allow, told before it is read.
    """
    request = _decode(body, model, limits, json_bytes, regions, is_now=False)
    assert request is not None  # it may take long
    return request


def estimate_size(body: bytes, json_bytes: int | None = None) -> tuple[int, int]:
    """(bags, ids) that the shapes of a request say; (0, 0) of what is none, or has over
    COUNTED_INPUTS_MAX inputs. Values are passed over."""
    head = body if json_bytes is None else body[:json_bytes]
    if head.count(b"shape") > COUNTED_INPUTS_MAX:
        return 0, 0
    try:
        inputs = _SIZES_DECODER.decode(head).inputs
    except (msgspec.DecodeError, RecursionError, ValueError):
        return 0, 0
    bags, ids = count([(one.name, one.shape) for one in inputs])
    return min(bags, len(body)), min(ids, len(body))


def _decode(
    body: bytes,
    model: str,
    limits: Limits,
    json_bytes: int | None,
    regions: Regions | None,
    *,
    is_now: bool,
) -> LookupRequest | None:
    """None where it is to be done now, and strings or shared memory would take long."""
    if json_bytes is not None:
        known = forms.read(body, json_bytes, model, limits)
        if known is not None:
            return known
    if regions and json_bytes in (None, len(body)):
        of_placed = shared_memory_template.forms.find(body, limits)
        if of_placed is not None:
            if is_now and not of_placed.is_quick:
                return None
            known = of_placed.read_known(regions, model)
            if known is not None:
                return known
    head, rest = _cut(body, json_bytes, limits)
    if len(head) > limits.request_values_max:  # else it cannot hold so many
        check_cost(head, limits)
    try:
        _check_utf8(head)
        parsed = _DECODER.decode(head)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise _problem(error) from error
    tensors = _tensors(parsed.inputs, rest, limits, regions, is_now=is_now)
    if tensors is None:
        return None
    read = shared_memory_template.read_request(model, *tensors, regions, limits, is_now=is_now)
    if read is None:
        return None
    request, of_placed = read
    parameters = parsed.parameters or _Parameters()
    is_binary = parameters.binary_data_output
    if parsed.outputs:
        names = [one.name for one in parsed.outputs]
        are_binary = [_is_binary(one, is_binary) for one in parsed.outputs]
        places = _places(parsed.outputs, regions)
        set_output(request, parsed.id, names, are_binary, is_binary, limits, places)
    else:
        set_output(request, parsed.id, (), (), is_binary, limits)
    set_output_dtype(request, parameters.output_dtype)
    if len(rest) and not parsed.id and _is_plain(parsed, request):
        forms.remember(head, request, lambda marked: _sizes_of_same(marked, parsed))
    if of_placed is not None and not parsed.id:
        shared_memory_template.forms.remember(head, of_placed, request)
    return request


def _is_plain(parsed: _InferBody, request: LookupRequest) -> bool:
    """Whether its inputs are F.ids and then F.lengths of each feature, integers in binary, and
    nothing lies in shared memory, which is its caller's alone."""
    names = [f"{name}.{part}" for name in request.features for part in ("ids", "lengths")]
    told: list[_Placed | None] = [one.parameters for one in parsed.inputs]
    told += [one.parameters for one in parsed.outputs]
    is_other = bool(request.string_features) or any(map(_is_placed, filter(None, told)))
    are_binary = all(one.data is None for one in parsed.inputs)
    return are_binary and not is_other and [one.name for one in parsed.inputs] == names


def _is_placed(told: _Placed) -> bool:
    """Whether a tensor that is ``told`` so is to lie in shared memory."""
    return told.shared_memory_region is not None or told.shared_memory_byte_size is not None


def _place(tensor: Input | str, told: _Placed, regions: Regions | None) -> MemorySlice:
    region, byte_size = told.shared_memory_region, told.shared_memory_byte_size
    return find_place(tensor, region, byte_size, told.shared_memory_offset, regions)


def _places(outputs: list[_Output], regions: Regions | None) -> dict[str, MemorySlice] | None:
    """Of those that are to lie in shared memory."""
    told = [(one.name, one.parameters) for one in outputs if one.parameters is not None]
    return {name: _place(name, one, regions) for name, one in told if _is_placed(one)} or None


def _sizes_of_same(head: bytes, parsed: _InferBody) -> list[tuple[int, int]] | None:
    """(elements, bytes) of each input that ``head`` says; None where it is not ``parsed`` but for
    these."""
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
    """Raises UnicodeDecodeError where JSON is not UTF-8 (RFC 8259, section 8.1): msgspec looks at
    the strings that it keeps alone."""
    if head.isascii():
        return
    decoder = getincrementaldecoder("utf-8")()
    for start in range(0, len(head), UTF8_BYTES):  # no copy of all of it
        decoder.decode(head[start : start + UTF8_BYTES])
    decoder.decode(b"", final=True)


def _problem(error: Exception) -> EmbedServeError:
    """For the caller to raise: an error that a name of its frame holds is a circle."""
    return InvalidRequestError(f"body is not an inference request: {error}", "body")


def _cut(body: bytes, json_bytes: int | None, limits: Limits) -> tuple[bytes, memoryview]:
    if json_bytes is None:
        return body, memoryview(b"")
    if json_bytes > len(body):
        raise InvalidRequestError(
            f"Inference-Header-Content-Length is {json_bytes}, but the body has {len(body)} bytes",
            "Inference-Header-Content-Length",
        )
    if json_bytes > limits.request_text_bytes_max:
        raise RequestTooLargeError(
            f"body has {json_bytes} bytes of JSON, {limits.said('request_text_bytes_max')}", "body"
        )
    return body[:json_bytes], memoryview(body)[json_bytes:]


def _tensors(
    inputs: list[_Input],
    rest: memoryview,
    limits: Limits,
    regions: Regions | None,
    *,
    is_now: bool,
) -> tuple[list[Input], list[PlacedTensor]] | None:
    """(all inputs, those that lie in shared memory, which have no data yet); None as _decode."""
    tensors, position = [], 0
    text_bytes = 0
    placed: list[PlacedTensor] = []
    for one in inputs:
        tensor = Input(one.name, one.datatype, one.shape, b"")
        told = one.parameters
        size = None if told is None else told.binary_data_size
        if told is not None and _is_placed(told):
            if one.data is not None or size is not None:
                raise wrong(tensor, "has data, and is to lie in shared memory: send one")
            placed.append((tensor, _place(tensor, told, regions)))
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
                if is_now and text_bytes > NOW_BYTES_MAX:
                    return None
                _check_text(text_bytes, limits)
                count_max, limit = limits.request_values_max, limits.said("request_values_max")
                tensor.data = read_strings(tensor, rest[end - size : end], count_max, limit)
        tensors.append(tensor)
    if position != len(rest):
        raise InvalidRequestError(
            f"body has {len(rest)} bytes behind its JSON, but the binary_data_size of all inputs "
            f"add up to {position}",
            "body",
        )
    return tensors, placed


def _check_text(nbytes: int, limits: Limits) -> None:
    if nbytes > limits.request_text_bytes_max:
        raise RequestTooLargeError(
            f"inputs has {nbytes} bytes of strings, {limits.said('request_text_bytes_max')}",
            "inputs",
        )


def _from_json(tensor: Input, data: list[Any] | None) -> Data:
    """The values of an input as its datatype has them, flat or as nested as its shape."""
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
        return np.zeros(0, np.int64)  # what such a datatype is refused for is said with the others
    try:
        numbers = array(code, data)
    except (TypeError, OverflowError):
        numbers = None
    if numbers is None:
        raise _wrong_value(tensor, data)
    values = np.frombuffer(numbers, code)
    if tensor.datatype != "FP32":
        return values.astype(DTYPES[tensor.datatype], copy=False).tobytes()
    with np.errstate(over="ignore"):  # infinite weights are refused with the others
        return values.astype(DTYPES[tensor.datatype], copy=False)


def _wrong_value(tensor: Input, data: list[Any]) -> InvalidRequestError:
    """Which of its values is not of its datatype."""
    for at, value in enumerate(data):
        try:
            if tensor.datatype == BYTES:
                if type(value) is str:
                    continue
            else:
                array(_ARRAY_CODES[tensor.datatype], [value])
                continue
        except (TypeError, OverflowError):
            pass
        said = "a list" if type(value) is list else repr(value)[:64]
        return wrong(tensor, f"has {said} at {at}, which is not {tensor.datatype}")
    raise AssertionError("a value is wrong, but none of them")


def _is_binary(output: _Output, is_binary: bool) -> bool:
    parameters = output.parameters
    if parameters is None:
        return is_binary
    if parameters.classification:
        raise InvalidRequestError(
            f"outputs: {output.name[:200]!r} asks for a classification, which there is none of",
            "outputs",
        )
    if _is_placed(parameters):
        return False
    return is_binary if parameters.binary_data is None else parameters.binary_data
