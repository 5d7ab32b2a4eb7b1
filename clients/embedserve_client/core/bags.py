"""Converts the ids or weights of one feature, in any accepted format, to flat numpy arrays.

Accepts lists, lists of lists, dense arrays, (values, lengths) pairs and columns. Returns checked
flat values with one length per example. Lists cost a step per id; arrays do not. `batch` joins the
features and checks them against each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import NDArray

from embedserve_client.core.columns import (
    Column,
    ColumnTensor,
    flat_and_lengths,
    is_column,
    is_tensor,
    numpy_of,
)
from embedserve_client.core.short_repr import short
from embedserve_client.errors import InvalidRequest

Values: TypeAlias = (
    Sequence[Any]
    | Sequence[Sequence[Any]]
    | NDArray[Any]
    | ColumnTensor
    | tuple[NDArray[Any] | ColumnTensor, NDArray[Any] | ColumnTensor]
    | Column
)
"""Ids or weights of one feature, in one of these formats:

- A list of lists has one bag per example. A flat list is a batch of one example.
- An array [B] has one value per example. An array [B, k] has k values per example.
- A pair of arrays is (values, lengths): the values bag after bag, and the length of each bag.
- A column (a pandas or polars Series, or a pyarrow array) of lists has one bag per example. A
  column of values has one value per example. A null is an empty bag.

A torch tensor is accepted in place of an array. Ids are integers or strings.
"""

_INT32_MAX = 2**31 - 1
_INT64 = np.iinfo(np.int64)
_FORMATS = (
    "a list of ids, a list of lists, an array [B] or [B, k], a pair (ids, lengths), or a column"
)


@dataclass(frozen=True)
class Bags:
    """Flat values, bag after bag, and the number of values per example (int32 [B])."""

    flat: NDArray[Any] | list[Any]
    lengths: NDArray[np.int32]


def split(field: str, value: object) -> Bags:
    """Returns flat values and lengths of ``value``, in any format of `Values`; does not check
    dtypes."""
    value = array_of(field, value)
    if isinstance(value, np.ndarray):
        return _split_array(field, value)
    if is_column(value):
        return Bags(*flat_and_lengths(field, value))
    if isinstance(value, tuple) and any(map(_is_array, value)):
        return _split_pair(field, tuple(array_of(field, part) for part in value))
    if _is_sequence(value):
        return _split_sequence(field, value)
    raise InvalidRequest(f"{field}: {short(value)} is not {_FORMATS}", field=field)


def strings_of(field: str, bags: Bags) -> list[str] | None:
    """Returns the flat ids if they are strings, as decided by the first id; otherwise None."""
    flat = bags.flat if isinstance(bags.flat, list) else _listed(bags.flat)
    if not flat or not isinstance(flat[0], str):
        return None
    bags = Bags(flat, bags.lengths)
    _check_types(field, bags, (str,), "a string like the ids before it")
    strings = list(map(str, flat))
    try:
        "".join(strings).encode()
    except UnicodeEncodeError:
        first = next(at for at, one in enumerate(strings) if not _is_text(one))
        raise _wrong(field, bags, first, "is no text: half of a surrogate pair") from None
    return strings


def array_of(field: str, value: Any) -> Any:
    """Returns a tensor or a subclass of an array as a plain array, and other values unchanged.
    Raises InvalidRequest for an array with masked values, whose data would be sent without the
    mask."""
    if is_tensor(value):
        return numpy_of(field, value)
    if not isinstance(value, np.ndarray):
        return value
    if np.ma.is_masked(value):
        raise InvalidRequest(f"{field}: the array has masked values", field=field)
    return np.asarray(value)  # reshape(-1) leaves a matrix two-dimensional


def _is_array(part: object) -> bool:
    return isinstance(part, np.ndarray) or is_tensor(part)


def _listed(array: NDArray[Any]) -> list[Any]:
    """Returns the values of an array whose dtype may hold strings; otherwise an empty list."""
    return array.tolist() if array.dtype.kind in "UTO" else []


def _is_text(string: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in string)


def ids_of(field: str, bags: Bags) -> NDArray[np.int64]:
    """Returns the flat ids as int64. Raises InvalidRequest for the first id that is not an integer
    or does not fit."""
    if isinstance(bags.flat, list):
        _check_types(field, bags, (int, np.integer), "an integer id")
        return _ids_of_list(field, bags)
    if bags.flat.size and bags.flat.dtype.kind not in "iu":
        raise _wrong(field, bags, 0, f"is {bags.flat.dtype}, not an integer id")
    if bags.flat.dtype.kind == "u":
        too_large = np.flatnonzero(bags.flat > _INT64.max)
        if too_large.size:
            raise _wrong(field, bags, int(too_large[0]), "does not fit in int64")
    return bags.flat.astype(np.int64, copy=False)


def weights_of(field: str, bags: Bags) -> NDArray[np.float32]:
    """Returns the flat weights as float32. Raises InvalidRequest for the first weight that is not a
    finite number."""
    if isinstance(bags.flat, list):
        _check_types(field, bags, (int, float, np.integer, np.floating), "a number")
    elif bags.flat.size and bags.flat.dtype.kind not in "iuf":
        raise _wrong(field, bags, 0, f"is {bags.flat.dtype}, not a number")
    with np.errstate(over="ignore"):
        weights = _floats_of(field, bags).astype(np.float32, copy=False)
    infinite = np.flatnonzero(~np.isfinite(weights))
    if infinite.size:
        raise _wrong(field, bags, int(infinite[0]), "is not a finite float32")
    return weights


def _split_array(field: str, array: NDArray[Any]) -> Bags:
    if array.ndim not in (1, 2):
        raise InvalidRequest(
            f"{field}: an array of shape {list(array.shape)} is neither [B] nor [B, k]",
            field=field,
        )
    per_example = array.shape[1] if array.ndim == 2 else 1
    return Bags(array.reshape(-1), np.full(len(array), per_example, dtype=np.int32))


def _split_pair(field: str, pair: tuple[Any, ...]) -> Bags:
    if len(pair) != 2 or not all(isinstance(part, np.ndarray) for part in pair):
        raise InvalidRequest(
            f"{field}: a tuple with an array must be (ids, lengths), both arrays", field=field
        )
    flat, lengths = pair
    if flat.ndim != 1 or lengths.ndim != 1:
        shapes = f"{list(flat.shape)} and {list(lengths.shape)}"
        raise InvalidRequest(
            f"{field}: the pair has shapes {shapes}, not one dimension", field=field
        )
    _check_lengths(field, lengths, flat.size)
    return Bags(flat, lengths.astype(np.int32, copy=False))


def _check_lengths(field: str, lengths: NDArray[Any], flat_size: int) -> None:
    if lengths.size and lengths.dtype.kind not in "iu":
        raise InvalidRequest(f"{field}: lengths are {lengths.dtype}, not integers", field=field)
    outside = np.flatnonzero((lengths < 0) | (lengths > _INT32_MAX))
    if outside.size:
        at = f"{field}[{outside[0]}]"
        raise InvalidRequest(f"{at}: {lengths[outside[0]]} is no length", field=at)
    total = int(lengths.sum(dtype=np.int64))
    if total != flat_size:
        raise InvalidRequest(
            f"{field}: the lengths sum up to {total}, but there are {flat_size} values",
            field=field,
        )


def _split_sequence(field: str, value: Sequence[Any]) -> Bags:
    if value and is_tensor(value[0]):
        value = [array_of(f"{field}[{at}]", bag) for at, bag in enumerate(value)]
    if not value or not _is_bag(value[0]):
        return Bags(list(value), np.array([len(value)], dtype=np.int32))
    for example, bag in enumerate(value):
        if not _is_bag(bag):
            at = f"{field}[{example}]"
            raise InvalidRequest(f"{at}: {short(bag)} is not a list", field=at)
    lengths = np.fromiter(map(len, value), dtype=np.int32, count=len(value))
    return Bags(list(chain.from_iterable(value)), lengths)


def _is_bag(value: object) -> bool:
    return _is_sequence(value) or (isinstance(value, np.ndarray) and value.ndim == 1)


def _is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _check_types(field: str, bags: Bags, allowed: tuple[type, ...], what: str) -> None:
    """Raises InvalidRequest for the first value of another type. Rejects bool, although Python's
    bool is an int, because a bool id is a mistake."""
    wrong = {
        kind for kind in set(map(type, bags.flat)) if kind is bool or not issubclass(kind, allowed)
    }
    if wrong:
        first = next(at for at, value in enumerate(bags.flat) if type(value) in wrong)
        name = type(bags.flat[first]).__name__
        raise _wrong(field, bags, first, f"is {name}, not {what}")


def _ids_of_list(field: str, bags: Bags) -> NDArray[np.int64]:
    ids = list(map(int, bags.flat))
    try:
        return np.array(ids, dtype=np.int64)
    except OverflowError:
        first = next(at for at, value in enumerate(ids) if not _INT64.min <= value <= _INT64.max)
        raise _wrong(field, bags, first, "does not fit in int64") from None


def _floats_of(field: str, bags: Bags) -> NDArray[Any]:
    if not isinstance(bags.flat, list):
        return bags.flat
    try:
        return np.array(bags.flat, dtype=np.float64)
    except OverflowError:
        raise InvalidRequest(f"{field}: a weight does not fit in float32", field=field) from None


def _wrong(field: str, bags: Bags, flat_index: int, why: str) -> InvalidRequest:
    """Returns the error for one value. Its field names the example: "features.movie[3]: 2.5 is
    …"."""
    example = int(np.searchsorted(np.cumsum(bags.lengths), flat_index, side="right"))
    at = f"{field}[{example}]"
    return InvalidRequest(f"{at}: {short(_plain(bags.flat[flat_index]))} {why}", field=at)


def _plain(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else value
