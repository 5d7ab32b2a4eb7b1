"""A request for vectors and its response, independent of the protocol that carries them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from server.fake_engine import Bags, FakeEngine, Weights


@dataclass(frozen=True)
class Request:
    """Bags of ids by feature, and the options that protocols share.

    Attributes:
        model: NAME, NAME@VERSION or NAME@ALIAS; "" is the default model.
        version: version or alias in the field that the protocol has for it.
        output_dtype: "float32", "float16", or "" to leave it out.
        headers: HTTP headers or gRPC metadata.
        timeout_s: deadline in seconds.
        min_seq: smallest seq of the response's rows; None to leave it out.
    """

    bags: Bags
    weights: Weights = field(default_factory=dict)
    model: str = ""
    version: str = ""
    output_dtype: str = ""
    output_keys: Sequence[str] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None
    min_seq: int | None = None


@dataclass(frozen=True)
class EncodedRequest:
    """An encoded request: the path (the method over gRPC), headers, and the body or message."""

    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class RawResponse:
    """A response as received; headers include trailers.

    Attributes:
        status: HTTP status; 0 if the stream was reset before it.
        reset: error code of HTTP/2 with which the server reset the stream; None if it did not.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    reset: int | None = None


@dataclass(frozen=True)
class Vectors:
    """The vectors of a response.

    Attributes:
        model, version: names in the response; None where the protocol does not report them.
        by_key: [B, dim] by key, in the response's order; [n, dim] for an unpooled model.
        unknown_ids: counts by feature; None where the protocol does not report them.
        lengths: number of ids in each bag by key, for an unpooled model; None where the protocol
            has none.
        seq: seq of the last delta in the rows; None where the version follows no deltas.
        missing_ids: counts of ids whose rows no server could look up, by feature.
    """

    model: str | None
    version: str | None
    by_key: Mapping[str, np.ndarray]
    unknown_ids: Mapping[str, int] | None = None
    lengths: Sequence[Sequence[int]] | None = None
    seq: int | None = None
    missing_ids: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Response:
    """A decoded response.

    Attributes:
        code: name of the gRPC code; OK if there are vectors.
        status: HTTP status; None over gRPC.
        field: invalid field of the request; None where the protocol has no place for it.
    """

    code: str
    status: int | None
    headers: Mapping[str, str]
    message: str = ""
    field: str | None = None
    vectors: Vectors | None = None


NOTHING: Mapping[str, int] = {}


def check_vectors(
    response: Response,
    engine: FakeEngine,
    request: Request,
    seq: int | None = None,
    missing_ids: Mapping[str, int] = NOTHING,
) -> None:
    """Compares a response with the oracle: every key, bit by bit, and every field that the protocol
    has."""
    assert response.code == "OK", response
    vectors = response.vectors
    assert vectors is not None
    info = engine.model
    keys = [key for key in info.keys if not request.output_keys or key in request.output_keys]
    assert list(vectors.by_key) == keys
    with np.errstate(over="ignore"):
        expected = expected_by_key(engine, request)
    for key in keys:
        assert vectors.by_key[key].dtype == expected[key].dtype
        assert np.array_equal(vectors.by_key[key], expected[key]), key
    assert vectors.seq == seq
    assert vectors.missing_ids == missing_ids
    if vectors.model is not None:
        assert (vectors.model, vectors.version) == (info.name, str(info.version))
    if vectors.unknown_ids is not None:
        assert vectors.unknown_ids == (engine.expected_unknown(request.bags) or {})
    if vectors.lengths is not None:
        lengths = dict(zip(info.keys, engine.expected_lengths(request.bags), strict=True))
        assert vectors.lengths == [lengths[key] for key in keys]


def expected_by_key(engine: FakeEngine, request: Request) -> dict[str, np.ndarray]:
    """Returns the oracle's vectors of each key."""
    weights = None
    if request.weights:
        weights = {
            feature: request.weights.get(feature, [[1.0] * len(bag) for bag in bags])
            for feature, bags in request.bags.items()
        }
    values = engine.expected(request.bags, weights)
    values = values.astype(request.output_dtype or "float32")
    info = engine.model
    if info.is_pooled:
        ends = np.cumsum(info.length_per_key)[:-1]
        return dict(zip(info.keys, np.split(values, ends, axis=1), strict=True))
    ends = np.cumsum([sum(row) for row in engine.expected_lengths(request.bags)])[:-1]
    return dict(zip(info.keys, np.split(values, ends), strict=True))


def split_by_key(values: np.ndarray, keys: Sequence[str], dims: Sequence[int]) -> dict[str, Any]:
    """Splits the columns of [B, sum(dims)] by key."""
    assert values.shape[1] == sum(dims)
    return dict(zip(keys, np.split(values, np.cumsum(dims)[:-1], axis=1), strict=True))
