"""Builds torchrec's DistributedModelParallel over a model's tables and binds stored rows to it.

The tables become a quantized EmbeddingBagCollection (which covers float32 too) sharded by the
plan over the local devices of one process: no process group, no collectives. The sharded
module holds no rows of its own; every lookup kernel is pointed into the mapped file.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
    IntNBitTableBatchedEmbeddingBagsCodegen as Kernel,
)
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

from embedserve_store.load import ModelVersion
from embedserve_store.manifest import Manifest
from embedserve_store.plan import Plan
from embedserve_store.planner import to_torchrec

DATA_TYPES = {
    "float32": DataType.FP32,
    "float16": DataType.FP16,
    "int8": DataType.INT8,
    "int4": DataType.INT4,
}
CUDA_ROW_ALIGNMENT_BYTES = 16
COPY_BLOCK_BYTES = 64 << 20


class _ShardedCollection(ShardedQuantEmbeddingBagCollection):  # type: ignore[misc]
    """torchrec's module without its state dict, which wants a scale and bias for float rows."""

    def _initialize_torch_state(self, *args: Any, **kwargs: Any) -> None:
        return None


class _Sharder(QuantEmbeddingBagCollectionSharder):  # type: ignore[misc]
    def shard(
        self,
        module: QuantEmbeddingBagCollection,
        params: dict[str, Any],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> _ShardedCollection:
        return _ShardedCollection(module, params, env, self.fused_params, device=device)


def main_device(device_type: str) -> torch.device:
    """Where batches enter and answers leave: the host, or the first GPU."""
    return torch.device("cpu" if device_type == "cpu" else "cuda:0")


def shard(
    version: ModelVersion,
    plan: Plan,
    device_type: str,
    *,
    is_weighted: bool,
    rows_of: DistributedModelParallel | None = None,
) -> DistributedModelParallel:
    """The model of ``version`` sharded by ``plan``, answering from its stored rows.

    Every table sums, whatever its pooling: a row-wise mean divides each rank's part by that
    rank's own count of ids, so the engine divides once, after the ranks are added up.

    Args:
        device_type: cpu (all ranks on this host's memory, nothing copied) or cuda (rank r on
            GPU r, its rows copied there).
        is_weighted: build the lookup that takes a weight for every id.
        rows_of: use the rows of this model, sharded by the same plan, instead of binding anew.
    """
    # On CPU torchrec otherwise asks for CUDA kernels.
    set_propogate_device(device_type == "cpu")
    module = _meta_collection(version.manifest, is_weighted)
    with _kernels_without_rows():
        sharded = DistributedModelParallel(
            module=module,
            env=ShardingEnv.from_local(world_size=plan.world_size, rank=0),
            device=main_device(device_type),
            plan=ShardingPlan(plan={"": to_torchrec(plan, device_type)}),
            sharders=[_Sharder(fused_params=_fused_params())],
            init_data_parallel=False,
        )
    if rows_of is None:
        bind_rows(sharded.module, version, device_type)
    else:
        _share_rows(sharded.module, rows_of.module)
    return sharded


def _fused_params() -> dict[str, Any]:
    return {
        FUSED_PARAM_REGISTER_TBE_BOOL: True,
        FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS: True,
        # The service has checked every id.
        FUSED_PARAM_BOUNDS_CHECK_MODE: BoundsCheckMode.NONE,
        "output_dtype": SparseType.FP32,
    }


@contextlib.contextmanager
def _kernels_without_rows() -> Iterator[None]:
    """Kernels built in this block allocate no rows.

    torchrec would fill as many zeros as the tables have bytes, only to have them replaced:
    seconds of loading, and a model larger than memory could not be mapped at all.
    """
    original = Kernel.initialize_weights
    Kernel.initialize_weights = lambda kernel: None
    try:
        yield
    finally:
        Kernel.initialize_weights = original


def _meta_collection(manifest: Manifest, is_weighted: bool) -> QuantEmbeddingBagCollection:
    return QuantEmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=table.name,
                num_embeddings=table.num_embeddings,
                embedding_dim=table.embedding_dim,
                feature_names=list(table.feature_names),
                pooling=PoolingType.SUM,
                data_type=DATA_TYPES[table.dtype],
            )
            for table in manifest.tables
        ],
        is_weighted=is_weighted,
        device=torch.device("meta"),
        output_dtype=torch.float32,
        register_tbes=True,
        quant_state_dict_split_scale_bias=True,
    )


def bind_rows(
    sharded: ShardedQuantEmbeddingBagCollection, version: ModelVersion, device_type: str
) -> None:
    """Points every kernel of ``sharded`` at its shards' rows: mapped on CPU, copied on CUDA."""
    mapped = as_tensor(version.tables.data)
    for kernel, config in sharded.tbes_configs().items():
        byte_ranges = list(_byte_ranges(config, version))
        if device_type == "cpu":
            kernel.weights_host = mapped
            kernel.host_size = mapped.numel()
            kernel.weights_physical_offsets = [start for start, _, _ in byte_ranges]
            kernel.initialize_logical_weights_placements_and_offsets()
            kernel.weight_initialized = True
        else:
            _copy_rows(kernel, mapped, byte_ranges)


def _share_rows(
    sharded: ShardedQuantEmbeddingBagCollection, bound: ShardedQuantEmbeddingBagCollection
) -> None:
    """Points the kernels of ``sharded`` at the rows of ``bound``, their twin of the same plan."""
    for kernel, twin in zip(sharded.tbes_configs(), bound.tbes_configs(), strict=True):
        kernel.weights_host, kernel.host_size = twin.weights_host, twin.host_size
        kernel.weights_dev, kernel.dev_size = twin.weights_dev, twin.dev_size
        kernel.weights_physical_offsets = twin.weights_physical_offsets
        kernel.initialize_logical_weights_placements_and_offsets()
        kernel.weight_initialized = True


def as_tensor(data: np.ndarray) -> torch.Tensor:
    """``data`` (read-only mapped uint8) as a tensor over the same memory, never written to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(data)


def _byte_ranges(config: Any, version: ModelVersion) -> Iterator[tuple[int, int, int]]:
    """(first byte, rows, bytes of a row) in the mapped file of each table shard of a kernel."""
    specs = {table.name: table for table in version.manifest.tables}
    for shard_config in config.embedding_tables:
        spec = specs[shard_config.name]
        first_row = shard_config.local_metadata.shard_offsets[0]
        start = version.tables.offsets[spec.name] + first_row * spec.row_bytes
        yield start, shard_config.local_rows, spec.row_bytes


def _copy_rows(kernel: Any, mapped: torch.Tensor, byte_ranges: list[tuple[int, int, int]]) -> None:
    """Copies a kernel's shards to its GPU, each row padded to 16 bytes as CUDA kernels read it."""
    kernel.initialize_weights()
    for (start, rows, row_bytes), offset in zip(
        byte_ranges, kernel.weights_physical_offsets, strict=True
    ):
        pitch = -(-row_bytes // CUDA_ROW_ALIGNMENT_BYTES) * CUDA_ROW_ALIGNMENT_BYTES
        source = mapped[start : start + rows * row_bytes].view(rows, row_bytes)
        target = kernel.weights_dev[offset : offset + rows * pitch].view(rows, pitch)
        # In blocks: a padded copy first makes a whole one of its own on the GPU.
        step = max(1, COPY_BLOCK_BYTES // row_bytes)
        for row in range(0, rows, step):
            target[row : row + step, :row_bytes].copy_(source[row : row + step])
