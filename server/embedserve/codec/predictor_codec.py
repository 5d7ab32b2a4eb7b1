"""Codec of TorchRec's predictor.Predictor: PredictionRequest and PredictionResponse.

A request names neither its model nor its features. It is addressed to the default model and has
that model's features, in the model's order. Numbers become no Python objects, and unused fields are
not decoded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from urllib.parse import quote

import msgspec
import numpy as np

from embedserve.codec.open_inference.outputs import ALL_KEYS, OutputTensor, is_quick, tensors_of
from embedserve.codec.open_inference.tensors import INLINE_TENSOR_BYTES_MAX
from embedserve.codec.protobuf_fields import (
    LENGTH_DELIMITED,
    VARINT,
    TooManyFieldsError,
    extract_fields,
    field_tag,
    read_varint,
    tag_of,
    varint,
)
from embedserve.config import DEFAULT_LIMITS, Limits
from embedserve.errors import InvalidRequestError, RequestTooLargeError
from embedserve.lookup_types import (
    EncodedResponse,
    LookupRequest,
    LookupResult,
    WouldBlockError,
    with_size,
)
from embedserve.request_checks import check_feature_count, parse_min_seq
from embedserve_proto import predictor_pb2 as pb

logger = logging.getLogger(__name__)

FIELDS_MAX = 64
"""Fields of a message, at either depth. Serializers write six, so the bound leaves ample room."""
IDS, SCORED = "id_list_features", "id_score_list_features"
_INT64, _INT32, _FLOAT32 = np.dtype("<i8"), np.dtype("<i4"), np.dtype("<f4")
_INT32_BITS, _INT32_SIGN = 0xFFFF_FFFF, 0x8000_0000

_REQUEST = {field_tag(pb.PredictionRequest, "batch_size", VARINT): "batch_size"} | {
    field_tag(pb.PredictionRequest, name): name
    for name in (IDS, SCORED, "float_features", "embedding_features", "unary_features")
}
_SPARSE = {field_tag(pb.SparseFeatures, "num_features", VARINT): "num_features"} | {
    field_tag(pb.SparseFeatures, name): name for name in ("lengths", "values", "weights")
}
NOT_READ = frozenset({"float_features", "embedding_features"})

SEQ_HEADER = b"x-embedding-seq"
"""Trailing metadata with the seq of the rows."""
MISSING_IDS_HEADER = b"x-embedding-missing-ids"
"""Trailing metadata with the numbers of ids whose rows no server could look up."""
MISSING_IDS_BYTES_MAX = 4096
"""Bytes of that metadata: grpcio accepts 8 KiB for all metadata of a response."""
MIN_SEQ_HEADER = b"x-min-seq"
"""Metadata with the min_seq of a request."""
_ENTRY_TAG = bytes([field_tag(pb.PredictionResponse, "predictions")])
# A map's entry has its key first (protobuf.dev, "Maps").
_KEY_TAG, _VALUE_TAG = (bytes([tag_of(number, LENGTH_DELIMITED)]) for number in (1, 2))
_DATA_TAG = bytes([field_tag(pb.FloatVec, "data")])


class _Sparse(msgspec.Struct):
    """The fields of a SparseFeatures message, not decoded or checked yet."""

    name: str
    num_features: int = 0
    lengths: bytes | memoryview = b""
    values: bytes | memoryview = b""
    weights: bytes | memoryview = b""

    def wrong(self, field_name: str, problem: str) -> InvalidRequestError:
        field = f"{self.name}.{field_name}"
        return InvalidRequestError(f"{field} {problem}", field)


_Fields = Mapping[str, Sequence[memoryview]]
"""Values of the fields of a message, by name."""
_Bags = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""(ids, lengths, weights) of some of the features, in the layout of a LookupRequest."""


def decode_request(
    body: bytes,
    model: str = "",
    limits: Limits = DEFAULT_LIMITS,
    min_seq: bytes | None = None,
    *,
    is_inline: bool = False,
) -> LookupRequest:
    """Returns the PredictionRequest in ``body``, addressed to the default model. Its features have
    no names.

    Args:
        min_seq: value of MIN_SEQ_HEADER; None if absent.

    Raises:
        InvalidRequestError: the body is not a PredictionRequest, or not a batch of jagged ids, or
            ``min_seq`` is no number.
        RequestTooLargeError: the body has more than ``limits`` allow.
        WouldBlockError: ``is_inline``, and it would take long.
    """
    if is_inline and len(body) > INLINE_TENSOR_BYTES_MAX:
        raise WouldBlockError
    batch_size, of_ids, of_scored = _read(body)
    if batch_size < 1:
        raise InvalidRequestError(f"batch_size is {batch_size}: an empty batch", "batch_size")
    if batch_size > limits.request_examples_max:
        raise RequestTooLargeError(
            f"batch_size is {batch_size}, {limits.describe('request_examples_max')}", "batch_size"
        )
    given = [
        _bags(one, batch_size, limits)
        for one in (of_ids, of_scored)
        if one.num_features or one.lengths or one.values or one.weights
    ]
    if not given:
        raise InvalidRequestError(
            f"num_features of {IDS} and of {SCORED} are 0: there are no ids", f"{IDS}.num_features"
        )
    ids, lengths, weights = given[0]
    if len(given) > 1:
        (plain, plain_lengths, _), (scored, scored_lengths, scores) = given
        assert scores is not None
        ids = np.concatenate([plain, scored])
        lengths = np.concatenate([plain_lengths, scored_lengths])
        weights = np.concatenate([np.ones(plain.size, _FLOAT32), scores])
    request = LookupRequest(model, (), ids, lengths, weights, batch_size)
    if min_seq is not None:
        request.min_seq = parse_min_seq(MIN_SEQ_HEADER.decode(), min_seq.decode("latin-1"))
    return request


def _read(body: bytes) -> tuple[int, _Sparse, _Sparse]:
    """Returns (batch_size, id_list_features, id_score_list_features), not checked yet."""
    found = _extract(body, _REQUEST)
    for name in NOT_READ:
        for message in found.get(name, ()):
            _extract(message, {})  # it must be well-formed even so
            if len(message):
                log_ignored(name)
    unary = _merged("unary_features", found)
    if unary.num_features or unary.values:
        raise unary.wrong("num_features", f"is {unary.num_features}: no model has unary features")
    batch_size = _int32(found["batch_size"]) if "batch_size" in found else 0
    return batch_size, _merged(IDS, found), _merged(SCORED, found)


def _merged(name: str, found: _Fields) -> _Sparse:
    """Merges the messages of the field ``name`` as protobuf parsers do: of a repeated scalar field
    the last value counts."""
    merged = _Sparse(name)
    for message in found.get(name, ()):
        for field, values in _extract(message, _SPARSE).items():
            setattr(merged, field, _int32(values) if field == "num_features" else values[-1])
    return merged


def _extract(message: bytes | memoryview, tags: Mapping[int, str]) -> _Fields:
    """Returns the values of the fields that ``tags`` names."""
    try:
        return extract_fields(message, tags, FIELDS_MAX)[0]
    except ValueError as error:
        raise InvalidRequestError(f"body is not a PredictionRequest: {error}", "body") from error
    except TooManyFieldsError as error:
        raise RequestTooLargeError(
            f"body has over {FIELDS_MAX} fields in one message", "body"
        ) from error


def _int32(values: Sequence[memoryview]) -> int:
    value = read_varint(values[-1], 0)[0] & _INT32_BITS
    return value - (_INT32_BITS + 1) if value & _INT32_SIGN else value


@cache
def log_ignored(field: str) -> None:
    """Logs once per process that ``field`` is ignored. TorchRec's clients send such fields with
    every request."""
    logger.info("Predictor/Predict: %s are not read, this server has the tables alone", field)


def _bags(one: _Sparse, batch_size: int, limits: Limits) -> _Bags:
    features = one.num_features
    if features < 0:
        raise one.wrong("num_features", f"is {features}")
    check_feature_count(f"{one.name}.num_features", features, limits)
    bags = features * batch_size
    if len(one.lengths) != bags * _INT32.itemsize:
        raise one.wrong(
            "lengths",
            f"has {len(one.lengths)} bytes, not {bags * _INT32.itemsize}: int32 for each of "
            f"{features} features and {batch_size} examples",
        )
    lengths = _aligned(one.lengths, _INT32)
    if lengths.size and lengths.min() < 0:
        at = int((lengths < 0).argmax())
        raise one.wrong("lengths", f"has {lengths[at]} at {at}: a bag has no fewer than 0 ids")
    count = int(lengths.sum(dtype=np.int64))
    if count > limits.request_ids_max:
        field = f"{one.name}.lengths"
        raise RequestTooLargeError(
            f"{field} adds up to {count} ids, {limits.describe('request_ids_max')}", field
        )
    return _ids(one, count), lengths, _weights(one, count)


def _ids(one: _Sparse, count: int) -> np.ndarray:
    """Returns the ids as int64 [count]. Clients send their tensor's dtype; the number of bytes
    determines its width."""
    nbytes = len(one.values)
    if nbytes == count * _INT64.itemsize:
        return _aligned(one.values, _INT64)
    if nbytes == count * _INT32.itemsize:
        return np.frombuffer(one.values, _INT32).astype(_INT64)
    raise one.wrong(
        "values",
        f"has {nbytes} bytes, but the lengths add up to {count} ids, which take "
        f"{count * _INT64.itemsize} as int64, {count * _INT32.itemsize} as int32",
    )


def _weights(one: _Sparse, count: int) -> np.ndarray | None:
    nbytes = len(one.weights)
    if one.name == IDS:
        if nbytes:
            raise one.wrong("weights", f"has {nbytes} bytes: weighted ids are {SCORED}")
        return None
    if nbytes != count * _FLOAT32.itemsize:
        raise one.wrong(
            "weights",
            f"has {nbytes} bytes, not {count * _FLOAT32.itemsize}: float32 for each of {count} ids",
        )
    return _aligned(one.weights, _FLOAT32)


def _aligned(values: bytes | memoryview, dtype: np.dtype) -> np.ndarray:
    """Returns a copy of ``values``, which the body may have at any position."""
    return np.frombuffer(bytes(values), dtype)


def estimate_size(body: bytes) -> tuple[int, int]:
    """Returns (bags, ids) of a PredictionRequest; the ids are underestimated where they are int32.
    Returns (0, 0) for an invalid body."""
    bags = ids = 0
    try:
        found = _extract(body, _REQUEST)
        for message in (*found.get(IDS, ()), *found.get(SCORED, ())):
            numbers = _extract(message, _SPARSE)
            bags += sum(len(one) // _INT32.itemsize for one in numbers.get("lengths", ()))
            ids += sum(len(one) // _INT64.itemsize for one in numbers.get("values", ()))
    except (InvalidRequestError, RequestTooLargeError):
        return 0, 0
    return bags, ids


# Responses


def try_encode_inline(result: LookupResult) -> EncodedResponse | None:
    """Returns (the chunks of a PredictionResponse, their byte count), or None where encoding would
    take long."""
    return with_size([*encode_chunks(result)]) if is_quick(result, ALL_KEYS) else None


def encode_chunks(result: LookupResult) -> Iterator[bytes | memoryview]:
    """Yields the chunks of any response in order, each quick to encode."""
    starts, tensors = _starts(result)
    for start, one in zip(starts, tensors, strict=True):
        yield start
        for values in one.chunks(result):
            yield np.ascontiguousarray(values, _FLOAT32).data


def response_headers(result: LookupResult) -> list[tuple[bytes, bytes]]:
    """Returns the seq of the rows and the counts of missing ids as headers, as a PredictionResponse
    has no field for them."""
    headers = [] if result.seq is None else [(SEQ_HEADER, b"%d" % result.seq)]
    if result.missing_ids is not None:
        headers.append((MISSING_IDS_HEADER, _header_counts(result.missing_ids)))
    return headers


def _header_counts(counts: Mapping[str, int]) -> bytes:
    """Returns ``counts`` as FEATURE=COUNT,… with percent-encoded names. Counts that have no room
    are left out; the last entry is then "*"."""
    entries: list[bytes] = []
    room = MISSING_IDS_BYTES_MAX - len(b",*")
    for feature, count in counts.items():
        entry = f"{quote(feature, safe='')}={count}".encode()
        room -= len(entry) + 1
        if room < 0:
            entries.append(b"*")
            break
        entries.append(entry)
    return b",".join(entries)


def _starts(result: LookupResult) -> tuple[Sequence[bytes], Sequence[OutputTensor]]:
    """Returns (the bytes before the values of each key, the tensors of the keys). For pooled
    responses they are cached with the model, by the number of examples."""
    is_cached = not result.extra_chunks and result.lengths is None
    key = ("predict", len(result.values)) if is_cached else None
    made = None if key is None else result.model.response_prefix_cache.get(key)
    if made is None:
        tensors = tensors_of(result)
        made = [_start(one) for one in tensors], tensors
        result.model.cache_response_prefix(key, made)
    starts: tuple[Sequence[bytes], Sequence[OutputTensor]] = made
    return starts


def _start(tensor: OutputTensor) -> bytes:
    """Returns an entry of the map without its values."""
    nbytes = tensor.shape[0] * tensor.shape[1] * _FLOAT32.itemsize
    name, data = tensor.name.encode(), _DATA_TAG + varint(nbytes)
    head = _KEY_TAG + varint(len(name)) + name + _VALUE_TAG + varint(len(data) + nbytes) + data
    return _ENTRY_TAG + varint(len(head) + nbytes) + head
