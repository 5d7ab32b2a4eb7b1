"""Lookup results: all vectors in one numpy array, with a view per key.

`Layout` maps keys to columns. It is the same for all results of a model version, which share it. A
model that is not pooled has one row per id, in `JaggedVectors`. Values are not copied, except to
tensors; only the methods that return tensors import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

OutputDType: TypeAlias = Literal["float32", "float16"]
Vectors: TypeAlias = NDArray[np.float32] | NDArray[np.float16]


class Layout:
    """Columns of a result: the keys, the width and position of each key, and its column range."""

    def __init__(self, keys: tuple[str, ...], length_per_key: tuple[int, ...]) -> None:
        self.keys = keys
        self.length_per_key = length_per_key
        self.positions = {key: at for at, key in enumerate(keys)}
        ends = list(accumulate(length_per_key))
        self.width = ends[-1] if ends else 0
        self.columns = {
            key: slice(end - length, end)
            for key, end, length in zip(keys, ends, length_per_key, strict=True)
        }


@dataclass(frozen=True, eq=False, slots=True)
class JaggedVectors:
    """Vectors of one key of a model that is not pooled: one vector per id, in the order of the
    request.

    Attributes:
        values: float32 or float16 [sum(lengths), dim], read-only. The vectors of unknown ids that
            are skipped are zeros.
        lengths: int32 [batch_size], the number of ids per example.
    """

    values: Vectors
    lengths: NDArray[np.int32]

    def to_jagged_tensor(self) -> JaggedTensor:
        """Returns a TorchRec JaggedTensor on the CPU. Copies the values, because torch needs
        writable memory."""
        import torch
        from torchrec.sparse.jagged_tensor import JaggedTensor

        return JaggedTensor(
            values=_tensor(self.values),
            lengths=torch.from_numpy(self.lengths.astype(np.int32)),
        )


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class EmbedResult:
    """Vectors of one request.

    Index it by key, as in ``result["movie"]``, or use `values` for all keys together.

    Attributes:
        values: float32 or float16 as requested, read-only. The shape is [batch_size,
            sum(length_per_key)] if the model is pooled; otherwise [ids, dim], key after key.
            Servers older than the option output_dtype always return float32.
        layout: the columns of each key.
        model: name of the model that was used.
        version: version of the model that was used.
        unknown_ids: number of ids without a row, by feature; only features that have any.
        lengths: int32 [keys, batch_size], the number of ids, if the model is not pooled; otherwise
            None.
        seq: sequence number (seq) of the last delta in the rows, 0 before the first; None if the
            version follows no deltas.
        missing_ids: number of ids whose rows no server could look up, by feature; the vectors lack
            them. Only features that have any; empty unless a router has --on-missing zeros.
    """

    values: Vectors
    layout: Layout
    model: str
    version: int
    unknown_ids: dict[str, int] = field(default_factory=dict)
    lengths: NDArray[np.int32] | None = None
    seq: int | None = None
    missing_ids: dict[str, int] = field(default_factory=dict)
    _bounds: list[int] = field(default_factory=list, init=False)
    """First row of each key and the end of the last, if the model is not pooled; empty until a key
    is read."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the result, in the model's order: all keys of the model, or output_keys."""
        return self.layout.keys

    @property
    def length_per_key(self) -> tuple[int, ...]:
        """Width of each key's vector."""
        return self.layout.length_per_key

    @property
    def is_pooled(self) -> bool:
        """True if there is one vector per key and example; False if there is one vector per id."""
        return self.lengths is None

    @property
    def batch_size(self) -> int:
        """Number of examples in the result."""
        return len(self.values) if self.lengths is None else self.lengths.shape[1]

    def __repr__(self) -> str:
        """Shows the model, and the shape and first values of each key."""
        examples = f"{self.batch_size} example{'s' * (self.batch_size != 1)}"
        seq = "" if self.seq is None else f" seq {self.seq}"
        head = f"{self.model} version {self.version}{seq}: {examples}, {self.values.dtype.name}"
        width = max(map(len, self.keys), default=0)
        lines = [f"  {key:{width}}  {_short(self[key])}" for key in self.keys]
        for words, counts in (
            ("ids without a row", self.unknown_ids),
            ("ids that could not be looked up", self.missing_ids),
        ):
            if counts:
                shown = ", ".join(f"{count} of {feature}" for feature, count in counts.items())
                lines.append(f"  {words}: {shown}")
        return "\n".join([head, *lines])

    def __getitem__(self, key: str) -> Any:
        """Returns the vectors of one key: a view [batch_size, width of the key], or JaggedVectors
        if the model is not pooled. Raises KeyError for an unknown key."""
        columns = self.layout.columns.get(key)
        if columns is None:
            raise KeyError(f"{key!r} is no key of {self.model}; it has {', '.join(self.keys)}")
        if self.lengths is None:
            return self.values[:, columns]
        if not self._bounds:
            self._bounds.extend([0, *accumulate(self.lengths.sum(axis=1).tolist())])
        at = self.layout.positions[key]
        start, end = self._bounds[at : at + 2]
        return JaggedVectors(self.values[start:end], self.lengths[at])

    def to_dict(self) -> dict[str, Any]:
        """Returns the vectors of every key, in the model's order; values are as in
        `result[key]`."""
        return {key: self[key] for key in self.keys}

    def to_keyed_tensor(self) -> KeyedTensor:
        """Returns a TorchRec KeyedTensor on the CPU. Copies the values, because torch needs
        writable memory.

        Raises:
            TypeError: the model is not pooled; call `to_jagged_tensors` instead.
        """
        self._check_kind(True, "to_jagged_tensors")
        from torchrec.sparse.jagged_tensor import KeyedTensor

        return KeyedTensor(
            keys=list(self.keys),
            length_per_key=list(self.length_per_key),
            values=_tensor(self.values),
        )

    def to_jagged_tensors(self) -> dict[str, JaggedTensor]:
        """Returns a TorchRec JaggedTensor per key, as an EmbeddingCollection does. Copies the
        values.

        Raises:
            TypeError: the model is pooled; call `to_keyed_tensor` instead.
        """
        self._check_kind(False, "to_keyed_tensor")
        return {key: self[key].to_jagged_tensor() for key in self.keys}

    def _check_kind(self, is_pooled: bool, other: str) -> None:
        if self.is_pooled != is_pooled:
            pooled = "is pooled" if self.is_pooled else "is not pooled"
            raise TypeError(f"model {self.model!r} {pooled}: call {other}")

    def result(self) -> EmbedResult:
        """Returns itself. In a stream, a failed item is an error, whose `result` raises it."""
        return self


SHOWN = 4


def _short(vectors: Vectors | JaggedVectors) -> str:
    """Returns the shape of one key's vectors and the first values, as text."""
    rows = vectors.values if isinstance(vectors, JaggedVectors) else vectors
    shape = " x ".join(map(str, rows.shape))
    if not rows.size:
        return shape
    first = ", ".join(f"{value:.4g}" for value in rows[0, :SHOWN])
    more = ", …" if rows.shape[1] > SHOWN else ""
    return f"{shape}  [{first}{more}]{' …' * (len(rows) > 1)}"


def _tensor(values: Vectors) -> Tensor:
    """Returns a copy as a tensor of the same dtype, in the byte order of this machine."""
    import torch

    return torch.from_numpy(values.astype(values.dtype.newbyteorder("=")))
