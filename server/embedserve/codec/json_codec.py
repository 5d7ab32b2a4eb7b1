"""The JSON codec of POST /embed: request bytes to a LookupRequest, a LookupResult to response
bytes.

The fast path only distinguishes valid from invalid requests. On the slow path json_errors.py finds
the exact error and reports field and value.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import compress
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import orjson

from embedserve.codec.float16_digits import shortest_float16_repr
from embedserve.codec.json_errors import explain_invalid_json
from embedserve.codec.string_ids import HashedStrings, integers_of, merge_string_ids
from embedserve.config import DEFAULT_LIMITS, Limits
from embedserve.errors import EmbedServeError, InvalidRequestError, RequestTooLargeError
from embedserve.lookup_types import (
    EncodedResponse,
    LookupRequest,
    LookupResult,
    OutputOptions,
    WouldBlockError,
)
from embedserve.model_info import ModelInfo
from embedserve.model_names import qualified_model_name
from embedserve.request_checks import check_feature_count

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Options(msgspec.Struct, forbid_unknown_fields=True, gc=False, kw_only=True):
    weights: dict[str, list[list[float] | float]] | None = None
    output_dtype: Literal["float32", "float16"] | None = None
    version: _Number | str | None = None
    output_keys: list[str] | None = None
    min_seq: _Number | None = None


class _EmbedBody(_Options, gc=False):
    features: dict[str, list[list[int] | int]]


class _BodyWithStrings(_Options, gc=False):
    features: dict[str, list[list[int | str] | int | str]]


INLINE_JSON_BYTES_MAX = 64 << 10
"""Bytes of a body that is decoded on the event loop's thread, which takes about a millisecond at
most."""

_FLOAT32 = np.dtype(np.float32)
INLINE_VALUES_MAX = 32_768
"""Values of a response that is encoded on the event loop's thread, in about two milliseconds at
most."""
CHUNK_VALUES = 16_384
"""Values that are encoded without a break, unless a single row is longer."""

_DECODER = msgspec.json.Decoder(_EmbedBody)
_STRING_DECODER = msgspec.json.Decoder(_BodyWithStrings)


def decode_request(
    body: bytes, model: str, limits: Limits = DEFAULT_LIMITS, *, is_inline: bool = False
) -> LookupRequest:
    """Returns the request in ``body``, addressed to ``model`` ("" for the default model).

    Raises:
        InvalidRequestError: the body is not JSON, or not a batch of jagged ids; names field and
            value.
        RequestTooLargeError: the body has more than ``limits`` allow. Raised before it is parsed.
        WouldBlockError: ``is_inline``, and it would take long.
    """
    if is_inline and len(body) > INLINE_JSON_BYTES_MAX:
        raise WouldBlockError
    if len(body) > limits.request_values_max:  # a shorter body cannot hold that many values
        check_cost(body, limits)
    try:
        try:
            parsed: _EmbedBody | _BodyWithStrings = _DECODER.decode(body)
        except msgspec.ValidationError:
            # Tried second, because values that may be strings or integers take longer to parse.
            parsed = _STRING_DECODER.decode(body)
        if len(body) > limits.request_features_max:  # a shorter body cannot name that many
            check_feature_count("features", len(parsed.features), limits)
        request = _request(parsed, model)
    except (msgspec.DecodeError, TypeError, ValueError, OverflowError, RecursionError) as error:
        # No local variable holds the new error: with its traceback it would form a reference cycle,
        # and keep all parsed values alive until the next collection.
        raise (
            explain_invalid_json(body) or InvalidRequestError(f"body: {error}", "body")
        ) from error
    if parsed.output_dtype is not None:
        request.output_dtype = parsed.output_dtype
    if parsed.version is not None:
        request.model = qualified_model_name(request.model, parsed.version)
    if parsed.output_keys:
        check_feature_count("output_keys", len(parsed.output_keys), limits)
        request.output = OutputOptions(tuple(parsed.output_keys))
    request.min_seq = parsed.min_seq
    return request


def estimate_size(body: bytes) -> tuple[int, int]:
    """Returns the approximate (bags, ids) of a request, estimated from its brackets and commas.

    A bag's first id is not counted. Where blanks follow the bracket around all bags of a feature,
    it counts as one more bag. Returns (0, 0) for string ids, which may contain commas.
    """
    if b'["' in body:
        return 0, 0
    brackets, commas = _count(body, b"["), _count(body, b",")
    bags = brackets - body.count(b"[[")  # without the bracket around the bags of each feature
    mappings = 2 if b'"weights"' in body else 1
    return bags // mappings, max(commas - brackets, 0) // mappings


def _count(body: bytes, characters: bytes) -> int:
    octets = np.frombuffer(body, np.uint8)
    return sum(int(np.count_nonzero(octets == one)) for one in characters)


def check_cost(body: bytes, limits: Limits) -> None:
    """Raises RequestTooLargeError for JSON with more values than ``limits`` allow. Each value but
    the outermost follows a comma or an opening bracket."""
    count = _count(body, b",[{")
    if count > limits.request_values_max:
        raise RequestTooLargeError(
            f"body has {count} commas and opening brackets, "
            f"{limits.describe('request_values_max')}; protobuf's packed ids are not so limited",
            "body",
        )


def _request(parsed: _EmbedBody | _BodyWithStrings, model: str) -> LookupRequest:
    features = tuple(parsed.features)
    bags: list[Any] = list(parsed.features.values())
    batch_size = _batch_size(bags)
    lengths, values = _flatten(bags, batch_size)
    weights = None
    if parsed.weights is not None:
        weights = _flatten_weights(features, bags, parsed.weights, lengths, batch_size)
    length_array = np.frombuffer(array("i", lengths), np.int32)
    if isinstance(parsed, _EmbedBody):
        ids = np.frombuffer(array("q", values), np.int64)
        return LookupRequest(model, features, ids, length_array, weights, batch_size)
    if any(one and type(one[0]) is list and str in set(map(type, one)) for one in bags):
        raise TypeError  # _flatten took a string in place of a bag for its characters
    ids, string_features, strings = _merge_strings(features, lengths, values)
    return LookupRequest(
        model, features, ids, length_array, weights, batch_size, string_features, strings
    )


def _batch_size(features: list[list[Any]]) -> int:
    """Returns the examples of the request. A feature given as one flat list is a batch of one."""
    first = features[0] if features else None
    if not first:
        # Either invalid, or an empty bag next to features that determine the batch size.
        if not any(features):
            raise ValueError
        return 1
    return len(first) if type(first[0]) is list else 1


def _flatten(features: list[Any], batch_size: int) -> tuple[list[int], list[Any]]:
    """Returns (lengths of all bags, their values), feature-major. Raises TypeError or ValueError if
    ragged."""
    lengths: list[int] = []
    values: list[Any] = []
    for bags in features:
        if bags and type(bags[0]) is list:
            if len(bags) != batch_size:
                raise ValueError
            for bag in bags:
                lengths.append(len(bag))
                values += bag
        elif batch_size == 1:
            lengths.append(len(bags))
            values += bags
        else:
            raise ValueError
    return lengths, values


def _merge_strings(
    features: tuple[str, ...], lengths: list[int], values: list[Any]
) -> tuple[np.ndarray, frozenset[str], HashedStrings]:
    """Returns (ids, the features whose ids are hashes, the strings by hash). Raises TypeError where
    a feature mixes integers with strings that are not integers."""
    integers: list[int] = []
    strings: list[str] = []
    is_string = []
    batch_size = len(lengths) // len(features)
    counts = [sum(lengths[i : i + batch_size]) for i in range(0, len(lengths), batch_size)]
    start = 0
    for count in counts:
        ids = values[start : start + count]
        types = set(map(type, ids))
        is_string.append(types == {str})
        if is_string[-1]:
            strings += ids
        elif types == {int, str}:
            integers += _mixed(ids)
        else:
            integers += ids
        start += count
    merged, string_ids = merge_string_ids(
        np.frombuffer(array("q", integers), np.int64), strings, features, is_string, counts
    )
    return merged, frozenset(compress(features, is_string)), string_ids


def _mixed(ids: list[Any]) -> list[int]:
    """Returns ``ids`` as integers; some are given as strings. Raises TypeError where a string is no
    integer."""
    integers = integers_of(list(map(str, ids)))
    if isinstance(integers, int):
        raise TypeError
    as_list: list[int] = integers.tolist()
    return as_list


def _flatten_weights(
    features: tuple[str, ...],
    bags: list[Any],
    given: dict[str, list[Any]],
    lengths: list[int],
    batch_size: int,
) -> np.ndarray:
    """Returns float32 weights, one for each id: the given weights, and 1 for features without
    weights."""
    if not given.keys() <= set(features):
        raise ValueError
    weights = [
        given[feature] if feature in given else _ones(feature_bags)
        for feature, feature_bags in zip(features, bags, strict=True)
    ]
    weight_lengths, values = _flatten(weights, batch_size)
    if weight_lengths != lengths:
        raise ValueError
    with np.errstate(over="ignore"):
        as_float32 = np.array(values, np.float64).astype(np.float32)
    if not np.isfinite(as_float32).all():
        raise ValueError
    return as_float32


def _ones(bags: list[Any]) -> list[Any]:
    if bags and type(bags[0]) is list:
        return [[1.0] * len(bag) for bag in bags]
    return [1.0] * len(bags)


def try_encode_inline(result: LookupResult) -> EncodedResponse | None:
    """Encodes like encode_result, or returns None where that would take long."""
    values, more, lengths = result.values, result.extra_chunks, result.lengths
    size = values.size
    if more:
        size += sum([chunk.size for chunk in more])
    if lengths is not None:
        size += lengths.size
    if size > INLINE_VALUES_MAX:
        return None
    is_plain = not more and lengths is None and result.unknown_ids is None
    if is_plain and result.missing_ids is None and values.dtype is _FLOAT32:
        # Most responses are encoded as one chunk here: the chunks of encode_result cost a quarter
        # more.
        start, end = result.model.json_start, _end(result)
        body = b'%b,"values":%b%b' % (start, _numpy_json(values), end)
    else:
        body = encode_result(result)
    return (body,), len(body)


def encode_result(result: LookupResult) -> bytes:
    """Returns {"model", "version", "keys", "length_per_key", "values": [B][sum(length_per_key)]}.

    An unpooled response has "lengths": {key: [B]} and "values": {key: [n][dim]}. Where ids had no
    row, "unknown_ids" counts them by feature. "missing_ids" counts ids whose rows no server could
    look up.

    Numbers have the fewest digits that read back as the same float32. If float16 was requested,
    they read back as the same float16, and "output_dtype" says so.

    "seq" comes last, for a version that follows deltas.

    A value that is not finite is null, because JSON has no infinity: a weighted sum past the
    largest float32, or past 65504 for float16. Protobuf carries such values unchanged.
    """
    return b"".join(encode_chunks(result))


def encode_chunks(result: LookupResult) -> Iterator[bytes]:
    """Yields the chunks of encode_result in order. None of them takes long to encode."""
    head = result.model.json_start
    if result.values.dtype == np.float16:
        head += b',"output_dtype":"float16"'
    if result.lengths is not None:
        opening = b',"lengths":{'
        for key, lengths in _by_key(result.lengths, result.model).items():
            yield head + opening + orjson.dumps(key) + b":" + _numpy_json(lengths)
            head, opening = b"", b","
        head = b"}"
    if result.unknown_ids is not None:
        head += b',"unknown_ids":' + orjson.dumps(result.unknown_ids)
    if result.missing_ids is not None:
        head += b',"missing_ids":' + orjson.dumps(result.missing_ids)
    head += b',"values":'
    if result.lengths is None:
        yield from _rows(head, (result.values, *result.extra_chunks))
        yield _end(result)
        return
    ends = np.cumsum(result.lengths.sum(axis=1)).tolist()
    opening = head + b"{"
    for key, rows in _by_key(np.split(result.values, ends[:-1]), result.model).items():
        yield from _rows(opening + orjson.dumps(key) + b":", (rows,))
        opening = b","
    yield b"}" + _end(result)


def _end(result: LookupResult) -> bytes:
    """Returns all bytes after the values."""
    return b"}" if result.seq is None else b',"seq":%d}' % result.seq


def _rows(before: bytes, arrays: Iterable[np.ndarray]) -> Iterator[bytes]:
    """Yields ``before``, and the rows of ``arrays`` as one list of lists."""
    before += b"["
    for all_rows in arrays:
        step = max(1, CHUNK_VALUES // all_rows.shape[1])
        for start in range(0, len(all_rows), step):
            rows = all_rows[start : start + step]
            if rows.dtype == np.float16:
                rows = shortest_float16_repr(rows)
            yield before + _numpy_json(rows)[1:-1]
            before = b","
    yield b"]" if before == b"," else before + b"]"


def _by_key(values: Iterable[np.ndarray], model: ModelInfo) -> dict[str, np.ndarray]:
    return dict(zip(model.keys, values, strict=True))


def _numpy_json(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def encode_error(error: EmbedServeError) -> bytes:
    """Returns {"error": {"code", "message", "field"}}, the format of every REST error."""
    return orjson.dumps(
        {"error": {"code": error.code, "message": error.message, "field": error.field}}
    )
