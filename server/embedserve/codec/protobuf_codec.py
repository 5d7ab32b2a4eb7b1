"""The protobuf messages of gRPC and of POST /embed: bytes to LookupRequest, results to bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import compress
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from embedserve.batching.checks import check_lengths
from embedserve.codec.strings import merge
from embedserve.errors import EmbedServeError, InvalidRequestError
from embedserve.types import LookupRequest, LookupResult, ModelInfo
from embedserve_proto import embedding_pb2
from embedserve_store.ids.rules import IdRule

_INT64, _INT32, _FLOAT32 = np.dtype("<i8"), np.dtype("<i4"), np.dtype("<f4")
VALUES_TAG = b"\x32"
"""EmbedResponse.values: field 6, length-delimited."""


def decode_request(body: bytes, model: str = "") -> LookupRequest:
    """The EmbedRequest in ``body``; a non-empty ``model`` (of the URL) goes before its own.

    Raises:
        InvalidRequestError: not an EmbedRequest, or not a batch of jagged ids.
    """
    try:
        message = embedding_pb2.EmbedRequest.FromString(body)
    except DecodeError as error:
        raise InvalidRequestError(f"body is not an EmbedRequest: {error}", "body") from error
    features = tuple(message.keys[:])  # a slice is a list, which is read twice as fast
    _check_features(features)
    ids = _array("ids", message.ids, message.ids_bytes, _INT64)
    lengths = _array("lengths", message.lengths, message.lengths_bytes, _INT32)
    batch_size = _batch_size(features, lengths)
    request = LookupRequest(model or message.model, features, ids, lengths, None, batch_size)
    if message.output_dtype:
        request.output_dtype = _output_dtype(message.output_dtype)
    if message.string_keys or message.string_ids:
        _add_strings(request, message)
    if message.weights or message.weights_bytes:
        weights = _array("weights", message.weights, message.weights_bytes, _FLOAT32)
        id_count = request.ids.size
        if weights.size != id_count:
            raise InvalidRequestError(
                f"weights has {weights.size} for {id_count} ids: give one for each, or none",
                "weights",
            )
        request.weights = weights
    return request


def _output_dtype(value: int) -> str:
    if value != embedding_pb2.FLOAT16:
        raise InvalidRequestError(
            f"output_dtype is {value}, expected FLOAT32 (0) or FLOAT16 (1)", "output_dtype"
        )
    return "float16"


@lru_cache(maxsize=1024)
def _check_features(features: tuple[str, ...]) -> None:
    """Callers name the same features over and over; what is wrong is not remembered."""
    if not features:
        raise InvalidRequestError("keys is empty: name at least one feature", "keys")
    _check_unique("keys", features)


def _batch_size(features: tuple[str, ...], lengths: np.ndarray) -> int:
    batch_size, rest = divmod(lengths.size, len(features))
    if rest:
        raise InvalidRequestError(
            f"lengths has {lengths.size} entries, not a multiple of the {len(features)} keys",
            "lengths",
        )
    if batch_size == 0:
        raise InvalidRequestError("lengths is empty: an empty batch", "lengths")
    return batch_size


def _check_unique(field: str, names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise InvalidRequestError(f"{field} names {twice!r} twice", field)


def _add_strings(request: LookupRequest, message: embedding_pb2.EmbedRequest) -> None:
    """Puts the hashes of string_ids among the ids, where string_keys names the key."""
    _check_unique("string_keys", message.string_keys)
    string_keys = frozenset(message.string_keys)
    if stray := string_keys.difference(request.features):
        raise InvalidRequestError(f"string_keys names {min(stray)!r}, keys does not", "string_keys")
    strings = list(message.string_ids)
    check_lengths(request.lengths, request.ids.size + len(strings))
    lengths = request.lengths.reshape(len(request.features), request.batch_size)
    is_string = [key in string_keys for key in request.features]
    counts = lengths.sum(axis=1, dtype=np.int64).tolist()
    expected = sum(compress(counts, is_string))
    if len(strings) != expected:
        raise InvalidRequestError(
            f"string_ids has {len(strings)} ids, the lengths of string_keys add up to {expected}",
            "string_ids",
        )
    request.ids, request.strings = merge(request.ids, strings, is_string, counts)
    request.string_features = string_keys


def _array(field: str, packed: Any, raw: bytes, dtype: np.dtype) -> np.ndarray:
    """A field given as ``packed`` values or, as FIELD_bytes, ``raw``: little-endian."""
    if not raw:
        return np.array(packed[:], dtype)
    if packed:
        raise InvalidRequestError(f"{field} and {field}_bytes are both given: send one", field)
    if len(raw) % dtype.itemsize:
        raise InvalidRequestError(
            f"{field}_bytes has {len(raw)} bytes, not a multiple of {dtype.itemsize}",
            f"{field}_bytes",
        )
    return np.frombuffer(raw, dtype)


def encode_result(result: LookupResult) -> bytes:
    """An EmbedResponse."""
    return b"".join(encode_parts(result))


def encode_parts(result: LookupResult) -> list[bytes | memoryview]:
    """An EmbedResponse in pieces, one after the other: the values are not copied.

    A protobuf message is the concatenation of its fields, so what is the same for every
    answer of a model is encoded once, and lengths and unknown_ids, which few have, follow.
    """
    pieces = [_little_endian(one) for one in (result.values, *result.more)]
    batch_size = sum(map(len, pieces)) if result.lengths is None else result.lengths.shape[1]
    values_bytes = sum([piece.nbytes for piece in pieces])
    parts: list[bytes | memoryview]
    parts = [_start(result.model, batch_size, values_bytes, pieces[0].itemsize)]
    parts += [piece.data for piece in pieces]
    if result.lengths is not None or result.unknown_ids:
        parts.append(_more(result))
    return parts


def _little_endian(values: np.ndarray) -> np.ndarray:
    return values.astype(values.dtype.newbyteorder("<"), copy=False)


@lru_cache(maxsize=1024)
def _start(model: ModelInfo, batch_size: int, values_bytes: int, itemsize: int) -> bytes:
    """All that comes before the values."""
    output_dtype = embedding_pb2.FLOAT16 if itemsize == 2 else embedding_pb2.FLOAT32
    sizes = embedding_pb2.EmbedResponse(batch_size=batch_size, output_dtype=output_dtype)
    return b"".join((_prefix(model), sizes.SerializeToString(), VALUES_TAG, _varint(values_bytes)))


def _more(result: LookupResult) -> bytes:
    """The fields of an unpooled answer, and of one with unknown ids."""
    return embedding_pb2.EmbedResponse(
        lengths=None if result.lengths is None else result.lengths.reshape(-1).tolist(),
        unknown_ids=result.unknown_ids,
    ).SerializeToString()


@lru_cache(maxsize=256)
def _prefix(model: ModelInfo) -> bytes:
    return embedding_pb2.EmbedResponse(
        model=model.name,
        version=model.version,
        keys=model.keys,
        length_per_key=model.length_per_key,
    ).SerializeToString()


def _varint(value: int) -> bytes:
    """``value`` in base 128, low bits first (protobuf encoding, "Base 128 Varints")."""
    result = bytearray()
    while value > 0x7F:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)


def encode_error(error: EmbedServeError) -> bytes:
    """An EmbedResponse with only its error: how a stream answers a request that failed."""
    return embedding_pb2.EmbedResponse(
        error=embedding_pb2.Error(code=error.code, message=error.message, field=error.field)
    ).SerializeToString()


def model_message(model: ModelInfo) -> embedding_pb2.Model:
    """``model`` as ListModels and GetModel describe it."""
    return embedding_pb2.Model(
        model=model.name,
        version=model.version,
        features=model.features,
        keys=model.keys,
        length_per_key=model.length_per_key,
        unpooled=not model.is_pooled,
        tables=[
            embedding_pb2.Table(
                name=table.name,
                num_embeddings=table.num_embeddings,
                embedding_dim=table.embedding_dim,
                pooling=table.pooling,
                dtype=table.dtype,
                features=table.features,
                sharding=table.sharding,
                ids=_rule_message(table.ids),
            )
            for table in model.tables
        ],
    )


def _rule_message(rule: IdRule) -> embedding_pb2.IdRule:
    return embedding_pb2.IdRule(
        rule=rule.rule,
        id_type=rule.id_type,
        entries=rule.entries,
        modulus=rule.modulus,
        offset=rule.offset,
        unknown=rule.unknown,
        default_row=rule.default_row,
        examples=rule.examples,
    )
