"""Encodes responses of POST /v2/…/infer: JSON, or JSON followed by the bytes of tensors.

A response is binary if its request says so. Its first chunk is then the whole JSON, whose length is
sent in a header.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import orjson

from embedserve.codec.float16_digits import shortest_float16_repr
from embedserve.codec.json_codec import CHUNK_VALUES, INLINE_VALUES_MAX
from embedserve.codec.open_inference.outputs import (
    OUTPUT_DATATYPES,
    OutputTensor,
    ResponseOptions,
    are_in_order,
    is_quick,
    parameters_of,
    prefix_key,
    response_options_of,
    tensors_of,
    write_to_shared_memory,
)
from embedserve.codec.open_inference.shared_memory_tensors import BYTE_SIZE, OFFSET, REGION
from embedserve.errors import EmbedServeError
from embedserve.lookup_types import EncodedResponse, LookupResult, ResponseChunks, with_size
from embedserve.shared_memory.region import MemorySlice


def try_encode_inline(result: LookupResult) -> EncodedResponse | None:
    """Encodes like encode_chunks, with the byte count; returns None where that would take long."""
    options = response_options_of(result)
    if options.is_binary and not options.others:
        return with_size([*_encode(result, options)]) if is_quick(result, options) else None
    if (
        result.values.size > INLINE_VALUES_MAX
        or result.extra_chunks
        or options.locations is not None
    ):
        return None
    chunks = [*_encode(result, options)]
    return with_size(chunks if json_bytes_of(chunks) else [b"".join(chunks)])


def encode_chunks(result: LookupResult) -> Iterator[bytes | memoryview]:
    """Yields the chunks of any response in order, each quick to encode. If values are in binary,
    the first chunk is the whole JSON."""
    options = response_options_of(result)
    yield from _encode(result, options)


def _encode(result: LookupResult, options: ResponseOptions) -> Iterator[bytes | memoryview]:
    head = _head(result, options)
    key = prefix_key("v2", result, options) if options.is_binary else None
    described = None if key is None else result.model.response_prefix_cache.get(key)
    tensors = None
    if described is None:
        tensors = tensors_of(result, options)
        write_to_shared_memory(tensors, result, options)
        if not any(_in_binary(one, options) for one in tensors):
            yield from _all_json(head, tensors, result, options)
            return
        described = _described(tensors, result, options)
        result.model.cache_response_prefix(key, described)
    yield head + described
    if are_in_order(result, options) and not options.others:
        for values in (result.values, *result.extra_chunks):
            yield values.data
        return
    for one in tensors or tensors_of(result, options):
        if _in_binary(one, options):
            for values in one.chunks(result):
                yield values.data


def _in_binary(tensor: OutputTensor, options: ResponseOptions) -> bool:
    return options.is_binary != (tensor.name in options.others)


def _head(result: LookupResult, options: ResponseOptions) -> bytes:
    """Returns all bytes before the outputs."""
    model = result.model
    start = model.response_prefix_cache.get(("v2 model",))
    if start is None:
        fields = {"model_name": model.name, "model_version": str(model.version)}
        start = orjson.dumps(fields)[:-1]
        model.cache_response_prefix(("v2 model",), start)
    if options.request_id:
        start += b',"id":' + orjson.dumps(options.request_id)
    parameters = parameters_of(result)
    if parameters:
        start += b',"parameters":' + orjson.dumps(parameters)
    head: bytes = start
    return head


def _start(tensor: OutputTensor, itemsize: int) -> bytes:
    """Returns the description of an output, without its values."""
    fields = {"name": tensor.name, "datatype": OUTPUT_DATATYPES[itemsize], "shape": tensor.shape}
    return orjson.dumps(fields)[:-1]


def _described(
    tensors: list[OutputTensor], result: LookupResult, options: ResponseOptions
) -> bytes:
    """Returns the outputs as JSON, with the values of those that are not binary."""
    itemsize = result.values.itemsize
    outputs = []
    for one in tensors:
        start = _start(one, itemsize)
        if _in_binary(one, options):
            size = one.nbytes(itemsize)
            outputs.append(b'%b,"parameters":{"binary_data_size":%d}}' % (start, size))
        elif (location := options.location(one.name)) is not None:
            outputs.append(start + _location_parameters(location, one.nbytes(itemsize)) + b"}")
        else:
            outputs.append(start + b"".join(_values(one, result)) + b"}")
    return b',"outputs":[' + b",".join(outputs) + b"]}"


def _all_json(
    head: bytes, tensors: list[OutputTensor], result: LookupResult, options: ResponseOptions
) -> Iterator[bytes]:
    itemsize = result.values.itemsize
    before = head + b',"outputs":['
    for at, one in enumerate(tensors):
        before += (b"," if at else b"") + _start(one, itemsize)
        location = options.location(one.name)
        if location is not None:
            before += _location_parameters(location, one.nbytes(itemsize)) + b"}"
            continue
        yield before
        yield from _values(one, result)
        before = b"}"
    yield before + b"]}"


def _location_parameters(location: MemorySlice, nbytes: int) -> bytes:
    """Returns the parameters of an output of ``nbytes`` that is in shared memory."""
    fields = {REGION: location.region.name, OFFSET: location.offset, BYTE_SIZE: nbytes}
    return b',"parameters":' + orjson.dumps(fields)


def _values(tensor: OutputTensor, result: LookupResult) -> Iterator[bytes]:
    before = b',"data":['
    for values in tensor.chunks(result):
        flat = values.reshape(-1)
        for start in range(0, flat.size, CHUNK_VALUES):
            some = flat[start : start + CHUNK_VALUES]
            if some.dtype == np.float16:
                some = shortest_float16_repr(some.reshape(1, -1)).reshape(-1)
            yield before + orjson.dumps(some, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
            before = b","
    yield b"]" if before == b"," else before + b"]"


def json_bytes_of(chunks: ResponseChunks) -> int:
    """Returns the bytes of the JSON of a response with binary values behind it; 0 for any other
    response.

    If there are several chunks, only a complete JSON makes the first end with a brace.
    """
    first = chunks[0]
    return len(first) if len(chunks) > 1 and first[-1:] == b"}" else 0


def is_infer_path(path: str) -> bool:
    """Returns whether ``path`` belongs to the protocol, whose errors have the format of
    encode_error."""
    return path == "/v2" or path.startswith("/v2/")


def encode_error(error: EmbedServeError) -> bytes:
    """Returns {"error": "…"}, the protocol's own format."""
    return orjson.dumps({"error": error.message})
