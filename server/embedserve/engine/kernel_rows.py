"""Detaches weights from the FBGEMM kernels of a sharded module, and attaches them again."""

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
"""Rows of a kernel: the uint8 rows of its tables, and int64 offsets into them. Each offset is the
start of the table of a feature that the kernel looks up."""


@dataclass(frozen=True)
class KernelTables:
    """The table shards that a kernel reads.

    Attributes:
        config: torchrec's configuration of the shards, without their rows.
        shards: for each feature that the kernel looks up, the index of its shard in ``config``.
    """

    config: Any
    shards: tuple[int, ...]


def kernels_of(lookup: nn.Module) -> list[Any]:
    """Returns the kernels of ``lookup``, in the order in which compiled lookups take their rows."""
    return [module for module in lookup.modules() if isinstance(module, Kernel)]


def rows_of(kernel: Any) -> Rows:
    rows = kernel.weights_host if kernel.host_size else kernel.weights_dev
    return rows, kernel.weights_offsets


def place_shards(kernel: Any, offsets: list[int]) -> None:
    """Sets the byte offset of each table shard in the rows that ``kernel`` has."""
    kernel.weights_physical_offsets = offsets
    kernel.initialize_logical_weights_placements_and_offsets()
    kernel.weight_initialized = True


def reattach_weights(kernels: Sequence[Any], rows: Sequence[Rows]) -> None:
    for kernel, (data, offsets) in zip(kernels, rows, strict=True):
        setattr(kernel, "weights_host" if kernel.host_size else "weights_dev", data)
        kernel.weights_offsets = offsets


def detach_weights(kernels: Sequence[Any]) -> list[Rows]:
    """Detaches and returns the rows of ``kernels``. The modules are in reference cycles, and would
    keep the rows alive until Python collects garbage."""
    rows = list(map(rows_of, kernels))
    reattach_weights(kernels, [(data.new_empty(0), offsets) for data, offsets in rows])
    return rows


@contextlib.contextmanager
def stood_in_for(kernels: Sequence[Any]) -> Iterator[list[torch.Tensor]]:
    """Gives each kernel a distinct stand-in tensor in place of its rows, within its block."""
    rows = list(map(rows_of, kernels))
    # The stand-ins must differ from each other and from all other constants, because TorchScript
    # merges equal constants.
    names = (b"stands for the rows of kernel %d" % i for i in range(len(rows)))
    stand_ins = [data.new_tensor(list(name)) for name, (data, _) in zip(names, rows, strict=True)]
    reattach_weights(
        kernels, [(one, offsets) for one, (_, offsets) in zip(stand_ins, rows, strict=True)]
    )
    try:
        yield stand_ins
    finally:
        reattach_weights(kernels, rows)
