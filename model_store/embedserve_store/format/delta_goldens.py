"""Defines the goldens of a delta: bags, and the results of the training model after the delta.

They are a field of the delta's manifest. Each array is an object with its shape and its
little-endian bytes in base64. All counts are bounded, because a server computes the results before
it applies the delta. Never imports torch.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedserve_store.errors import StoreError
from embedserve_store.format.json_fields import typed
from embedserve_store.format.manifest import Manifest

GOLDENS = "goldens"
"""Name of the field in the manifest."""
EXAMPLES_MAX = 1000
IDS_MAX = 10_000
GOLDENS_BYTES_MAX = 4 << 20
"""Maximum bytes of all arrays together; 4 MiB."""
TRAINING_DTYPES = ("float32", "float16", "bfloat16")
"""Dtypes in which a training model adds rows up."""
_ARRAYS = {
    "numbers": ("<i8", 1),
    "lengths": ("<i4", 2),
    "weights": ("<f4", 1),
    "answers": ("<f4", 2),
}
"""Dtype and number of dimensions of each array."""


@dataclass(frozen=True, eq=False)
class DeltaGoldens:
    """Bags of row numbers, and the results that they must have after the delta."""

    numbers: NDArray[np.int64]
    """Row numbers [n], feature by feature in the order of the version, then example by example."""
    lengths: NDArray[np.int32]
    """Number of rows of each bag, [F, B]."""
    weights: NDArray[np.float32] | None
    """Weights [n] of a weighted model; otherwise None."""
    answers: NDArray[np.float32]
    """Results [B, sum of dims] in the order of the version's keys. For an unpooled model [N, dim],
    where each key has one row for each row number of its feature."""
    dtype: str
    """Dtype in which the training model added rows up, one of TRAINING_DTYPES."""

    @property
    def examples(self) -> int:
        return int(self.lengths.shape[1])

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """Returns the arrays by name."""
        named = {name: getattr(self, name) for name in _ARRAYS}
        return {name: array for name, array in named.items() if array is not None}

    def to_json(self) -> dict[str, Any]:
        encoded = {name: _encoded(array, _ARRAYS[name][0]) for name, array in self.arrays.items()}
        return encoded | {"dtype": self.dtype}

    def check(self, base: Manifest, where: str) -> None:
        """Raises StoreError unless the goldens are within the limits and fit the version
        ``base``."""
        where = f"{where}: goldens"
        self._check_size(where)
        _check_shape(self.lengths, (len(base.features), self.examples), "lengths", where)
        totals = self.lengths.sum(axis=1, dtype=np.int64)
        if self.lengths.min(initial=0) < 0 or totals.sum() != len(self.numbers):
            raise StoreError(f"{where}: lengths do not add up to the {len(self.numbers)} numbers")
        if (self.weights is None) == base.is_weighted:
            have, need = ("no", "needs") if base.is_weighted else ("", "takes no")
            raise StoreError(f"{where}: have {have} weights, the model {need} weights")
        if self.weights is not None:
            _check_shape(self.weights, self.numbers.shape, "weights", where)
        _check_shape(self.answers, base.answers_shape(self.lengths), "answers", where)
        self._check_values(base, totals, where)

    def _check_size(self, where: str) -> None:
        found = self.examples, len(self.numbers), self.nbytes
        if not self.examples:
            raise StoreError(f"{where}: have no example")
        if any(
            a > b for a, b in zip(found, (EXAMPLES_MAX, IDS_MAX, GOLDENS_BYTES_MAX), strict=True)
        ):
            raise StoreError(
                f"{where}: {found[0]} examples, {found[1]} ids and {found[2]} bytes, the limits "
                f"are {EXAMPLES_MAX}, {IDS_MAX} and {GOLDENS_BYTES_MAX}"
            )

    def _check_values(self, base: Manifest, totals: NDArray[np.int64], where: str) -> None:
        """Raises StoreError for a row number outside of a table, or a value that is not finite."""
        limits = np.repeat(np.array(base.rows_per_feature), totals)
        outside = np.flatnonzero((self.numbers < 0) | (self.numbers >= limits))
        if len(outside):
            at = int(outside[0])
            feature = int(np.searchsorted(totals.cumsum(), at, "right"))
            raise StoreError(
                f"{where}: numbers[{at}] is {self.numbers[at]}, feature {base.features[feature]!r} "
                f"has {base.rows_per_feature[feature]} rows"
            )
        for name in ("weights", "answers"):
            values = getattr(self, name)
            if values is not None and not np.isfinite(values).all():
                raise StoreError(f"{where}: {name} has a value that is not finite")


def parse_goldens(data: Any, where: str) -> DeltaGoldens:
    """Parses the field GOLDENS of a manifest; ``check`` compares it with a version.

    Raises:
        StoreError: a field is missing or malformed.
    """
    where = f"{where}: goldens"
    if not isinstance(data, dict):
        raise StoreError(f"{where}: expected a JSON object")
    dtype = typed(data, "dtype", str, where)
    if dtype not in TRAINING_DTYPES:
        raise StoreError(
            f"{where}: dtype is {dtype!r:.80}, expected one of {', '.join(TRAINING_DTYPES)}"
        )
    names = [name for name in _ARRAYS if name in data or name != "weights"]
    arrays: dict[str, Any] = {name: _decoded(data, name, where) for name in names}
    return DeltaGoldens(**({"weights": None} | arrays), dtype=dtype)


def _encoded(array: NDArray[Any], dtype: str) -> dict[str, Any]:
    data = np.ascontiguousarray(array, dtype).tobytes()
    return {"shape": list(array.shape), "data": base64.b64encode(data).decode()}


def _decoded(data: Mapping[str, Any], name: str, where: str) -> NDArray[Any]:
    described = typed(dict(data), name, dict, where)
    where = f"{where}: {name}"
    dtype, dimensions = _ARRAYS[name]
    shape = typed(described, "shape", list, where)
    are_counts = all(type(one) is int and 0 <= one <= GOLDENS_BYTES_MAX for one in shape)
    if len(shape) != dimensions or not are_counts:
        raise StoreError(f"{where}: shape is {shape!r:.80}, expected {dimensions} counts")
    try:
        content = base64.b64decode(typed(described, "data", str, where), validate=True)
    except (binascii.Error, ValueError) as error:
        raise StoreError(f"{where}: data is not base64: {error}") from error
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if len(content) != nbytes:
        raise StoreError(f"{where}: data has {len(content)} bytes, {shape} means {nbytes}")
    return np.frombuffer(content, dtype).reshape(shape)


def _check_shape(array: NDArray[Any], shape: tuple[int, ...], name: str, where: str) -> None:
    if array.shape != shape:
        raise StoreError(f"{where}: {name} is {list(array.shape)}, the version means {list(shape)}")
