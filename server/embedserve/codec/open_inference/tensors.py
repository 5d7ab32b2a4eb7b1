"""Converts named tensors to jagged ids: the inputs of a request, in any encoding, to a
LookupRequest.

A feature F is given as F.ids and F.lengths, with F.weights where ids are weighted. It may also be
given as F alone, [batch, k], with negative ids as padding. Errors name the tensor and its sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from math import prod
from typing import Any

import msgspec
import numpy as np

from embedserve.codec.string_ids import merge_string_ids
from embedserve.config import Limits
from embedserve.errors import InvalidRequestError, RequestTooLargeError, shortened
from embedserve.lookup_types import LookupRequest, WouldBlockError
from embedserve.request_checks import check_feature_count

DTYPES: Mapping[str, np.dtype] = {
    "INT64": np.dtype("<i8"),
    "INT32": np.dtype("<i4"),
    "FP32": np.dtype("<f4"),
}
"""Numpy dtypes of the datatypes of numeric inputs."""
BYTES = "BYTES"
INLINE_TENSOR_BYTES_MAX = 1 << 20
"""Bytes of tensors that the event loop's thread reads and converts, in about a millisecond."""
DATATYPES_BY_ROLE = {"ids": ("INT64", BYTES), "lengths": ("INT32",), "weights": ("FP32",)}
"""Accepted datatypes of a tensor, by the part of the feature that it is."""
_INT64, _INT32, _FLOAT32 = DTYPES["INT64"], DTYPES["INT32"], DTYPES["FP32"]
_UINT32 = np.dtype("<u4")

TensorData = bytes | memoryview | np.ndarray | list[str]
"""The numbers of a tensor, little-endian and row-major; the strings of a BYTES tensor."""
FeatureSizes = tuple[tuple[str, ...], list[int], int]
"""Sizes of features with ids and lengths: (names, count of ids of each, number of examples)."""


class InputTensor(msgspec.Struct):
    """An input of a request; ``data`` is not checked against datatype and shape yet."""

    name: str
    datatype: str
    shape: Sequence[int]
    data: TensorData

    def __str__(self) -> str:
        return f"input {shortened(self.name)!r} ({self.datatype[:16]} {list(self.shape[:8])})"


class _Feature(msgspec.Struct):
    """The tensors given for a feature."""

    ids: InputTensor | None = None
    lengths: InputTensor | None = None
    weights: InputTensor | None = None
    padded: InputTensor | None = None


def wrong(tensor: InputTensor, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{tensor} {problem}", f"inputs.{shortened(tensor.name)}")


def lookup_request(
    model: str, tensors: Sequence[InputTensor], limits: Limits, *, is_inline: bool
) -> LookupRequest:
    """Returns the request with all its inputs.

    Raises:
        InvalidRequestError: the inputs are not a batch of jagged ids.
        RequestTooLargeError: there are more than ``limits`` allow. Raised before they are joined.
        WouldBlockError: ``is_inline``, and it would take long.
    """
    quick = _decode_plain(model, tensors, limits)
    if quick is not None:
        return quick
    features = _by_feature(tensors, limits)
    check_feature_count("inputs", len(features), limits)
    batch_size = _batch_size(features, limits)
    is_jagged = all(one.weights is None and one.padded is None for one in features.values())
    if (
        is_inline
        and not is_jagged
        and sum(len(one.data) for one in tensors) > INLINE_TENSOR_BYTES_MAX
    ):
        raise WouldBlockError
    return _join_features(model, features, batch_size, limits)


def plain_sizes(
    tensors: Sequence[InputTensor], sizes: Sequence[int], limits: Limits
) -> FeatureSizes | None:
    """Returns the sizes of features in the most common layout: F.ids and then F.lengths of each,
    integers in binary. Returns None for any other layout, and for invalid inputs.

    Args:
        sizes: bytes of each of ``tensors``.
    """
    if not tensors or len(tensors) % 2 or len(tensors) > 2 * limits.request_features_max:
        return None
    shape = tensors[1].shape
    if len(shape) != 1 or not 0 < shape[0] <= limits.request_examples_max:
        return None
    names: list[str] = []
    counts: list[int] = []
    lengths_bytes = shape[0] * _INT32.itemsize
    pairs = zip(tensors[::2], tensors[1::2], sizes[::2], sizes[1::2], strict=True)
    for one, bags, ids_bytes, bags_bytes in pairs:
        name = one.name[:-4]
        size = one.shape
        if (
            not name
            or one.name[-4:] != ".ids"
            or bags.name != name + ".lengths"
            or one.datatype != "INT64"
            or bags.datatype != "INT32"
            or len(size) != 1
            or bags.shape != shape
            or ids_bytes != size[0] * 8
            or bags_bytes != lengths_bytes
        ):
            return None
        names.append(name)
        counts.append(size[0])
    if len(set(names)) < len(names) or sum(counts) > limits.request_ids_max:
        return None
    return tuple(names), counts, shape[0]


def _decode_plain(
    model: str, tensors: Sequence[InputTensor], limits: Limits
) -> LookupRequest | None:
    """Returns the request with inputs accepted by `plain_sizes`. Returns None for any other inputs,
    and for invalid lengths."""
    data: list[Any] = [one.data for one in tensors]
    sizes = plain_sizes(tensors, [*map(len, data)], limits)
    if sizes is None:
        return None
    names, counts, batch_size = sizes
    joined = _joined(data[1::2], _INT32)
    if not add_up(joined, batch_size, counts):
        return None
    integers = _joined(data[::2], _INT64)
    return LookupRequest(model, names, integers, joined, None, batch_size)


def _joined(chunks: Sequence[Any], dtype: np.dtype) -> np.ndarray:
    """Concatenates numbers. numpy copies many of them without holding the interpreter lock."""
    if sum(map(len, chunks)) > INLINE_TENSOR_BYTES_MAX:
        return np.concatenate([np.frombuffer(one, dtype) for one in chunks])
    return np.frombuffer(b"".join(chunks), dtype)


def add_up(lengths: np.ndarray, batch_size: int, counts: Sequence[int]) -> bool:
    """Returns whether the lengths of each feature add up to its count. Negative lengths are read as
    large unsigned numbers, so that they never add up."""
    of_features = lengths.view(_UINT32)
    if batch_size > 1:
        of_features = of_features.reshape(-1, batch_size).sum(axis=1, dtype=np.int64)
    return bool(of_features.tolist() == counts)


def _by_feature(tensors: Iterable[InputTensor], limits: Limits) -> dict[str, _Feature]:
    features: dict[str, _Feature] = {}
    count_max = 3 * limits.request_features_max
    for count, tensor in enumerate(tensors):
        if count >= count_max:
            raise RequestTooLargeError(
                f"inputs has over {count_max} tensors: {limits.describe('request_features_max')}",
                "inputs",
            )
        name, _, role = tensor.name.rpartition(".")
        if not name or role not in DATATYPES_BY_ROLE or (role == "ids" and len(tensor.shape) == 2):
            name, role = tensor.name, "padded"
        _check(tensor, role)
        feature = features.get(name)
        if feature is None:
            feature = features[name] = _Feature()
        if getattr(feature, role) is not None:
            raise wrong(tensor, "is given twice")
        setattr(feature, role, tensor)
    if not features:
        raise InvalidRequestError("inputs is empty: give at least one feature", "inputs")
    for name, feature in features.items():
        _check_roles(name, feature)
    return features


def _check(tensor: InputTensor, role: str) -> None:
    """Raises InvalidRequestError unless ``tensor`` has a datatype and a shape that suit its role in
    a feature, and data of that size."""
    datatypes = DATATYPES_BY_ROLE.get(role, ("INT64",))
    if tensor.datatype not in datatypes:
        raise wrong(tensor, f"is not {' or '.join(datatypes)}")
    shape = tensor.shape
    if min(shape, default=0) < 0:
        raise wrong(tensor, "has a negative size")
    if role == "padded":
        if len(shape) != 2 or not shape[1]:
            raise wrong(
                tensor,
                "is not [batch, k], k 1 or more; jagged ids are FEATURE.ids with FEATURE.lengths",
            )
    elif len(shape) != 1 and not (role == "weights" and len(shape) == 2):
        raise wrong(tensor, "is not of one dimension")
    data, count = tensor.data, prod(shape)
    if type(data) is list:
        if len(data) != count:
            raise wrong(tensor, f"has {len(data)} strings, not {count}")
        return
    nbytes = len(data) if type(data) is bytes else data.nbytes  # type: ignore[union-attr]
    itemsize = DTYPES[tensor.datatype].itemsize
    if nbytes != count * itemsize:
        raise wrong(tensor, f"has {nbytes} bytes, not {count * itemsize}")


def _check_roles(name: str, one: _Feature) -> None:
    if one.padded is not None:
        if one.ids is not None or one.lengths is not None:
            raise wrong(
                one.padded, f"is given beside {shortened(name + '.ids')!r}: send one of them"
            )
        if one.weights is not None and list(one.weights.shape) != list(one.padded.shape):
            raise wrong(one.weights, f"has not the shape of {one.padded}")
    elif one.ids is None:
        alone = one.lengths or one.weights
        assert alone is not None
        raise wrong(alone, f"has no input {shortened(name + '.ids')!r} beside it")
    elif one.lengths is None:
        raise wrong(one.ids, f"has no input {shortened(name + '.lengths')!r} beside it")
    elif one.weights is not None and list(one.weights.shape) != list(one.ids.shape):
        raise wrong(one.weights, f"has not the shape of {one.ids}: one weight for each id")


def _batch_size(features: Mapping[str, _Feature], limits: Limits) -> int:
    """Returns the number of examples, which must be the same for all features."""
    first: InputTensor | None = None
    ids = 0
    for one in features.values():
        tensor = one.lengths or one.padded
        assert tensor is not None
        if first is None:
            first = tensor
        elif tensor.shape[0] != first.shape[0]:
            raise wrong(tensor, f"has {tensor.shape[0]} examples, {first} has {first.shape[0]}")
        ids += one.ids.shape[0] if one.ids is not None else 0  # see _join_features for padded ids
    assert first is not None
    batch_size = first.shape[0]
    if not batch_size:
        raise wrong(first, "is an empty batch")
    limited = ("examples", batch_size, "request_examples_max"), ("ids", ids, "request_ids_max")
    for what, count, limit in limited:
        if count > getattr(limits, limit):
            message = f"inputs has {count} {what}, {limits.describe(limit)}"
            raise RequestTooLargeError(message, "inputs")
    return batch_size


def _join_features(
    model: str, features: Mapping[str, _Feature], batch_size: int, limits: Limits
) -> LookupRequest:
    """Concatenates the ids, lengths and weights of the features."""
    ids: list[Any] = []
    lengths: list[Any] = []
    weights: list[np.ndarray] = []
    counts: list[int] = []
    strings: list[str] = []
    is_string: list[bool] = []
    is_weighted = any(one.weights is not None for one in features.values())
    total = 0
    for one in features.values():
        is_id = None
        if one.padded is not None:
            padded = _array(one.padded, _INT64).reshape(batch_size, -1)
            is_id = padded >= 0
            # In bytes, as the data of other tensors.
            data: TensorData = padded[is_id].view(np.uint8)
            lengths.append(is_id.sum(axis=1, dtype=_INT32))
            counts.append(len(data) // _INT64.itemsize)
        else:
            assert one.ids is not None
            assert one.lengths is not None
            data = one.ids.data
            lengths.append(one.lengths.data)
            counts.append(one.ids.shape[0])
        if type(data) is list:
            strings += data
        else:
            ids.append(data)
        is_string.append(type(data) is list)
        if one.weights is not None:
            given = _array(one.weights, _FLOAT32)
            weights.append(given if is_id is None else given.reshape(batch_size, -1)[is_id])
        elif is_weighted:
            weights.append(np.ones(counts[-1], _FLOAT32))
        total += counts[-1]
        if total > limits.request_ids_max:
            raise RequestTooLargeError(
                f"inputs has over {total} ids, {limits.describe('request_ids_max')}", "inputs"
            )
    joined, integers = _joined(lengths, _INT32), _joined(ids, _INT64)
    if not add_up(joined, batch_size, counts):
        raise _wrong_lengths(features)
    of_ids = np.concatenate(weights) if is_weighted else None
    names = tuple(features)
    if not any(is_string):
        return LookupRequest(model, names, integers, joined, of_ids, batch_size)
    merged, string_ids = merge_string_ids(integers, strings, names, is_string, counts)
    string_features = frozenset(compress(names, is_string))
    return LookupRequest(
        model, names, merged, joined, of_ids, batch_size, string_features, string_ids
    )


def _array(tensor: InputTensor, dtype: np.dtype) -> np.ndarray:
    data = tensor.data
    assert type(data) is not list
    return np.frombuffer(data, dtype)  # type: ignore[arg-type]


def _wrong_lengths(features: Mapping[str, _Feature]) -> InvalidRequestError:
    """Returns the error for the first invalid lengths."""
    for one in features.values():
        if one.ids is None or one.lengths is None:
            continue
        lengths = _array(one.lengths, _INT32)
        if lengths.min() < 0:
            at = int((lengths < 0).argmax())
            return wrong(one.lengths, f"has {lengths[at]} at {at}: a bag has no fewer than 0 ids")
        total = int(lengths.sum(dtype=np.int64))
        if total != one.ids.shape[0]:
            return wrong(one.lengths, f"adds up to {total}, but {one.ids} has {one.ids.shape[0]}")
    raise AssertionError("lengths are wrong, but none of them")


def count_bags_and_ids(inputs: Iterable[tuple[str, Sequence[int]]]) -> tuple[int, int]:
    """Returns (bags, ids) according to names and shapes of inputs, without checking their data."""
    bags = ids = 0
    for name, shape in inputs:
        elements = prod(shape[:2]) if min(shape[:2], default=-1) >= 0 else 0
        if name.endswith(".lengths"):
            bags += elements
        elif name.endswith(".ids"):
            ids += elements
        elif len(shape) == 2 and not name.endswith(".weights"):
            bags += shape[0]
            ids += elements
    return bags, ids
