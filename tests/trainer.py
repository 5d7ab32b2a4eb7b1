"""Trains a sharded TorchRec model over gloo processes and saves the files of a training job.

    python trainer.py WORLD_SIZE OUT_FOLDER [DTYPE]

Writes to OUT_FOLDER:
- ``checkpoint/``: the larger model and its optimizer, by torch.distributed.checkpoint
- ``gathered.pt``: the tables alone, whole, as a state dict
- ``answers.npz``: sampled bags, and the results of the trained model for them
- ``tables.yaml``: the description of the tables

DTYPE is float32 or float16. One collection holds row-wise, table-wise, column-wise and
data-parallel tables, pooled by SUM and MEAN. One table has two features. Dense layers surround the
collection.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import yaml
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from forked_ranks import run_ranks
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingType,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

STEPS = 4
BATCH_SIZE = 16
SAMPLED = 64
DTYPES = {"float32": DataType.FP32, "float16": DataType.FP16}
TABLES: dict[str, dict[str, Any]] = {
    "user": {"rows": 103, "dim": 16, "features": ["user", "friend"], "pooling": "sum"},
    "item": {"rows": 77, "dim": 8, "features": ["item"], "pooling": "mean"},
    "tag": {"rows": 50, "dim": 16, "features": ["tag"], "pooling": "sum"},
    "country": {"rows": 12, "dim": 4, "features": ["country"], "pooling": "mean"},
    "device": {"rows": 7, "dim": 4, "features": ["device"], "pooling": "sum"},
}
SHARDING = {
    "user": "row_wise",
    "item": "table_wise",
    "tag": "column_wise",
    "country": "data_parallel",
    "device": "row_wise",  # on four ranks the last has one row
}
FEATURES = {f: table["rows"] for table in TABLES.values() for f in table["features"]}


class CpuSharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """Offers row-wise sharding on the CPU, which TorchRec's own (untyped) sharder does not."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [*super().sharding_types(compute_device_type), "row_wise"]


class Ranker(nn.Module):
    def __init__(self, dtype: str) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=table["rows"],
                embedding_dim=table["dim"],
                feature_names=table["features"],
                pooling=PoolingType[table["pooling"].upper()],
                data_type=DTYPES[dtype],
            )
            for name, table in TABLES.items()
        ]
        self.sparse = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=tables)})
        width = sum(table["dim"] * len(table["features"]) for table in TABLES.values())
        self.over = nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled: torch.Tensor = self.sparse["ebc"](features).values()
        logits: torch.Tensor = self.over(pooled.float())
        return logits.squeeze(-1)


def sample(
    rng: np.random.Generator,
    batch_size: int,
    features: Mapping[str, int] = MappingProxyType(FEATURES),
    ids_max: int = 6,
) -> KeyedJaggedTensor:
    """Returns random bags of 0 to ``ids_max`` ids of ``features``, which have as many rows."""
    lengths = rng.integers(0, ids_max + 1, (len(features), batch_size))
    ids = [
        rng.integers(0, rows, total)
        for rows, total in zip(features.values(), lengths.sum(axis=1), strict=True)
    ]
    return KeyedJaggedTensor(
        keys=list(features),
        values=torch.from_numpy(np.concatenate(ids)),
        lengths=torch.from_numpy(lengths.reshape(-1).astype(np.int32)),
    )


def shard(dtype: str) -> DistributedModelParallel:
    return shard_model(Ranker(dtype), SHARDING)


def shard_model(
    model: nn.Module,
    sharding: Mapping[str, str],
    optimizer: EmbOptimType = EmbOptimType.EXACT_ADAGRAD,
    kernels: Mapping[str, str] = MappingProxyType({}),
) -> DistributedModelParallel:
    """Shards ``model`` as ``sharding`` specifies, over all ranks; column shards have 4 columns."""
    constraints = {
        name: ParameterConstraints(sharding_types=[kind], min_partition=4)
        for name, kind in sharding.items()
    }
    fused = {"optimizer": optimizer, "learning_rate": 0.05, "eps": 1e-4}
    sharders = [CpuSharder(fused), *get_default_sharders()[1:]]
    world_size = dist.get_world_size()
    topology = Topology(world_size=world_size, compute_device="cpu", local_world_size=world_size)
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    for tables in plan.plan.values():
        for name, kernel in kernels.items():
            tables[name].compute_kernel = kernel
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=plan,
        sharders=sharders,
    )


def train(dmp: DistributedModelParallel, rank: int) -> CombinedOptimizer:
    """Trains a few steps; each rank has its own examples."""
    dense = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    own = KeyedOptimizerWrapper(
        dense, lambda params: torch.optim.Adagrad(params, lr=0.05, eps=1e-4)
    )
    optimizer = CombinedOptimizer([dmp.fused_optimizer, own])
    rng = np.random.default_rng(rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (dmp(sample(rng, BATCH_SIZE)) - torch.ones(BATCH_SIZE)).square().mean()
        loss.backward()
        optimizer.step()
    return optimizer


def gathered(dmp: DistributedModelParallel, rank: int) -> dict[str, torch.Tensor]:
    """Returns every whole table on rank 0. The results of other ranks have no use."""
    whole = {}
    for key, value in dmp.state_dict().items():
        if ".embedding_bags." in key:
            whole[key] = torch.empty(value.size(), dtype=value.dtype)
            if isinstance(value, ShardedTensor):
                value.gather(0, whole[key] if rank == 0 else None)
            else:
                whole[key].copy_(value)
    return whole


def answers(dmp: DistributedModelParallel) -> dict[str, np.ndarray]:
    """Returns ids, lengths and, for each key, float32 [SAMPLED, dim].

    Every rank looks up the same ids.
    """
    bags = sample(np.random.default_rng(1234), SAMPLED)
    with torch.no_grad():
        result: KeyedTensor = dmp.module.sparse["ebc"](bags)
        pooled = {f"answer.{key}": value for key, value in result.to_dict().items()}
    requested = {"ids": bags.values(), "lengths": bags.lengths().view(len(FEATURES), SAMPLED)}
    return {name: value.numpy() for name, value in (requested | pooled).items()}


def describe(dtype: str) -> str:
    tables = [
        {
            "name": name,
            "num_embeddings": table["rows"],
            "embedding_dim": table["dim"],
            "feature_names": table["features"],
            "pooling": table["pooling"],
            "dtype": dtype,
        }
        for name, table in TABLES.items()
    ]
    return str(yaml.safe_dump({"tables": tables}, sort_keys=False))


def run(rank: int, out: Path, dtype: str) -> None:
    dmp = shard(dtype)
    optimizer = train(dmp, rank)
    state = {"model": dmp.state_dict(), "optimizer": optimizer.state_dict(), "step": STEPS}
    dcp.save(state, checkpoint_id=out / "checkpoint")
    tables, results = gathered(dmp, rank), answers(dmp)
    if rank == 0:
        torch.save(tables, out / "gathered.pt")
        np.savez(out / "answers.npz", allow_pickle=False, **results)
        (out / "tables.yaml").write_text(describe(dtype))
    dist.barrier()


def main(world_size: str, out: str, dtype: str = "float32") -> None:
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    run_ranks(int(world_size), run, folder, dtype)


if __name__ == "__main__":
    main(*sys.argv[1:])
