"""Results as EmbedResponse: what is the same for every answer of a model is encoded once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from google.protobuf.json_format import ParseDict

from embedserve.codec.model_description import describe
from embedserve.codec.protobuf_fields import varint
from embedserve.errors import EmbedServeError
from embedserve.lookup import EncodedResponse, LookupResult, with_size
from embedserve.model_info import ModelInfo
from embedserve_proto import embedding_pb2

_FLOAT32, _FLOAT16 = np.dtype("<f4"), np.dtype("<f2")
VALUES_TAG = b"\x32"
"""EmbedResponse.values: field 6, length-delimited."""
NOW_LENGTHS_MAX = 32_768
"""Of an answer that is written on the event loop's thread, in about a millisecond."""
ALWAYS_OF_A_RULE = {"id_type": "int64", "unknown": "error"}
"""What an IdRule message has where the rule itself says nothing of it."""


def try_encode_inline(result: LookupResult) -> EncodedResponse | None:
    """(an EmbedResponse in pieces, one after the other, their bytes): values are not copied. None
    where it would take long, as of pooled values it never does.

    A protobuf message is the concatenation of its fields, so what is the same for every
    answer of a model is encoded once, and lengths and unknown_ids, which few have, follow.
    """
    values, lengths, model = result.values, result.lengths, result.model
    is_plain = values.dtype is _FLOAT32 or values.dtype is _FLOAT16
    if result.extra_chunks or lengths is not None or result.unknown_ids or not is_plain:
        is_long = lengths is not None and lengths.size > NOW_LENGTHS_MAX
        return None if is_long else with_size([*encode_pieces(result)])
    size = values.nbytes
    start = model.response_prefix_cache.get((size, values.itemsize))
    if start is None:
        start = _start(model, len(values), size, values.itemsize)
    return (start, values.data), len(start) + size


def encode_pieces(result: LookupResult) -> Iterator[bytes | memoryview]:
    """The pieces of any answer, one after the other, none of which takes long to make."""
    values = [_little_endian(one) for one in (result.values, *result.extra_chunks)]
    batch_size = sum(map(len, values)) if result.lengths is None else result.lengths.shape[1]
    size = sum(one.nbytes for one in values)
    yield _sizes(result.model, batch_size, values[0].itemsize) + VALUES_TAG + varint(size)
    for one in values:
        yield one.data
    if result.lengths is not None:
        lengths = result.lengths.reshape(-1)
        for start in range(0, lengths.size, NOW_LENGTHS_MAX):  # parsers join packed fields
            some = lengths[start : start + NOW_LENGTHS_MAX].tolist()
            yield embedding_pb2.EmbedResponse(lengths=some).SerializeToString()
    if result.unknown_ids:
        yield embedding_pb2.EmbedResponse(unknown_ids=result.unknown_ids).SerializeToString()


def _little_endian(values: np.ndarray) -> np.ndarray:
    return values.astype(values.dtype.newbyteorder("<"), copy=False)


def _start(model: ModelInfo, batch_size: int, size: int, itemsize: int) -> bytes:
    """All that comes before the values of a pooled answer; kept with its model."""
    start = _sizes(model, batch_size, itemsize) + VALUES_TAG + varint(size)
    if len(model.response_prefix_cache) >= model.response_prefixes_max:
        model.response_prefix_cache.clear()
    model.response_prefix_cache[size, itemsize] = start
    return start


def _sizes(model: ModelInfo, batch_size: int, itemsize: int) -> bytes:
    output_dtype = embedding_pb2.FLOAT16 if itemsize == 2 else embedding_pb2.FLOAT32
    return embedding_pb2.EmbedResponse(
        model=model.name,
        version=model.version,
        keys=model.keys,
        length_per_key=model.length_per_key,
        batch_size=batch_size,
        output_dtype=output_dtype,
    ).SerializeToString()


def encode_error(error: EmbedServeError) -> bytes:
    """An EmbedResponse with only its error: how a stream answers a request that failed."""
    return embedding_pb2.EmbedResponse(
        error=embedding_pb2.Error(code=error.code, message=error.message, field=error.field)
    ).SerializeToString()


def model_message(model: ModelInfo, status: dict[str, Any]) -> embedding_pb2.Model:
    """``model``, and how it is served, as ListModels and GetModel describe it."""
    described = describe(model) | status
    for table in described["tables"]:
        table["ids"] = ALWAYS_OF_A_RULE | table["ids"]
    return ParseDict(described, embedding_pb2.Model(), ignore_unknown_fields=True)
