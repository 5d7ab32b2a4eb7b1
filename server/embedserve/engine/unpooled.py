"""Builds torchrec's DistributedModelParallel over an EmbeddingCollection: one row for each id.

As sharded.py does for pooled tables: a quantized collection sharded by the plan, its kernels
pointed at the stored rows. It adds nothing up, so ids have no weights here.
"""

from __future__ import annotations

from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torchrec.distributed.fused_params import (
    FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS,
    FUSED_PARAM_REGISTER_TBE_BOOL,
)
from torchrec.distributed.global_settings import set_propogate_device
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.quant_embedding import (
    QuantEmbeddingCollectionSharder,
    ShardedQuantEmbeddingCollection,
)
from torchrec.distributed.types import BoundsCheckMode, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection

from embedserve.engine.bind import bind_rows
from embedserve.engine.sharded import DATA_TYPES, kernels_without_rows, main_device
from embedserve_store.format.manifest import Manifest
from embedserve_store.model_version import ModelVersion
from embedserve_store.plans.plan import Plan
from embedserve_store.plans.planner import to_torchrec


class _ShardedCollection(ShardedQuantEmbeddingCollection):  # type: ignore[misc]
    """torchrec's module without its state dict, which wants a scale and bias for float rows."""

    def _initialize_torch_state(self, *args: Any, **kwargs: Any) -> None:
        return None


class _Sharder(QuantEmbeddingCollectionSharder):  # type: ignore[misc]
    def shard(
        self,
        module: QuantEmbeddingCollection,
        params: dict[str, Any],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> _ShardedCollection:
        return _ShardedCollection(module, params, env, self.fused_params, device=device)


def shard_unpooled(version: ModelVersion, plan: Plan, device_type: str) -> DistributedModelParallel:
    """The model of ``version`` sharded by ``plan``, answering with its stored rows.

    torchrec puts the rows of a row-wise table's ranks back into the order of the ids. It has no
    column-wise lookup of single rows on CPU: the plan was checked not to ask for it.

    Args:
        device_type: cpu (all ranks on this host's memory, nothing copied) or cuda (rank r on
            GPU r, its rows copied there).
    """
    # On CPU torchrec otherwise asks for CUDA kernels.
    set_propogate_device(device_type == "cpu")
    module = _meta_collection(version.manifest)
    with kernels_without_rows():
        sharded = DistributedModelParallel(
            module=module,
            env=ShardingEnv.from_local(world_size=plan.world_size, rank=0),
            device=main_device(device_type),
            plan=ShardingPlan(plan={"": to_torchrec(plan, device_type)}),
            sharders=[_Sharder(fused_params=_fused_params())],
            init_data_parallel=False,
        )
    bind_rows(sharded.module, version, device_type)
    return sharded


def _fused_params() -> dict[str, Any]:
    return {
        FUSED_PARAM_REGISTER_TBE_BOOL: True,
        FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS: True,
        # The service has checked every id. torchrec's name for this reaches pooled kernels only:
        # this is FBGEMM's.
        "bounds_check_mode": BoundsCheckMode.NONE,
        "output_dtype": SparseType.FP32,
    }


def _meta_collection(manifest: Manifest) -> QuantEmbeddingCollection:
    return QuantEmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name=table.name,
                num_embeddings=table.num_embeddings,
                embedding_dim=table.stored_dim,
                feature_names=list(table.feature_names),
                data_type=DATA_TYPES[table.dtype],
            )
            for table in manifest.tables
        ],
        device=torch.device("meta"),
        output_dtype=torch.float32,
        register_tbes=True,
        quant_state_dict_split_scale_bias=True,
    )
