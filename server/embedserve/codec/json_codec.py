"""The JSON of POST /embed: request bytes to a LookupRequest, a LookupResult to answer bytes.

The fast path only tells right from wrong. What exactly is wrong is found by diagnose.py, on
the slow path, and said with field and value.
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from typing import Any, NoReturn

import msgspec
import numpy as np
import orjson

from embedserve.codec.diagnose import diagnose
from embedserve.errors import EmbedServeError, InvalidRequestError
from embedserve.types import LookupRequest, LookupResult, ModelInfo


class _Body(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    features: dict[str, list[list[int] | int]]
    weights: dict[str, list[list[float] | float]] | None = None


_DECODER = msgspec.json.Decoder(_Body)


def decode_request(body: bytes, model: str) -> LookupRequest:
    """The request in ``body``, to ``model`` ("" for the default model).

    Raises:
        InvalidRequestError: not JSON, or not a batch of jagged ids; names field and value.
    """
    try:
        parsed = _DECODER.decode(body)
        bags = list(parsed.features.values())
        batch_size = _batch_size(bags)
        lengths, ids = _flatten(bags, batch_size, "q")
        weights = None
        if parsed.weights is not None:
            weights = _flatten_weights(parsed, lengths, batch_size)
    except (msgspec.DecodeError, TypeError, ValueError, OverflowError, RecursionError) as error:
        _refuse(body, error)
    return LookupRequest(
        model=model,
        features=tuple(parsed.features),
        ids=np.frombuffer(ids, np.int64),
        lengths=np.frombuffer(lengths, np.int32),
        weights=weights,
        batch_size=batch_size,
    )


def _batch_size(features: list[list[Any]]) -> int:
    """Examples of the request: a feature given as one flat list is a batch of one."""
    first = features[0] if features else None
    if not first:
        # Either wrong, or an empty bag next to features that tell the batch size.
        if not any(features):
            raise ValueError
        return 1
    return len(first) if type(first[0]) is list else 1


def _flatten(features: list[Any], batch_size: int, typecode: str) -> tuple[array[int], array[Any]]:
    """(lengths of all bags, their values) feature-major; TypeError or ValueError if ragged."""
    lengths: list[int] = []
    values: list[int] = []
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
    return array("i", lengths), array(typecode, values)


def _flatten_weights(parsed: _Body, lengths: array[int], batch_size: int) -> np.ndarray:
    """float32, one for each id: those given, and 1 for features without."""
    given = parsed.weights or {}
    if not given.keys() <= parsed.features.keys():
        raise ValueError
    weights = [
        given[feature] if feature in given else _ones(bags)
        for feature, bags in parsed.features.items()
    ]
    weight_lengths, values = _flatten(weights, batch_size, "d")
    if weight_lengths != lengths:
        raise ValueError
    with np.errstate(over="ignore"):
        as_float32 = np.frombuffer(values, np.float64).astype(np.float32)
    if not np.isfinite(as_float32).all():
        raise ValueError
    return as_float32


def _ones(bags: list[Any]) -> list[Any]:
    if bags and type(bags[0]) is list:
        return [[1.0] * len(bag) for bag in bags]
    return [1.0] * len(bags)


def _refuse(body: bytes, error: Exception) -> NoReturn:
    problem = diagnose(body)
    if problem is None:
        problem = InvalidRequestError(f"body: {error}", "body")
    raise problem from error


def encode_result(result: LookupResult) -> bytes:
    """{"model", "version", "keys", "length_per_key", "values": [B][sum(length_per_key)]}.

    The numbers are the shortest that read back as the same float32. A value that is not finite
    (a weighted sum past the largest float32) is null, as JSON has no infinity; protobuf carries
    it as it is.
    """
    values = orjson.dumps(result.values, option=orjson.OPT_SERIALIZE_NUMPY)
    return b"%b%b}" % (_prefix(result.model), values)


@lru_cache(maxsize=256)
def _prefix(model: ModelInfo) -> bytes:
    head = orjson.dumps(
        {
            "model": model.name,
            "version": model.version,
            "keys": model.keys,
            "length_per_key": model.length_per_key,
        }
    )
    return head[:-1] + b',"values":'


def encode_error(error: EmbedServeError) -> bytes:
    """{"error": {"code", "message", "field"}}: the one shape of every REST error."""
    return orjson.dumps(
        {"error": {"code": error.code, "message": error.message, "field": error.field}}
    )
