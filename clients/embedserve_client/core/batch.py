"""A request as flat, feature-major arrays: the fields of a KeyedJaggedTensor, without torch.

Joins the features of a mapping or table, or reads a KeyedJaggedTensor. Checks the features against
each other: equal batch sizes, and weights with the shape of the ids. `messages` encodes the
resulting `RequestBatch`.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import NDArray

from embedserve_client.core.bags import (
    Bags,
    Values,
    array_of,
    ids_of,
    split,
    strings_of,
    weights_of,
)
from embedserve_client.core.columns import Column, check_distinct, columns_of, is_column, numpy_of
from embedserve_client.core.short_repr import short
from embedserve_client.errors import InvalidRequest

_BAG = re.compile(r"(?P<argument>features|weights)\[(?P<bag>\d+)\]")


class JaggedTensor(Protocol):
    """The methods of a TorchRec KeyedJaggedTensor that the client calls."""

    def keys(self) -> Sequence[str]: ...
    def values(self) -> Any: ...
    def lengths(self) -> Any: ...
    def weights_or_none(self) -> Any: ...


Features: TypeAlias = Mapping[str, Values] | JaggedTensor | Column
"""Ids of each feature by its name: a mapping, a KeyedJaggedTensor, or a table with a column per
feature. `Values` lists the formats of the ids."""
Weights: TypeAlias = Mapping[str, Values]


@dataclass(frozen=True)
class RequestBatch:
    """Arrays of one request, feature-major.

    Attributes:
        ids: int64, the ids of all keys but string_keys.
        lengths: int32 [len(keys) * batch_size], of all keys.
        weights: float32 [sum(lengths)], of all keys; None if there are none.
        string_keys: keys whose ids are strings.
        string_ids: ids of string_keys.
    """

    keys: tuple[str, ...]
    batch_size: int
    ids: NDArray[np.int64]
    lengths: NDArray[np.int32]
    weights: NDArray[np.float32] | None
    string_keys: tuple[str, ...] = ()
    string_ids: Sequence[str] = ()


def batch_of(features: Features, weights: Weights | None = None) -> RequestBatch:
    """Returns the batch of a mapping, a table or a KeyedJaggedTensor. Raises InvalidRequest with
    the reason if it is invalid."""
    if weights is not None and not isinstance(weights, Mapping):
        raise InvalidRequest(
            f"weights: {short(weights)} is no mapping from features to weights", field="weights"
        )
    if is_column(features):
        features = columns_of(features)
    if isinstance(features, Mapping):
        return _batch_of_mapping(features, weights or {})
    if not _is_jagged_tensor(features):
        raise InvalidRequest(
            f"features: {short(features)} is no mapping, no table and no KeyedJaggedTensor",
            field="features",
        )
    if weights is not None:
        raise InvalidRequest(
            "weights: a KeyedJaggedTensor carries its own; give none beside it", field="weights"
        )
    return _batch_of_jagged_tensor(features)


def _batch_of_mapping(features: Mapping[str, Values], weights: Weights) -> RequestBatch:
    _check_keys(features)
    bags = {key: split(f"features.{key}", value) for key, value in features.items()}
    lengths = [bag.lengths for bag in bags.values()]
    _check_batch_sizes(bags)
    strings = {
        key: found
        for key, bag in bags.items()
        if (found := strings_of(f"features.{key}", bag)) is not None
    }
    ids = [ids_of(f"features.{key}", bag) for key, bag in bags.items() if key not in strings]
    return RequestBatch(
        keys=tuple(features),
        batch_size=len(lengths[0]),
        ids=np.concatenate(ids) if ids else np.zeros(0, np.int64),
        lengths=np.concatenate(lengths),
        weights=_joined_weights(weights, bags) if weights else None,
        string_keys=tuple(strings),
        string_ids=list(chain.from_iterable(strings.values())),
    )


def _check_keys(keys: Collection[object]) -> None:
    if not keys:
        raise InvalidRequest("features: the request names none", field="features")
    for key in keys:
        if not isinstance(key, str) or not key:
            raise InvalidRequest(f"features: {key!r} is no feature name", field="features")


def _check_batch_sizes(bags: Mapping[str, Bags]) -> None:
    first, *others = bags
    size = len(bags[first].lengths)
    if size == 0:
        raise InvalidRequest(f"features.{first}: it has no example", field=f"features.{first}")
    for key in others:
        if len(bags[key].lengths) != size:
            raise InvalidRequest(
                f"features.{key}: {len(bags[key].lengths)} examples, "
                f"but features.{first} has {size}",
                field=f"features.{key}",
            )


def _joined_weights(weights: Weights, bags: Mapping[str, Bags]) -> NDArray[np.float32]:
    """Returns one weight per id of all features; features without weights get weights of 1."""
    for key in weights:
        if key not in bags:
            raise InvalidRequest(
                f"weights.{key}: the request has no feature {key!r}", field=f"weights.{key}"
            )
    return np.concatenate(
        [
            _weights_like(f"weights.{key}", weights[key], bag)
            if key in weights
            else np.ones(len(bag.flat), dtype=np.float32)
            for key, bag in bags.items()
        ]
    )


def _weights_like(field: str, value: Values, ids: Bags) -> NDArray[np.float32]:
    """Returns weights with the shape of the ids. A flat array may hold one weight per id, in
    order."""
    value = array_of(field, value)
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.size == len(ids.flat):
        return weights_of(field, Bags(value, ids.lengths))
    given = split(field, value)
    if not np.array_equal(given.lengths, ids.lengths):
        raise _misshapen(field, given.lengths, ids.lengths)
    return weights_of(field, given)


def _misshapen(field: str, given: NDArray[np.int32], expected: NDArray[np.int32]) -> InvalidRequest:
    if len(given) != len(expected):
        why = f"{len(given)} examples with {given.sum()} weights"
        wants = f"{len(expected)} with {expected.sum()} ids"
        return InvalidRequest(f"{field}: {why}, but the feature has {wants}", field=field)
    example = int(np.flatnonzero(given != expected)[0])
    at = f"{field}[{example}]"
    shapes = f"{_counted(given[example], 'weight')} for {_counted(expected[example], 'id')}"
    return InvalidRequest(f"{at}: {shapes}", field=at)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _is_jagged_tensor(features: object) -> TypeGuard[JaggedTensor]:
    return all(hasattr(features, name) for name in ("keys", "values", "lengths", "weights_or_none"))


def _batch_of_jagged_tensor(tensor: JaggedTensor) -> RequestBatch:
    keys = tuple(tensor.keys())
    _check_keys(keys)
    check_distinct(keys)
    if getattr(tensor, "variable_stride_per_key", bool)():
        raise InvalidRequest(
            "features: the KeyedJaggedTensor has another batch size for every key",
            field="features",
        )
    lengths = numpy_of("features", tensor.lengths())
    batch_size = _batch_size(keys, lengths)
    weights = tensor.weights_or_none()
    try:
        bags = split("features", (tensor.values(), lengths))
        return RequestBatch(
            keys=keys,
            batch_size=batch_size,
            ids=ids_of("features", bags),
            lengths=bags.lengths,
            weights=None if weights is None else _weights_like("weights", weights, bags),
        )
    except InvalidRequest as error:
        raise _with_key(error, keys, batch_size) from None


def _with_key(error: InvalidRequest, keys: Sequence[str], batch_size: int) -> InvalidRequest:
    """Returns an error about one bag of all keys with the key and the example of the bag."""
    found = _BAG.fullmatch(error.field)
    if found is None:
        return error
    key, example = divmod(int(found["bag"]), batch_size)
    at = f"{found['argument']}.{keys[key]}[{example}]"
    return InvalidRequest(at + error.message.removeprefix(error.field), field=at)


def _batch_size(keys: Sequence[str], lengths: NDArray[Any]) -> int:
    if len(lengths) % len(keys):
        raise InvalidRequest(
            f"features: {len(lengths)} lengths do not divide by {len(keys)} keys",
            field="features",
        )
    if not len(lengths):
        raise InvalidRequest("features: it has no example", field="features")
    return len(lengths) // len(keys)
