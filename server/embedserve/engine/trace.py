"""Traces a lookup down to its tensor operations, where they are the same for every batch.

A scripted lookup still builds a KeyedJaggedTensor and asks it questions, 15 us each time; its
trace is what is left of that: for tables on one rank a cumulative sum and the kernel. A trace
bakes in whatever Python number it met, so it is taken for batches of three shapes: where the
traces differ, as where ids are split among ranks, it is not used.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import torch
from torch import nn

logger = logging.getLogger(__name__)

EXAMPLES = (1, 3, 7)
"""Batch sizes that are traced; as primes they divide nothing by accident."""


def trace(
    lookup: nn.Module, features: int, device: torch.device, *, is_weighted: bool
) -> nn.Module | None:
    """``lookup`` as the operations of its trace, frozen; None where these depend on the batch.

    The result takes (ids, lengths), and weights if ``is_weighted``.
    """
    module = (_Weighted(lookup) if is_weighted else _Plain(lookup)).eval()
    first, operations = None, ""
    for examples in EXAMPLES:
        inputs = _inputs(features, examples, device)
        try:
            with torch.no_grad():
                traced = torch.jit.trace(
                    module, inputs if is_weighted else inputs[:2], check_trace=False
                )
        except RuntimeError as error:  # an operator that cannot be traced, as permuting features
            logger.debug("lookups are not traced: %s", error)
            return None
        frozen = torch.jit.freeze(traced.eval())
        if first is None:
            first, operations = frozen, _operations(frozen)
        elif _operations(frozen) != operations:
            return None
    return first


class _Plain(nn.Module):
    def __init__(self, lookup: nn.Module) -> None:
        super().__init__()
        self.lookup = lookup

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.lookup(ids, lengths, None)
        return values


class _Weighted(nn.Module):
    def __init__(self, lookup: nn.Module) -> None:
        super().__init__()
        self.lookup = lookup

    def forward(
        self, ids: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        values: torch.Tensor = self.lookup(ids, lengths, weights)
        return values


def _inputs(
    features: int, examples: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids, lengths, weights) of bags of 0 to 4 ids, all of row 0, which every table has."""
    lengths = torch.arange(features * examples, dtype=torch.int32) * examples % 5
    count = int(lengths.sum())
    ids, weights = torch.zeros(count, dtype=torch.int64), torch.ones(count)
    return ids.to(device), lengths.to(device), weights.to(device)


def _operations(traced: Callable[..., torch.Tensor]) -> str:
    """The operations of a trace and their constants, without the names that differ by accident."""
    graph = torch._C._jit_pass_canonicalize(traced.graph)  # type: ignore[attr-defined]
    return re.sub(r"__torch__\S+|object\(\w+\)|#.*|, scope: .*", "", str(graph))
