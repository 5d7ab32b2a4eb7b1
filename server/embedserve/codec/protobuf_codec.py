"""The protobuf codec of gRPC and POST /embed: an EmbedRequest to a LookupRequest, a LookupResult to
an EmbedResponse.

Callers repeat the same model and keys. A cached prefix of a message, up to the tag of ids_bytes, is
therefore matched byte for byte. Behind it are only the bytes of two arrays, which are located
without parsing the message. Fields that all responses of a model share are encoded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from embedserve.codec.embed_request_fields import (
    DTYPES,
    IDS_TAG,
    INLINE_FIELDS_MAX,
    INT32,
    INT64,
    LENGTHS_TAG,
    NUMBERS,
    NumericFields,
    array_of,
    read_array,
)
from embedserve.codec.json_errors import counted
from embedserve.codec.protobuf_fields import (
    VARINT,
    TooManyFieldsError,
    extract_fields,
    field_tag,
    read_varint,
    varint,
)
from embedserve.codec.string_ids import merge_string_ids
from embedserve.codec.template_cache import TemplateCache
from embedserve.config import DEFAULT_LIMITS, Limits
from embedserve.errors import EmbedServeError, InvalidRequestError, RequestTooLargeError, shortened
from embedserve.lookup_types import (
    EncodedResponse,
    LookupRequest,
    LookupResult,
    OutputOptions,
    WouldBlockError,
    with_size,
)
from embedserve.model_info import ModelInfo
from embedserve.model_names import qualified_model_name
from embedserve.request_checks import (
    check_feature_count,
    check_lengths,
    check_min_seq,
    check_unique,
)
from embedserve_proto import embedding_pb2

_frombuffer = np.frombuffer
_FLOAT32, _FLOAT16 = np.dtype("<f4"), np.dtype("<f2")
VALUES_TAG = bytes([field_tag(embedding_pb2.EmbedResponse, "values")])
SEQ_TAG = bytes([field_tag(embedding_pb2.EmbedResponse, "seq", VARINT)])
INLINE_LENGTHS_MAX = 32_768
"""Lengths in a response that is encoded on the event loop's thread, in about a millisecond."""
PREFIX_BYTES_MAX = 4096
INLINE_PROTOBUF_BYTES_MAX = 64 << 10
"""Bytes of a message that is decoded on the event loop's thread, in about a millisecond. Numbers
given as bytes are not counted."""
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
            return array_of(message, field, factor, limits, limit)

        request = _request(message, array, model, limits)
        if message.ids_bytes:
            self._cache_prefix(body, message.model, request.features)
        return request

    def _decode_numbers(
        self,
        body: bytes,
        numbers: NumericFields,
        rest: Sequence[memoryview],
        model: str,
        limits: Limits,
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
            return read_array(field, numbers, factor, limits, limit)

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
                position = len(prefix)
                size, start = body[position], position + 1
                if size >= 0x80:  # most sizes have two bytes
                    size, start = size & 0x7F | body[start] << 7, start + 1
                    if size > 0x3FFF:
                        size, start = read_varint(body, position)
                middle = start + size
                if body[middle] != LENGTHS_TAG:
                    return None
                size, end = body[middle + 1], middle + 2
                if size >= 0x80:
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
        start = _start(model, len(values), values.itemsize, size)
        model.cache_response_prefix((size, values.itemsize), start)
    if result.seq is None:
        return (start, values.data), len(start) + size
    end = SEQ_TAG + varint(result.seq)
    return (start, values.data, end), len(start) + size + len(end)


def encode_chunks(result: LookupResult) -> Iterator[bytes | memoryview]:
    """Yields the chunks of any response in order. None of them takes long to encode."""
    values = [
        one.astype(one.dtype.newbyteorder("<"), copy=False)
        for one in (result.values, *result.extra_chunks)
    ]
    batch_size = sum(map(len, values)) if result.lengths is None else result.lengths.shape[1]
    size = sum(one.nbytes for one in values)
    yield _start(result.model, batch_size, values[0].itemsize, size)
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


def _start(model: ModelInfo, batch_size: int, itemsize: int, size: int) -> bytes:
    """Returns all bytes before the values, which have ``size`` bytes."""
    output_dtype = embedding_pb2.FLOAT16 if itemsize == 2 else embedding_pb2.FLOAT32
    fields = embedding_pb2.EmbedResponse(
        model=model.name,
        version=model.version,
        keys=model.keys,
        length_per_key=model.length_per_key,
        batch_size=batch_size,
        output_dtype=output_dtype,
    )
    return fields.SerializeToString() + VALUES_TAG + varint(size)


def encode_error(error: EmbedServeError) -> bytes:
    """Returns an EmbedResponse with only its error: a stream's response to a failed request."""
    return embedding_pb2.EmbedResponse(
        error=embedding_pb2.Error(code=error.code, message=error.message, field=error.field)
    ).SerializeToString()
