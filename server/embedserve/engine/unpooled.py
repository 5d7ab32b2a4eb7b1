"""Builds torchrec's DistributedModelParallel over an EmbeddingCollection, which returns one row per
id.

Like sharded.py for pooled tables, it shards a quantized collection by the plan, without rows.
Nothing is summed, so ids have no weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.quant_embedding import (
    QuantEmbeddingCollectionSharder,
    ShardedQuantEmbeddingCollection,
)
from torchrec.distributed.sharding.tw_sequence_sharding import InferTwSequenceEmbeddingDist
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection

from embedserve.engine.sharded import distribute, fused_params, meta_collection
from embedserve_store.model_version import ModelVersion
from embedserve_store.plans.plan import Plan


class _IdentityOutputDist(nn.Module):
    """Output dist that leaves rows where they are, in place of the gathering of rows from several
    GPUs."""

    def forward(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return tensors


class _ShardedUnpooledCollection(ShardedQuantEmbeddingCollection):  # type: ignore[misc]
    """torchrec's module without its state dict, which requires a scale and bias for float rows. On
    one GPU it also avoids FBGEMM's all_to_one_device, which always queries NVML for the links
    between GPUs.

    Attributes:
        ranks: number of ranks over which the module is sharded.
    """

    ranks = 0

    def _initialize_torch_state(self, *args: Any, **kwargs: Any) -> None:
        return None

    def _create_output_dist(self, device: torch.device | None = None) -> None:
        super()._create_output_dist(device)
        for output_dist in self._output_dists:
            if self.ranks == 1 and isinstance(output_dist, InferTwSequenceEmbeddingDist):
                output_dist._dist = _IdentityOutputDist()


class _UnpooledSharder(QuantEmbeddingCollectionSharder):  # type: ignore[misc]
    def shard(
        self,
        module: QuantEmbeddingCollection,
        params: dict[str, Any],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> _ShardedUnpooledCollection:
        sharded = _ShardedUnpooledCollection(module, params, env, self.fused_params, device=device)
        sharded.ranks = env.world_size
        return sharded


def shard_unpooled_without_rows(
    version: ModelVersion, plan: Plan, device_type: str, *, first_gpu: int = 0
) -> DistributedModelParallel:
    """Returns the model of ``version`` sharded by ``plan``, whose kernels have no rows yet.

    torchrec restores the order of the ids for the rows of a row-wise table's ranks. It has no
    column-wise lookup of single rows on CPU; the plan was checked to need none.

    Args:
        device_type, first_gpu: as in sharded.shard_without_rows.
    """
    # torchrec's name of the parameter reaches pooled kernels only; this is FBGEMM's name.
    sharder = _UnpooledSharder(fused_params=fused_params("bounds_check_mode"))
    module = meta_collection(version.manifest, QuantEmbeddingCollection, EmbeddingConfig)
    return distribute(module, plan, device_type, sharder, first_gpu)
