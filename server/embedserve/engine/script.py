"""Compiles a sharded model into one lookup: plain tensors in, one matrix out.

Tracing and scripting remove the Python between torchrec's modules. A model that cannot be
traced or scripted is looked up through the eager module: slower, same answers.
"""

# No "from __future__ import annotations": TorchScript reads the annotations below.
import logging
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torchrec.fx import Tracer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

logger = logging.getLogger(__name__)

KERNEL = "IntNBitTableBatchedEmbeddingBagsCodegen"

Lookup = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(ids int64 [n], lengths int32 [F * B], weights float32 [n] or None) -> float32 [B, sum(dims)]"""


@torch.fx.wrap
def _to_kjt(
    keys: list[str],
    ids: torch.Tensor,
    lengths: torch.Tensor,
    weights: torch.Tensor | None,
) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=keys, values=ids, lengths=lengths, weights=weights)


class TensorLookup(nn.Module):
    """A sharded collection from tensors to a tensor whose columns follow ``keys``.

    The order of torchrec's answer depends on the plan; here the blocks are put back.
    """

    def __init__(
        self,
        sharded: nn.Module,
        features: Sequence[str],
        keys: Sequence[str],
        device: torch.device,
    ) -> None:
        super().__init__()
        self.sharded = sharded
        self.features = list(features)
        answer = self._answer_to_nothing(device)
        self.answer_lengths: list[int] = answer.length_per_key()
        self.order: list[int] = [answer.keys().index(key) for key in keys]

    def _answer_to_nothing(self, device: torch.device) -> KeyedTensor:
        """torchrec creates its input and output modules at the first call, on its device."""
        ids = torch.zeros(0, dtype=torch.int64, device=device)
        lengths = torch.zeros(len(self.features), dtype=torch.int32, device=device)
        weights = torch.zeros(0, device=device)
        with torch.inference_mode():
            return self.sharded(_to_kjt(self.features, ids, lengths, weights))

    def forward(
        self, ids: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        values: torch.Tensor = self.sharded(_to_kjt(self.features, ids, lengths, weights)).values()
        if self.order == sorted(self.order):
            return values
        blocks = torch.split(values, self.answer_lengths, dim=1)
        return torch.cat([blocks[i] for i in self.order], dim=1)


def compile_lookup(lookup: TensorLookup) -> tuple[Lookup, bool]:
    """``lookup`` as TorchScript and True, or as it is and False where that fails (logged)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit's own deprecations
        try:
            graph = Tracer(leaf_modules=[KERNEL]).trace(lookup)
            scripted = torch.jit.script(torch.fx.GraphModule(lookup, graph).eval())
            # Frozen, attributes are constants (the mapped rows too, not copied) and much of
            # what torchrec asks of its batches is known beforehand: a third less time.
            return torch.jit.freeze(scripted), True
        except Exception as error:  # anything: torch names no type for what it cannot compile
            logger.warning("lookups run eagerly, TorchScript failed: %s", str(error)[:500])
            return lookup, False
