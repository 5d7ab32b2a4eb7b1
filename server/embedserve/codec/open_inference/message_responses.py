"""Encodes responses of ModelInfer at the byte level, as a sequence of fields.

The parts that all responses of the same size share are encoded once, and cached with their model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from embedserve.codec.open_inference.outputs import (
    OUTPUT_DATATYPES,
    OutputTensor,
    ResponseOptions,
    is_quick,
    parameters_of,
    prefix_key,
    response_options_of,
    tensors_of,
    write_to_shared_memory,
)
from embedserve.codec.open_inference.shared_memory_tensors import BYTE_SIZE, OFFSET, REGION
from embedserve.codec.protobuf_fields import field_tag, varint
from embedserve.errors import EmbedServeError
from embedserve.lookup_types import EncodedResponse, LookupResult, with_size
from embedserve.shared_memory.region import MemorySlice
from embedserve_proto import open_inference_pb2 as pb

_OutputMessage = pb.ModelInferResponse.InferOutputTensor
JOIN_BYTES_MAX = 64 << 10
"""Bytes of a response that is joined into one chunk: a response this small would be joined anyway
to be written."""
ID_TAG = bytes([field_tag(pb.ModelInferResponse, "id")])
RAW_OUTPUT_TAG = bytes([field_tag(pb.ModelInferResponse, "raw_output_contents")])
STREAMED_TAG = bytes([field_tag(pb.ModelStreamInferResponse, "infer_response")])


def try_encode_inline(result: LookupResult) -> EncodedResponse | None:
    """Returns (the chunks of a ModelInferResponse, their byte count), or None where encoding would
    take long."""
    options = response_options_of(result)
    if not is_quick(result, options):
        return None
    values = result.values
    is_one = result.lengths is None and len(values) == 1 and not result.extra_chunks
    if is_one and not options.has_pooled:
        # The most common response: the vectors of a key are contiguous, and are not copied twice.
        chunks: list[bytes | memoryview] = [_head(result, options)]
        described, starts, _ = _described_once(result, options)
        chunks.append(described)
        octets, end, itemsize = memoryview(values.data).cast("B"), 0, values.itemsize
        for start, dim in zip(starts, result.model.length_per_key, strict=True):
            begin, end = end, end + dim * itemsize
            chunks += start, octets[begin:end]
    else:
        chunks = [*encode_chunks(result)]
    if (nbytes := with_size(chunks)[1]) <= JOIN_BYTES_MAX:
        return (b"".join(chunks),), nbytes
    return chunks, nbytes


def encode_chunks(result: LookupResult) -> Iterator[bytes | memoryview]:
    """Yields the chunks of any response in order, each quick to encode."""
    options = response_options_of(result)
    described, starts, tensors = _described_once(result, options)
    write_to_shared_memory(tensors, result, options)
    yield _head(result, options) + described
    located = options.locations or ()
    for start, one in zip(starts, tensors, strict=True):
        yield start
        if one.name in located:
            continue
        for values in one.chunks(result):
            yield values.data


def _described_once(
    result: LookupResult, options: ResponseOptions
) -> tuple[bytes, list[bytes], list[OutputTensor]]:
    """Returns (the outputs without their values, the bytes before the values of each, the outputs).
    They are cached with the model where possible."""
    key = prefix_key("v2 grpc", result, options)
    made = None if key is None else result.model.response_prefix_cache.get(key)
    if made is None:
        tensors = tensors_of(result, options)
        starts = [_raw_start(one, result, options) for one in tensors]
        made = _described(tensors, result, options), starts, tensors
        result.model.cache_response_prefix(key, made)
    described: tuple[bytes, list[bytes], list[OutputTensor]] = made
    return described


def _head(result: LookupResult, options: ResponseOptions) -> bytes:
    """Returns all bytes before the outputs."""
    model = result.model
    start = model.response_prefix_cache.get(("v2 grpc model",))
    if start is None:
        start = pb.ModelInferResponse(
            model_name=model.name, model_version=str(model.version)
        ).SerializeToString()
        model.cache_response_prefix(("v2 grpc model",), start)
    head: bytes = start
    if options.request_id:
        request_id = options.request_id.encode()
        head += ID_TAG + varint(len(request_id)) + request_id
    parameters = {
        name: pb.InferParameter(int64_param=number)
        for name, number in parameters_of(result).items()
    }
    if parameters:
        head += pb.ModelInferResponse(parameters=parameters).SerializeToString()
    return head


def _described(
    tensors: Sequence[OutputTensor], result: LookupResult, options: ResponseOptions
) -> bytes:
    datatype = OUTPUT_DATATYPES[result.values.itemsize]
    outputs = [
        pb.ModelInferResponse.InferOutputTensor(name=one.name, datatype=datatype, shape=one.shape)
        for one in tensors
    ]
    if options.locations is not None:
        for one, output in zip(tensors, outputs, strict=True):
            if (location := options.location(one.name)) is not None:
                _set_location(output, location, one.nbytes(result.values.itemsize))
    return pb.ModelInferResponse(outputs=outputs).SerializeToString()


def _set_location(output: _OutputMessage, location: MemorySlice, nbytes: int) -> None:
    parameters = output.parameters
    parameters[REGION].string_param = location.region.name
    parameters[OFFSET].int64_param = location.offset
    parameters[BYTE_SIZE].int64_param = nbytes


def _raw_start(tensor: OutputTensor, result: LookupResult, options: ResponseOptions) -> bytes:
    """Returns the tag and length of an output's raw contents. The length is 0 for an output in
    shared memory, because clients expect an entry for every output."""
    is_shared = options.location(tensor.name) is not None
    return RAW_OUTPUT_TAG + varint(0 if is_shared else tensor.nbytes(result.values.itemsize))


def try_encode_streamed_inline(result: LookupResult) -> EncodedResponse | None:
    """Encodes like try_encode_inline, as a ModelStreamInferResponse."""
    encoded = try_encode_inline(result)
    if encoded is None:
        return None
    chunks, nbytes = encoded
    start = STREAMED_TAG + varint(nbytes)
    return (start, *chunks), nbytes + len(start)


def encode_streamed_chunks(result: LookupResult) -> Iterator[bytes | memoryview]:
    chunks, nbytes = with_size([*encode_chunks(result)])
    yield STREAMED_TAG + varint(nbytes)
    yield from chunks


def encode_stream_error(error: EmbedServeError) -> bytes:
    """Returns a ModelStreamInferResponse with only its error: a stream's response to a failed
    request."""
    return pb.ModelStreamInferResponse(
        error_message=f"[{error.code}] {error.message}"
    ).SerializeToString()
