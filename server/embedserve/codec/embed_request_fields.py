"""Reads single fields of an EmbedRequest: the numeric ones as arrays, and the model.

A numeric field is given as numbers, packed or one in each field, or as little-endian bytes in
FIELD_bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice

import numpy as np

from embedserve.codec.protobuf_fields import (
    I32,
    VARINT,
    VARINT_BYTES_MAX,
    TooManyFieldsError,
    count_varints,
    extract_fields,
    field_tag,
    fields,
    read_varints,
)
from embedserve.config import Limits
from embedserve.errors import InvalidRequestError, RequestTooLargeError
from embedserve_proto import embedding_pb2

INT64, INT32, _FLOAT32 = np.dtype("<i8"), np.dtype("<i4"), np.dtype("<f4")
DTYPES: dict[str, np.dtype] = {"ids": INT64, "lengths": INT32, "weights": _FLOAT32}
_tag = partial(field_tag, embedding_pb2.EmbedRequest)
IDS_TAG = _tag("ids_bytes")
LENGTHS_TAG = _tag("lengths_bytes")
NUMBERS = {
    _tag("ids"): "ids",
    _tag("lengths"): "lengths",
    _tag("weights"): "weights",
    # not packed, each number in a field of its own: parsers accept both
    _tag("ids", VARINT): "ids",
    _tag("lengths", VARINT): "lengths",
    _tag("weights", I32): "weights",
    IDS_TAG: "ids_bytes",
    LENGTHS_TAG: "lengths_bytes",
    _tag("weights_bytes"): "weights_bytes",
}
"""Names of the numeric fields, by tag."""
MODEL_TAG = _tag("model")
MODEL_FIELDS_MAX = 64
INLINE_FIELDS_MAX = 4096
"""Fields of a message that is decoded on the event loop's thread, in about a millisecond."""
NumericFields = Mapping[str, Sequence[memoryview]]
"""Values of the numeric fields of a message, in order, by name."""


def read_array(
    field: str, numbers: NumericFields, factor: int, limits: Limits, limit: str
) -> np.ndarray:
    """Returns a field given as numbers, packed or unpacked, or as little-endian bytes in
    FIELD_bytes.

    Raises:
        InvalidRequestError: the numbers are malformed, or given in both fields.
        RequestTooLargeError: the field has over ``factor`` times ``limit`` numbers.
    """
    packed = numbers.get(field, ())
    nbytes = sum(map(len, packed))
    raw = numbers.get(f"{field}_bytes", (b"",))[-1]
    dtype, count_max = DTYPES[field], factor * getattr(limits, limit)
    if len(raw) and nbytes:
        raise _both_given(field)
    is_fixed = len(raw) or dtype is _FLOAT32
    if (len(raw) or nbytes) > count_max * (dtype.itemsize if is_fixed else VARINT_BYTES_MAX):
        raise _too_many(field, count_max, limits.describe(limit))
    if len(packed) > 1:
        _check_chunk_ends(field, packed, dtype.itemsize if is_fixed else 0)
    if is_fixed:
        octets = bytes(raw or b"".join(packed))  # a copy, which is aligned
        if len(octets) % dtype.itemsize:
            raise InvalidRequestError(
                f"{field}_bytes has {len(octets)} bytes, not a multiple of {dtype.itemsize}",
                f"{field}_bytes",
            )
        return np.frombuffer(octets, dtype)
    joined = b"".join(packed)
    if count_varints(joined) > count_max:
        raise _too_many(field, count_max, limits.describe(limit))
    try:
        return read_varints(joined).astype(dtype, copy=False)
    except ValueError as error:
        raise InvalidRequestError(f"{field} is not packed integers: {error}", field) from error


def array_of(
    message: embedding_pb2.EmbedRequest, field: str, factor: int, limits: Limits, limit: str
) -> np.ndarray:
    """Returns a field of a parsed message, as ``read_array`` does."""
    numbers, raw = getattr(message, field), getattr(message, f"{field}_bytes")
    if raw and numbers:
        raise _both_given(field)
    if raw:
        return read_array(field, {f"{field}_bytes": (raw,)}, factor, limits, limit)
    if len(numbers) > factor * getattr(limits, limit):
        raise _too_many(field, factor * getattr(limits, limit), limits.describe(limit))
    return np.array(numbers[:], DTYPES[field])


def peek_model(body: bytes) -> str:
    """Returns the model that an EmbedRequest names, without decoding the rest; "" if it names none.

    Serializers write fields in their order, so that the model comes first. In any other body, the
    first MODEL_FIELDS_MAX fields are searched.
    """
    try:
        for tag, _, start, end in islice(fields(body), MODEL_FIELDS_MAX):
            if tag == MODEL_TAG:
                return body[start:end].decode(errors="replace")
    except ValueError:
        pass
    return ""


def estimate_size(body: bytes) -> tuple[int, int]:
    """Returns (bags, ids) of an EmbedRequest with numeric ids. Returns (0, 0) for an invalid
    message, and for more than INLINE_FIELDS_MAX fields."""
    try:
        numbers, _, _ = extract_fields(body, NUMBERS, INLINE_FIELDS_MAX)
    except (TooManyFieldsError, ValueError):
        return 0, 0
    return _count(numbers, "lengths"), _count(numbers, "ids")


def _count(numbers: NumericFields, field: str) -> int:
    """Returns the number of numbers that are given in ``field``."""
    raw_bytes = sum(map(len, numbers.get(f"{field}_bytes", ())))
    packed = sum(map(count_varints, numbers.get(field, ())))
    return packed + raw_bytes // DTYPES[field].itemsize


def _check_chunk_ends(field: str, chunks: Sequence[memoryview], itemsize: int) -> None:
    """Raises InvalidRequestError where a chunk ends within a number, which the next chunk would
    complete. ``itemsize`` is 0 for varints."""
    for chunk in chunks:
        if len(chunk) % itemsize if itemsize else len(chunk) and chunk[-1] >= 0x80:
            raise InvalidRequestError(f"{field} has a part that ends within a number", field)


def _both_given(field: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field} and {field}_bytes are both given: send one", field)


def _too_many(field: str, count_max: int, limit: str) -> RequestTooLargeError:
    return RequestTooLargeError(f"{field} has over {count_max} numbers: {limit}", field)
