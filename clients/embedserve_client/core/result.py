"""The answer to a lookup: vectors as one numpy array, and a view per key.

`Layout` says which columns belong to which key; it stays the same for a model version and is
shared by its results. A model that is not pooled has a row for each id instead, in
`JaggedVectors`. Nothing here copies values, and torch is imported only by what gives tensors.
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
    """The columns of an answer: keys, the width of each, and where each one lies."""

    def __init__(self, keys: tuple[str, ...], length_per_key: tuple[int, ...]) -> None:
        self.keys = keys
        self.length_per_key = length_per_key
        ends = list(accumulate(length_per_key))
        self.width = ends[-1] if ends else 0
        self.columns = {
            key: slice(end - length, end)
            for key, end, length in zip(keys, ends, length_per_key, strict=True)
        }


@dataclass(frozen=True, eq=False, slots=True)
class JaggedVectors:
    """One key of an answer that is not pooled: a vector for each id, in the order sent.

    values: float32 or float16 [sum(lengths), dim], read-only; zeros for an unknown id that is
        skipped.
    lengths: int32 [batch_size], the ids of each example.
    """

    values: Vectors
    lengths: NDArray[np.int32]

    def to_jagged_tensor(self) -> JaggedTensor:
        """The same as a TorchRec JaggedTensor on the CPU; copies, as torch wants to write."""
        import torch
        from torchrec.sparse.jagged_tensor import JaggedTensor

        return JaggedTensor(
            values=_tensor(self.values),
            lengths=torch.from_numpy(self.lengths.astype(np.int32)),
        )


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class EmbedResult:
    """The vectors of one request.

    values: float32, or float16 where that was asked for (a server older than this option
        answers float32); read-only: [batch_size, sum(length_per_key)], or, where the model is
        not pooled, [ids, dim], key after key.
    model, version: what answered.
    unknown_ids: how many ids had no row, by feature; only features that had any.
    lengths: int32 [keys, batch_size] where the model is not pooled, else None.
    """

    values: Vectors
    layout: Layout
    model: str
    version: int
    unknown_ids: dict[str, int] = field(default_factory=dict)
    lengths: NDArray[np.int32] | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys of the model, or those of output_keys, in the model's order."""
        return self.layout.keys

    @property
    def length_per_key(self) -> tuple[int, ...]:
        """The width of each key's vector."""
        return self.layout.length_per_key

    @property
    def is_pooled(self) -> bool:
        """Whether there is one vector for each key and example, or one for each id."""
        return self.lengths is None

    @property
    def batch_size(self) -> int:
        """Examples in the answer."""
        return len(self.values) if self.lengths is None else self.lengths.shape[1]

    def __repr__(self) -> str:
        """What answered, and of each key its shape and where its values begin."""
        examples = f"{self.batch_size} example{'s' * (self.batch_size != 1)}"
        head = f"{self.model} version {self.version}: {examples}, {self.values.dtype.name}"
        width = max(map(len, self.keys), default=0)
        lines = [f"  {key:{width}}  {_short(self[key])}" for key in self.keys]
        unknown = ", ".join(f"{count} of {key}" for key, count in self.unknown_ids.items())
        return "\n".join([head, *lines, *([f"  ids without a row: {unknown}"] if unknown else [])])

    def __getitem__(self, key: str) -> Any:
        """The vectors of one key: a view of shape [batch_size, its width]; where the model is
        not pooled, JaggedVectors."""
        columns = self.layout.columns.get(key)
        if columns is None:
            raise KeyError(f"{key!r} is no key of {self.model}; it has {', '.join(self.keys)}")
        if self.lengths is None:
            return self.values[:, columns]
        at = self.keys.index(key)
        start, end = self.lengths[:at].sum(), self.lengths[: at + 1].sum()
        return JaggedVectors(self.values[start:end], self.lengths[at])

    def to_dict(self) -> dict[str, Any]:
        """What indexing gives, for each key in the model's order."""
        return {key: self[key] for key in self.keys}

    def to_keyed_tensor(self) -> KeyedTensor:
        """The same as a TorchRec KeyedTensor on the CPU; copies, as torch wants to write.

        TypeError where the model is not pooled: see `to_jagged_tensors`.
        """
        self._check_kind(True, "to_jagged_tensors")
        from torchrec.sparse.jagged_tensor import KeyedTensor

        return KeyedTensor(
            keys=list(self.keys),
            length_per_key=list(self.length_per_key),
            values=_tensor(self.values),
        )

    def to_jagged_tensors(self) -> dict[str, JaggedTensor]:
        """A TorchRec JaggedTensor per key, as an EmbeddingCollection gives.

        TypeError where the model is pooled: see `to_keyed_tensor`.
        """
        self._check_kind(False, "to_keyed_tensor")
        return {key: self[key].to_jagged_tensor() for key in self.keys}

    def _check_kind(self, is_pooled: bool, other: str) -> None:
        if self.is_pooled != is_pooled:
            pooled = "is pooled" if self.is_pooled else "is not pooled"
            raise TypeError(f"model {self.model!r} {pooled}: call {other}")

    def result(self) -> EmbedResult:
        """Itself; an error in a stream raises here instead."""
        return self


SHOWN = 4


def _short(vectors: Vectors | JaggedVectors) -> str:
    """The shape of one key's vectors, and the first of them."""
    rows = vectors.values if isinstance(vectors, JaggedVectors) else vectors
    shape = " x ".join(map(str, rows.shape))
    if not rows.size:
        return shape
    first = ", ".join(f"{value:.4g}" for value in rows[0, :SHOWN])
    more = ", …" if rows.shape[1] > SHOWN else ""
    return f"{shape}  [{first}{more}]{' …' * (len(rows) > 1)}"


def _tensor(values: Vectors) -> Tensor:
    """A copy of the same dtype, in this machine's byte order."""
    import torch

    return torch.from_numpy(values.astype(values.dtype.newbyteorder("=")))
