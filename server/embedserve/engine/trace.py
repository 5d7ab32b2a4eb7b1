"""Traces a lookup down to its tensor operations, where they are the same for every batch.

A scripted lookup still builds a KeyedJaggedTensor and asks it questions, 15 us each time; its
trace is what is left of that: for tables on one rank a cumulative sum and the kernel. A trace
bakes in whatever Python number it met, so it is taken for batches of three shapes: where the
traces differ, as where ids are split among ranks, it is not used.

torch.jit.trace takes fifty times as long: of a module it first compiles whatever else the modules
in it can do, and what it makes is kept, rows and all, for as long as the process lives.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
    IntNBitTableBatchedEmbeddingBagsCodegen as Kernel,
)
from torch import nn

logger = logging.getLogger(__name__)

Traced = Callable[..., torch.Tensor]
"""Takes (ids, lengths), or (ids, lengths, weights)."""

EXAMPLES = (1, 3, 7)
"""Batch sizes that are traced; as primes they divide nothing by accident."""


def trace(
    lookup: nn.Module, features: int, device: torch.device, *, is_weighted: bool
) -> Traced | None:
    """``lookup`` as the operations of its trace, rows and all else its constants; None where these
    depend on the batch. The result takes weights if ``is_weighted``."""

    def plain(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = lookup(ids, lengths, None)
        return values

    function: Traced = lookup if is_weighted else plain
    graphs = []
    with _without_queues(lookup.eval()), torch.no_grad():
        for examples in EXAMPLES:
            inputs = _inputs(features, examples, device)
            try:
                graphs.append(_graph(function, inputs if is_weighted else inputs[:2]))
            except RuntimeError as error:  # an operator that cannot be traced
                logger.debug("lookups are not traced: %s", error)
                return None
    if len(set(map(_operations, graphs))) > 1:
        return None
    traced: Traced = torch._C._create_function_from_graph("lookup", graphs[0])
    return traced


def _graph(function: Traced, inputs: tuple[torch.Tensor, ...]) -> Any:
    """The operations that ``function`` does with ``inputs``, which know no shapes."""
    graph, _ = torch._C._create_graph_by_tracing(function, inputs, lambda _: "", True, False)
    torch._C._jit_pass_erase_shape_information(graph)
    torch._C._jit_pass_dce(graph)
    return graph


class _Queue:
    """A kernel's queue of what is prefetched, in which there never is anything."""

    def __init__(self, nothing: torch.Tensor) -> None:
        self._nothing = nothing

    def pop(self) -> torch.Tensor:
        return self._nothing


@contextlib.contextmanager
def _without_queues(lookup: nn.Module) -> Iterator[None]:
    """Within, the kernels of ``lookup`` ask for nothing that is prefetched: their queues are C++
    objects, which cannot be constants of a trace."""
    queues = [
        (kernel, kernel.lxu_cache_locations_list)
        for kernel in lookup.modules()
        if isinstance(kernel, Kernel)
    ]
    for kernel, queue in queues:
        kernel.lxu_cache_locations_list = _Queue(queue.pop())
    try:
        yield
    finally:
        for kernel, queue in queues:
            kernel.lxu_cache_locations_list = queue


def _inputs(
    features: int, examples: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids, lengths, weights) of bags of 0 to 4 ids, all of row 0, which every table has."""
    lengths = torch.arange(features * examples, dtype=torch.int32) * examples % 5
    count = int(lengths.sum())
    ids, weights = torch.zeros(count, dtype=torch.int64), torch.ones(count)
    return ids.to(device), lengths.to(device), weights.to(device)


def _operations(graph: Any) -> str:
    """The operations of a trace and their constants, without the names that differ by accident."""
    canonical = torch._C._jit_pass_canonicalize(graph)
    return re.sub(r"#.*|, scope: .*", "", str(canonical))
