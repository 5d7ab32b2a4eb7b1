"""Decodes EmbedRequest, from gRPC and from POST /embed, to a LookupRequest.

Callers repeat the same model and keys. A cached prefix of a message, up to the tag of ids_bytes, is
therefore matched byte for byte. Behind it are only the bytes of two arrays, which are located
without parsing the message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import compress, islice
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from embedserve.codec.json_errors import counted
from embedserve.codec.protobuf_fields import (
    I32,
    LENGTH_DELIMITED,
    VARINT,
    VARINT_BYTES_MAX,
    TooManyFieldsError,
    count_varints,
    extract_fields,
    fields,
    read_varint,
    read_varints,
    tag_of,
)
from embedserve.codec.string_ids import merge_string_ids
from embedserve.codec.template_cache import TemplateCache
from embedserve.config import DEFAULT_LIMITS, Limits
from embedserve.errors import InvalidRequestError, RequestTooLargeError, shortened
from embedserve.lookup_types import LookupRequest, OutputOptions, WouldBlockError
from embedserve.model_names import qualified_model_name
from embedserve.request_checks import (
    check_feature_count,
    check_lengths,
    check_min_seq,
    check_unique,
)
from embedserve_proto import embedding_pb2

INT64, INT32, _FLOAT32 = np.dtype("<i8"), np.dtype("<i4"), np.dtype("<f4")
_frombuffer = np.frombuffer
_FIELDS = {one.name: one.number for one in embedding_pb2.EmbedRequest.DESCRIPTOR.fields}
MODEL_TAG = tag_of(_FIELDS["model"], LENGTH_DELIMITED)
IDS_TAG = tag_of(_FIELDS["ids_bytes"], LENGTH_DELIMITED)
LENGTHS_TAG = tag_of(_FIELDS["lengths_bytes"], LENGTH_DELIMITED)
MODEL_FIELDS_MAX = 64
PREFIX_BYTES_MAX = 4096
NUMBERS = {
    tag_of(_FIELDS["ids"], LENGTH_DELIMITED): "ids",
    tag_of(_FIELDS["lengths"], LENGTH_DELIMITED): "lengths",
    tag_of(_FIELDS["weights"], LENGTH_DELIMITED): "weights",
    # not packed, each number in a field of its own: parsers accept both
    tag_of(_FIELDS["ids"], VARINT): "ids",
    tag_of(_FIELDS["lengths"], VARINT): "lengths",
    tag_of(_FIELDS["weights"], I32): "weights",
    IDS_TAG: "ids_bytes",
    LENGTHS_TAG: "lengths_bytes",
    tag_of(_FIELDS["weights_bytes"], LENGTH_DELIMITED): "weights_bytes",
}
"""Names of the numeric fields, by tag."""
DTYPES: dict[str, np.dtype] = {"ids": INT64, "lengths": INT32, "weights": _FLOAT32}
_Numbers = Mapping[str, Sequence[memoryview]]
INLINE_FIELDS_MAX, INLINE_PROTOBUF_BYTES_MAX = 4096, 64 << 10
"""Fields and bytes of a message that is decoded on the event loop's thread, in about a millisecond.
Numbers given as bytes are not counted."""
SMALL_BYTES = 4096
"""Bytes of a message that the protobuf library parses whole. Few enough numbers fit in it that they
may become Python objects first."""


class PrefixTemplate(NamedTuple):
    """Bytes of a message up to and including the tag of ids_bytes, and their model and keys."""

    prefix: bytes
    model: str
    features: tuple[str, ...]


class ProtobufDecoder:
    """Decodes EmbedRequest messages. It caches the prefixes of messages."""

    def __init__(self) -> None:
        self.templates = TemplateCache[PrefixTemplate]()

    def decode_request(
        self,
        body: bytes,
        model: str = "",
        limits: Limits = DEFAULT_LIMITS,
        *,
        is_inline: bool = False,
    ) -> LookupRequest:
        """Returns the EmbedRequest in ``body``. A non-empty ``model``, from the URL, takes
        precedence over the model in the message.

        Raises:
            InvalidRequestError: the body is not an EmbedRequest, or not a batch of jagged ids.
            RequestTooLargeError: the body has more than ``limits`` allow. Raised before it is
                decoded.
            WouldBlockError: ``is_inline``, and it would take long; numbers given as bytes do not.
        """
        quick = self._match_template(body, model) or self._decode_small(body, model, limits)
        if quick is not None:
            return quick
        fields_max = limits.request_values_max
        if is_inline:
            fields_max = min(INLINE_FIELDS_MAX, fields_max)
        try:
            numbers, rest, _ = extract_fields(body, NUMBERS, fields_max)
        except ValueError as error:
            raise _malformed(error) from error
        except TooManyFieldsError as error:
            if is_inline:
                raise WouldBlockError from error
            raise RequestTooLargeError(
                "body has too many keys, strings and numbers that are not packed: "
                + limits.describe("request_values_max"),
                "body",
            ) from error
        if is_inline:
            packed_bytes = sum(len(one) for name in DTYPES for one in numbers.get(name, ()))
            if packed_bytes + sum(map(len, rest)) > INLINE_PROTOBUF_BYTES_MAX:
                raise WouldBlockError
        return self._decode_numbers(body, numbers, rest, model, limits)

    def _decode_small(self, body: bytes, model: str, limits: Limits) -> LookupRequest | None:
        """Decodes a small message by the protobuf library.

        Returns None for a body larger than SMALL_BYTES or than the limits on values and text bytes,
        and for bytes that are not an EmbedRequest.
        """
        if len(body) > min(SMALL_BYTES, limits.request_values_max, limits.request_text_bytes_max):
            return None
        try:
            message = embedding_pb2.EmbedRequest.FromString(body)
        except DecodeError:
            return None

        def array(field: str, factor: int, limit: str) -> np.ndarray:
            numbers, raw = getattr(message, field), getattr(message, f"{field}_bytes")
            if raw and numbers:
                raise _both_given(field)
            if raw:
                return _array(field, {f"{field}_bytes": (raw,)}, factor, limits, limit)
            if len(numbers) > factor * getattr(limits, limit):
                raise _too_many(field, factor * getattr(limits, limit), limits.describe(limit))
            return np.array(numbers[:], DTYPES[field])

        request = _request(message, array, model, limits)
        if message.ids_bytes:
            self._cache_prefix(body, message.model, request.features)
        return request

    def _decode_numbers(
        self, body: bytes, numbers: _Numbers, rest: Sequence[memoryview], model: str, limits: Limits
    ) -> LookupRequest:
        """Builds the request from ``numbers`` and from ``rest``, the message without its
        numbers."""
        nbytes = sum(map(len, rest))
        if nbytes > limits.request_text_bytes_max:
            raise RequestTooLargeError(
                f"body has {nbytes} bytes beside its numbers, "
                + limits.describe("request_text_bytes_max"),
                "body",
            )
        try:
            message = embedding_pb2.EmbedRequest.FromString(b"".join(rest))
        except DecodeError as error:
            raise _malformed(error) from error

        def array(field: str, factor: int, limit: str) -> np.ndarray:
            return _array(field, numbers, factor, limits, limit)

        request = _request(message, array, model, limits)
        self._cache_prefix(body, message.model, request.features)
        return request

    def _cache_prefix(self, body: bytes, model: str, features: tuple[str, ...]) -> None:
        """Caches the prefix of ``body``, unless it exceeds PREFIX_BYTES_MAX, if it is serialized as
        usual, with ids_bytes right behind its keys.

        A prefix that is already cached is not added again: a message with more fields than a plain
        message begins with the same bytes.
        """
        if any(body.startswith(one.prefix) for one in self.templates.templates):
            return
        message = embedding_pb2.EmbedRequest(model=model, keys=features)
        prefix = message.SerializeToString() + bytes([IDS_TAG])
        if len(prefix) <= PREFIX_BYTES_MAX and body.startswith(prefix):
            self.templates.add(PrefixTemplate(prefix, model, features), len(prefix))

    def _match_template(self, body: bytes, model: str) -> LookupRequest | None:
        """Returns the request in a message that consists of a cached prefix, ids_bytes and
        lengths_bytes, as serializers write them. Returns None for any other message, and for an
        invalid one."""
        for prefix, named, features in self.templates.templates:
            if not body.startswith(prefix):
                continue
            try:
                size, start = read_varint(body, len(prefix))
                middle = start + size
                if body[middle] != LENGTHS_TAG:
                    return None
                size, end = read_varint(body, middle + 1)
                if end + size != len(body):
                    return None
                ids = _frombuffer(body[start:middle], INT64)
                lengths = _frombuffer(body[end:], INT32)
            except (IndexError, ValueError):
                return None
            batch_size, rest = divmod(lengths.size, len(features))
            if rest or not batch_size:
                return None
            return LookupRequest(model or named, features, ids, lengths, None, batch_size)
        return None


def _malformed(problem: object) -> InvalidRequestError:
    return InvalidRequestError(f"body is not an EmbedRequest: {problem}", "body")


def _request(
    message: embedding_pb2.EmbedRequest,
    array: Callable[[str, int, str], np.ndarray],
    model: str,
    limits: Limits,
) -> LookupRequest:
    """Returns the request in ``message``.

    Args:
        array: function that returns a numeric field, from the field's name, a factor and the name
            of a limit. It has at most factor times the limit numbers; lengths one for each feature.
    """
    check_feature_count("keys", len(message.keys), limits)
    features = tuple(message.keys[:])  # a slice is a list, which is read twice as fast
    if not features:
        raise InvalidRequestError("keys is empty: name at least one feature", "keys")
    check_unique("keys", features)
    ids = array("ids", 1, "request_ids_max")
    lengths = array("lengths", len(features), "request_examples_max")
    batch_size = _batch_size(features, lengths)
    request = LookupRequest(model or message.model, features, ids, lengths, None, batch_size)
    if message.output_dtype:
        if message.output_dtype != embedding_pb2.FLOAT16:
            raise InvalidRequestError(
                f"output_dtype is {message.output_dtype}, expected FLOAT32 (0) or FLOAT16 (1)",
                "output_dtype",
            )
        request.output_dtype = "float16"
    if message.version:
        request.model = qualified_model_name(request.model, message.version)
    if message.output_keys:
        check_feature_count("output_keys", len(message.output_keys), limits)
        request.output = OutputOptions(tuple(message.output_keys[:]))
    if message.HasField("min_seq"):
        request.min_seq = check_min_seq("min_seq", message.min_seq)
    if message.string_keys or message.string_ids:
        _add_strings(request, message)
    weights = array("weights", 1, "request_ids_max")
    if weights.size:
        if weights.size != request.ids.size:
            shown = counted(request.ids.size, "id")
            raise InvalidRequestError(
                f"weights has {weights.size} for {shown}: give one for each, or none", "weights"
            )
        request.weights = weights
    return request


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


def _count(numbers: _Numbers, field: str) -> int:
    raw_bytes = sum(map(len, numbers.get(f"{field}_bytes", ())))
    packed = sum(map(count_varints, numbers.get(field, ())))
    return packed + raw_bytes // DTYPES[field].itemsize


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


def _add_strings(request: LookupRequest, message: embedding_pb2.EmbedRequest) -> None:
    """Merges the hashes of string_ids into the ids, at the keys that string_keys names."""
    check_unique("string_keys", message.string_keys)
    string_keys = frozenset(message.string_keys)
    if stray := string_keys.difference(request.features):
        raise InvalidRequestError(
            f"string_keys names {shortened(min(stray))!r}, keys does not", "string_keys"
        )
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
    request.ids, request.strings = merge_string_ids(
        request.ids, strings, request.features, is_string, counts
    )
    request.string_features = string_keys


def _array(field: str, numbers: _Numbers, factor: int, limits: Limits, limit: str) -> np.ndarray:
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
