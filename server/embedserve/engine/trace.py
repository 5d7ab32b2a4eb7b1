"""Traces a lookup down to its tensor operations, if they are the same for every batch.

A scripted lookup still builds a KeyedJaggedTensor and queries it, 15 us each time. The trace keeps
only the tensor operations: for tables on one rank a cumulative sum and the kernel. A trace bakes in
every Python number it met, so it is taken for batches of three shapes. If these traces differ, as
they do if ids are split among ranks, the trace is discarded. Rows are not part of a trace. Each
call passes them in, so that the next version of a model may use the same trace.

torch.jit.trace takes fifty times as long. For a module it first compiles everything else that the
modules in it can do. Its result, rows included, stays in memory for as long as the process lives.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from embedserve.engine.kernel_rows import kernels_of, reattach_weights, rows_of

logger = logging.getLogger(__name__)

Traced = Callable[..., torch.Tensor]
"""Signature of a traced lookup: the rows of each kernel, then (ids, lengths) or (ids, lengths,
weights)."""

EXAMPLES = (1, 3, 7)
"""Batch sizes that are traced: 1 and two primes, so that they divide no other number by
accident."""


def trace(
    lookup: nn.Module,
    features: int,
    device: torch.device,
    *,
    is_weighted: bool,
    takes_offsets: bool = False,
) -> Traced | None:
    """Returns the operations of ``lookup``, or None if they depend on the batch. The operations
    take weights if ``is_weighted``, and offsets in place of lengths if ``takes_offsets``."""
    kernels = kernels_of(lookup)
    rows = list(map(rows_of, kernels))
    flat = tuple(tensor for one in rows for tensor in one)

    def function(*inputs: torch.Tensor) -> torch.Tensor:
        given, batch = inputs[: len(flat)], inputs[len(flat) :]
        reattach_weights(kernels, list(zip(given[::2], given[1::2], strict=True)))
        values: torch.Tensor = lookup(*batch) if is_weighted else lookup(*batch, None)
        return values

    graphs = []
    with _without_queues(kernels), torch.no_grad():
        lookup.eval()
        for examples in EXAMPLES:
            batch = _inputs(features, examples, device, takes_offsets)
            try:
                graphs.append(_graph(function, flat + (batch if is_weighted else batch[:2])))
            except RuntimeError as error:  # an operator that cannot be traced
                logger.debug("lookups are not traced: %s", error)
                return None
            finally:
                reattach_weights(kernels, rows)
    if len(set(map(_operations, graphs))) > 1:
        return None
    traced: Traced = torch._C._create_function_from_graph("lookup", graphs[0])
    return traced


def with_inputs(frozen: Any, stand_ins: Sequence[torch.Tensor]) -> Traced | None:
    """Returns the operations of ``frozen``, a frozen script module, with the constants
    ``stand_ins`` turned into inputs.

    The new inputs follow the existing ones. Returns None if a stand-in does not occur in the graph,
    or if the graph reads more than tensors from the module.
    """
    graph: Any = frozen.graph.copy()
    for stand_in in stand_ins:
        value = graph.addInput()
        found = [one for one in graph.findAllNodes("prim::Constant") if _holds(one, stand_in)]
        for node in found:
            node.output().replaceAllUsesWith(value)
        if not found:
            return None
    module = next(iter(graph.inputs()))
    graph.setInsertPoint(next(iter(graph.nodes())))
    if not _without_attributes(graph, module, frozen):
        return None
    torch._C._jit_pass_dce(graph)
    if module.uses():
        return None
    graph.eraseInput(0)
    function: Traced = torch._C._create_function_from_graph("lookup", graph)
    return function


def _without_attributes(graph: Any, module: Any, value: Any) -> bool:
    """Turns the tensor attributes of ``module`` that ``graph`` reads into constants, taken from
    ``value``, the module itself. They belong to a row cache, which no plan here has. Returns False
    if the graph reads another kind of attribute."""
    for node in [use.user for use in module.uses()]:
        if node.kind() != "prim::GetAttr":
            return False
        found = getattr(value, node.s("name"))
        if isinstance(found, torch.Tensor):
            node.output().replaceAllUsesWith(graph.insertConstant(found))
        elif not _without_attributes(graph, node.output(), found):
            return False
    return True


def _holds(constant: Any, tensor: torch.Tensor) -> bool:
    """Returns whether the node ``constant`` has ``tensor`` itself, not an equal one."""
    has_tensor = constant.hasAttribute("value") and constant.kindOf("value") == "t"
    return bool(has_tensor and constant.t("value").data_ptr() == tensor.data_ptr())


def _graph(function: Traced, inputs: tuple[torch.Tensor, ...]) -> Any:
    """Returns the operations that ``function`` performs on ``inputs``, without shape
    information."""
    graph, _ = torch._C._create_graph_by_tracing(function, inputs, lambda _: "", True, False)
    torch._C._jit_pass_erase_shape_information(graph)
    torch._C._jit_pass_dce(graph)
    return graph


class _Queue:
    """Stand-in for a kernel's prefetch queue that is always empty."""

    def __init__(self, nothing: torch.Tensor) -> None:
        self._nothing = nothing

    def pop(self) -> torch.Tensor:
        return self._nothing


@contextlib.contextmanager
def _without_queues(kernels: Sequence[Any]) -> Iterator[None]:
    """Makes ``kernels`` use no prefetched rows within its block. Their prefetch queues are C++
    objects, which cannot be constants of a trace."""
    queues = [(kernel, kernel.lxu_cache_locations_list) for kernel in kernels]
    for kernel, queue in queues:
        kernel.lxu_cache_locations_list = _Queue(queue.pop())
    try:
        yield
    finally:
        for kernel, queue in queues:
            kernel.lxu_cache_locations_list = queue


def id_dtype(takes_offsets: bool) -> torch.dtype:
    """Returns the dtype of ids: int32 with offsets, int64 with lengths."""
    return torch.int32 if takes_offsets else torch.int64


def _inputs(
    features: int, examples: int, device: torch.device, takes_offsets: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (ids, lengths or offsets, weights) of bags of 0 to 4 ids. All ids are row 0, which
    every table has."""
    bags = torch.arange(features * examples, dtype=torch.int32) * examples % 5
    count = int(bags.sum())
    if takes_offsets:
        bags = torch.nn.functional.pad(bags.cumsum(0, dtype=torch.int32), (1, 0))
    ids, weights = torch.zeros(count, dtype=id_dtype(takes_offsets)), torch.ones(count)
    return ids.to(device), bags.to(device), weights.to(device)


def _operations(graph: Any) -> str:
    """Returns the operations of a trace and their constants as text, without incidental names."""
    canonical = torch._C._jit_pass_canonicalize(graph)
    return re.sub(r"#.*|, scope: .*", "", str(canonical))
