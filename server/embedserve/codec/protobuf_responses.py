"""Encodes results as EmbedResponse. Fields that all responses of a model share are encoded once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from google.protobuf.json_format import ParseDict

from embedserve.codec.model_description import describe
from embedserve.codec.protobuf_fields import LENGTH_DELIMITED, VARINT, number_of, tag_of, varint
from embedserve.errors import EmbedServeError
from embedserve.lookup_types import EncodedResponse, LookupResult, with_size
from embedserve.model_info import ModelInfo
from embedserve_proto import embedding_pb2

_FLOAT32, _FLOAT16 = np.dtype("<f4"), np.dtype("<f2")
VALUES_TAG = bytes([tag_of(number_of(embedding_pb2.EmbedResponse, "values"), LENGTH_DELIMITED)])
SEQ_TAG = bytes([tag_of(number_of(embedding_pb2.EmbedResponse, "seq"), VARINT)])
INLINE_LENGTHS_MAX = 32_768
"""Lengths in a response that is encoded on the event loop's thread, in about a millisecond."""
ID_RULE_DEFAULTS = {"id_type": "int64", "unknown": "error"}
"""Values of fields of an IdRule message that the stored rule leaves out."""
DESCRIPTION = ("Model message",)
"""Key of a model's description in its cache of response prefixes."""


def try_encode_inline(result: LookupResult) -> EncodedResponse | None:
    """Returns (the chunks of an EmbedResponse, their byte count); values are not copied. Returns
    None where encoding would take long, which it never does for pooled values.

    A protobuf message is the concatenation of its fields. The fields that all responses of a model
    share are therefore encoded once. Lengths, unknown_ids and missing_ids, which few responses
    have, follow them, and seq, which changes many times a second.
    """
    values, lengths, model = result.values, result.lengths, result.model
    is_plain = values.dtype is _FLOAT32 or values.dtype is _FLOAT16
    is_plain = is_plain and not result.unknown_ids and not result.missing_ids
    if result.extra_chunks or lengths is not None or not is_plain:
        is_long = lengths is not None and lengths.size > INLINE_LENGTHS_MAX
        return None if is_long else with_size([*encode_chunks(result)])
    size = values.nbytes
    start = model.response_prefix_cache.get((size, values.itemsize))
    if start is None:
        start = _start(model, len(values), size, values.itemsize)
    if result.seq is None:
        return (start, values.data), len(start) + size
    end = SEQ_TAG + varint(result.seq)
    return (start, values.data, end), len(start) + size + len(end)


def encode_chunks(result: LookupResult) -> Iterator[bytes | memoryview]:
    """Yields the chunks of any response in order. None of them takes long to encode."""
    values = [_little_endian(one) for one in (result.values, *result.extra_chunks)]
    batch_size = sum(map(len, values)) if result.lengths is None else result.lengths.shape[1]
    size = sum(one.nbytes for one in values)
    yield _leading_fields(result.model, batch_size, values[0].itemsize) + VALUES_TAG + varint(size)
    for one in values:
        yield one.data
    if result.lengths is not None:
        lengths = result.lengths.reshape(-1)
        for start in range(0, lengths.size, INLINE_LENGTHS_MAX):  # parsers join packed fields
            some = lengths[start : start + INLINE_LENGTHS_MAX].tolist()
            yield embedding_pb2.EmbedResponse(lengths=some).SerializeToString()
    if result.unknown_ids:
        yield embedding_pb2.EmbedResponse(unknown_ids=result.unknown_ids).SerializeToString()
    if result.missing_ids:
        yield embedding_pb2.EmbedResponse(missing_ids=result.missing_ids).SerializeToString()
    if result.seq is not None:
        yield SEQ_TAG + varint(result.seq)


def _little_endian(values: np.ndarray) -> np.ndarray:
    return values.astype(values.dtype.newbyteorder("<"), copy=False)


def _start(model: ModelInfo, batch_size: int, size: int, itemsize: int) -> bytes:
    """Returns all bytes before the values of a pooled response, and caches them with the model."""
    start = _leading_fields(model, batch_size, itemsize) + VALUES_TAG + varint(size)
    model.cache_response_prefix((size, itemsize), start)
    return start


def _leading_fields(model: ModelInfo, batch_size: int, itemsize: int) -> bytes:
    """Returns the fields before the values, serialized."""
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
    """Returns an EmbedResponse with only its error: a stream's response to a failed request."""
    return embedding_pb2.EmbedResponse(
        error=embedding_pb2.Error(code=error.code, message=error.message, field=error.field)
    ).SerializeToString()


def model_message(model: ModelInfo, status: dict[str, Any]) -> embedding_pb2.Model:
    """Returns ``model`` and its serving status as the message of ListModels and GetModel.

    The description is cached: routers ask each shard for it once a second.
    """
    described = model.response_prefix_cache.get(DESCRIPTION)
    if described is None:
        described = _described(model)
        model.cache_response_prefix(DESCRIPTION, described)
    message = embedding_pb2.Model()
    message.CopyFrom(described)
    return ParseDict(status, message, ignore_unknown_fields=True)


def _described(model: ModelInfo) -> embedding_pb2.Model:
    described = describe(model)
    for table in described["tables"]:
        table["ids"] = ID_RULE_DEFAULTS | table["ids"]
    return ParseDict(described, embedding_pb2.Model(), ignore_unknown_fields=True)
