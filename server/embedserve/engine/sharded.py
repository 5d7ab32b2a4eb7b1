"""Builds torchrec's DistributedModelParallel over a model's tables.

The tables become a quantized EmbeddingBagCollection, which covers float32 too. It is sharded by the
plan over the local devices of one process, without process group and collectives. The sharded
module is built without rows; attach_weights.py attaches them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
    IntNBitTableBatchedEmbeddingBagsCodegen as Kernel,
)
from torchrec.distributed import embedding_lookup
from torchrec.distributed.fused_params import (
    FUSED_PARAM_BOUNDS_CHECK_MODE,
    FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS,
    FUSED_PARAM_REGISTER_TBE_BOOL,
)
from torchrec.distributed.global_settings import set_propogate_device
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.quant_embeddingbag import (
    QuantEmbeddingBagCollectionSharder,
    ShardedQuantEmbeddingBagCollection,
)
from torchrec.distributed.types import BoundsCheckMode, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection

from embedserve_store.format.manifest import Manifest
from embedserve_store.model_version import ModelVersion
from embedserve_store.plans.plan import Plan
from embedserve_store.plans.planner import to_torchrec

DATA_TYPES = {
    "float32": DataType.FP32,
    "float16": DataType.FP16,
    "int8": DataType.INT8,
    "int4": DataType.INT4,
}


class _ShardedPooledCollection(ShardedQuantEmbeddingBagCollection):  # type: ignore[misc]
    """torchrec's module without its state dict, which requires a scale and bias for float rows."""

    def _initialize_torch_state(self, *args: Any, **kwargs: Any) -> None:
        return None


class _PooledSharder(QuantEmbeddingBagCollectionSharder):  # type: ignore[misc]
    def shard(
        self,
        module: QuantEmbeddingBagCollection,
        params: dict[str, Any],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> _ShardedPooledCollection:
        return _ShardedPooledCollection(module, params, env, self.fused_params, device=device)


def main_device(device_type: str, first_gpu: int = 0) -> torch.device:
    """Returns the device on which batches enter and results leave: the host, or the GPU of rank
    0."""
    return torch.device("cpu") if device_type == "cpu" else torch.device("cuda", first_gpu)


def shard_without_rows(
    version: ModelVersion, plan: Plan, device_type: str, *, is_weighted: bool, first_gpu: int = 0
) -> DistributedModelParallel:
    """Returns the model of ``version`` sharded by ``plan``, whose kernels have no rows yet.

    Every table sums, whatever its pooling. A row-wise mean would divide each rank's partial sum by
    that rank's own count of ids. The engine therefore divides once, after the ranks are added up.

    Args:
        device_type: cpu (all ranks in this host's memory) or cuda (rank r on GPU ``first_gpu`` +
            r).
        is_weighted: whether to build the lookup that takes a weight for every id.
    """
    config = partial(EmbeddingBagConfig, pooling=PoolingType.SUM)
    module = meta_collection(
        version.manifest, QuantEmbeddingBagCollection, config, is_weighted=is_weighted
    )
    sharder = _PooledSharder(fused_params=fused_params(FUSED_PARAM_BOUNDS_CHECK_MODE))
    return distribute(module, plan, device_type, sharder, first_gpu)


def distribute(
    module: torch.nn.Module, plan: Plan, device_type: str, sharder: Any, first_gpu: int
) -> DistributedModelParallel:
    """Returns ``module``, which is on the meta device, sharded by ``plan`` over the devices of this
    process, without rows."""
    # Without this setting torchrec requests CUDA kernels on the CPU.
    set_propogate_device(device_type == "cpu")
    with kernels_without_rows(), _first_rank_on(first_gpu):
        sharded = DistributedModelParallel(
            module=module,
            env=ShardingEnv.from_local(world_size=plan.world_size, rank=0),
            device=main_device(device_type, first_gpu),
            plan=ShardingPlan(plan={"": to_torchrec(plan, device_type)}),
            sharders=[sharder],
            init_data_parallel=False,
        )
    if device_type == "cuda" and plan.world_size == 1:
        _leave_batches_on_gpu(sharded.module)
    return sharded


@contextlib.contextmanager
def _first_rank_on(gpu: int) -> Iterator[None]:
    """Places kernels built in this block on GPU ``gpu`` + r for rank r; torchrec places them on GPU
    r."""
    original = embedding_lookup.rank_device
    embedding_lookup.rank_device = lambda device_type, rank: original(device_type, gpu + rank)
    try:
        yield
    finally:
        embedding_lookup.rank_device = original


def _leave_batches_on_gpu(sharded: Any) -> None:
    """Makes ``sharded``, which is on one GPU, leave batches on that GPU. torchrec would move them
    to GPU 0, except for a model on the meta device."""
    input_dist = getattr(sharded, "_input_dist_module", sharded)  # separate in pooled models
    input_dist._device = torch.device("meta")  # torchrec reads it at the first call


def fused_params(bounds_check: str) -> dict[str, Any]:
    """Returns the settings of the kernels; ``bounds_check`` is the name of the one for ids."""
    return {
        FUSED_PARAM_REGISTER_TBE_BOOL: True,
        FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS: True,
        # The batcher has validated every id.
        bounds_check: BoundsCheckMode.NONE,
        "output_dtype": SparseType.FP32,
    }


@contextlib.contextmanager
def kernels_without_rows() -> Iterator[None]:
    """Makes kernels built in this block allocate no rows.

    torchrec would allocate zeros for all bytes of the tables, only to have them replaced. That
    takes seconds of loading, and a model larger than memory could not be mapped at all.
    """
    original = Kernel.initialize_weights
    Kernel.initialize_weights = lambda kernel: None
    try:
        yield
    finally:
        Kernel.initialize_weights = original


def meta_collection(manifest: Manifest, collection: Any, config: Any, **options: Any) -> Any:
    """Returns the tables as a torchrec ``collection`` of ``config`` on the meta device."""
    return collection(
        tables=[
            config(
                name=table.name,
                num_embeddings=table.num_embeddings,
                embedding_dim=table.stored_dim,
                feature_names=list(table.feature_names),
                data_type=DATA_TYPES[table.dtype],
            )
            for table in manifest.tables
        ],
        **options,
        device=torch.device("meta"),
        output_dtype=torch.float32,
        register_tbes=True,
        quant_state_dict_split_scale_bias=True,
    )
