"""What FBGEMM's kernels of a sharded module read, taken from them and given back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
    IntNBitTableBatchedEmbeddingBagsCodegen as Kernel,
)
from torch import nn

Rows = tuple[torch.Tensor, torch.Tensor]
"""Of a kernel: uint8 rows of its tables, and where in them, for each feature that it looks up, that
feature's table begins: int64."""


@dataclass(frozen=True)
class KernelTables:
    """The shards of tables that a kernel reads.

    Attributes:
        config: torchrec's, of its shards; without their rows.
        shards: for each feature that it looks up, the number of its shard in ``config``.
    """

    config: Any
    shards: tuple[int, ...]


def kernels_of(lookup: nn.Module) -> list[Any]:
    """In the order in which what is compiled takes their rows."""
    return [module for module in lookup.modules() if isinstance(module, Kernel)]


def rows_of(kernel: Any) -> Rows:
    rows = kernel.weights_host if kernel.host_size else kernel.weights_dev
    return rows, kernel.weights_offsets


def reattach_weights(kernels: Sequence[Any], rows: Sequence[Rows]) -> None:
    for kernel, (data, offsets) in zip(kernels, rows, strict=True):
        setattr(kernel, "weights_host" if kernel.host_size else "weights_dev", data)
        kernel.weights_offsets = offsets


def detach_weights(kernels: Sequence[Any]) -> list[Rows]:
    """The rows of ``kernels``, which have none then: their modules refer to each other, and would
    hold them until Python collects its garbage."""
    rows = list(map(rows_of, kernels))
    reattach_weights(kernels, [(data.new_empty(0), offsets) for data, offsets in rows])
    return rows


@contextlib.contextmanager
def stood_in_for(kernels: Sequence[Any]) -> Iterator[list[torch.Tensor]]:
    """Within, each of ``kernels`` has a tensor of its own in place of its rows."""
    rows = list(map(rows_of, kernels))
    # None is equal to another, nor to what else is constant: equal constants become one.
    names = (b"stands for the rows of kernel %d" % i for i in range(len(rows)))
    stand_ins = [data.new_tensor(list(name)) for name, (data, _) in zip(names, rows, strict=True)]
    reattach_weights(
        kernels, [(one, offsets) for one, (_, offsets) in zip(stand_ins, rows, strict=True)]
    )
    try:
        yield stand_ins
    finally:
        reattach_weights(kernels, rows)
