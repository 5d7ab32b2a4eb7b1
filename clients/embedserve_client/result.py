"""The answer to a lookup: pooled vectors as one numpy array, and a view per key.

`Layout` says which columns belong to which key; it stays the same for a model version and is
shared by its results. Nothing here copies values, and torch is imported only by
`EmbedResult.to_keyed_tensor`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedTensor


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
class EmbedResult:
    """Pooled vectors of one request.

    values: float32 [batch_size, sum(length_per_key)], read-only.
    model, version: what answered.
    """

    values: NDArray[np.float32]
    layout: Layout
    model: str
    version: int

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys of the model, in its order, whatever the request named."""
        return self.layout.keys

    @property
    def length_per_key(self) -> tuple[int, ...]:
        """The width of each key's vector."""
        return self.layout.length_per_key

    @property
    def batch_size(self) -> int:
        """Examples in the answer."""
        return len(self.values)

    def __getitem__(self, key: str) -> NDArray[np.float32]:
        """The vectors of one key, a view of shape [batch_size, its width]."""
        columns = self.layout.columns.get(key)
        if columns is None:
            raise KeyError(f"{key!r} is no key of {self.model}; it has {', '.join(self.keys)}")
        return self.values[:, columns]

    def to_dict(self) -> dict[str, NDArray[np.float32]]:
        """A view per key, in the model's order."""
        return {key: self[key] for key in self.keys}

    def to_keyed_tensor(self) -> KeyedTensor:
        """The same as a TorchRec KeyedTensor on the CPU; copies, as torch wants to write."""
        import torch
        from torchrec.sparse.jagged_tensor import KeyedTensor

        return KeyedTensor(
            keys=list(self.keys),
            length_per_key=list(self.length_per_key),
            values=torch.from_numpy(self.values.astype(np.float32)),
        )

    def result(self) -> EmbedResult:
        """Itself; an error in a stream raises here instead."""
        return self
