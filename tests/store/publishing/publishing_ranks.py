"""Publishes a sharded model from two gloo processes; their process group has a timeout of LIMIT.

    python publishing_ranks.py FOLDER CASE

CASE is a fault, ``rounding`` (the ranks round the results that they exchange to float16), or
``replicas`` (each rank has the whole model, as in TorchRec's DMPCollection). Faults are
``publishing`` (rank 0 publishes for longer than LIMIT), ``saving`` (rank 1 saves its shards for
longer), ``unwritable`` (rank 1 cannot write to the store) and ``full`` (its disk is full). FOLDER
gets ``store/`` and, for each rank, ``outcome-RANK``.
"""

import errno
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import trainer
from forked_ranks import run_ranks
from torch.distributed import _remote_device, distributed_c10d
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv2D, ShardingPlan

from embedserve_store.errors import StoreError
from embedserve_store.publishing import publish, publish_sharded

LIMIT = timedelta(seconds=1)


def late(call: Callable[..., Any]) -> Callable[..., Any]:
    def called(*arguments: Any, **options: Any) -> Any:
        time.sleep(3 * LIMIT.total_seconds())
        return call(*arguments, **options)

    return called


def arrange(rank: int, case: str) -> Any:
    """Returns a patch for this rank in ``case``; it patches nothing if the rank behaves as
    usual."""
    if (case, rank) == ("publishing", 0):
        return patch.object(publish_sharded, "publish", late(publish.publish))
    if (case, rank) == ("saving", 1):
        return patch.object(FileSystemWriter, "write_data", late(FileSystemWriter.write_data))
    if (case, rank) == ("unwritable", 1):
        write_error = StoreError("cannot be written on rank 1")
        return patch.object(publish, "check_writable", side_effect=write_error)
    if (case, rank) == ("full", 1):
        disk_error = OSError(errno.ENOSPC, "No space left on device")
        return patch.object(FileSystemWriter, "write_data", side_effect=disk_error)
    return patch.dict({})


def replicated(rank: int) -> DistributedModelParallel:
    """Returns a model as in a DMPCollection, which runs on GPUs only: sharded over groups of one
    rank, whose plans have the ranks of their group."""
    model = trainer.Ranker("float32")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    groups = mesh.get_group("shard"), mesh.get_group("replicate")
    whole = {name: table_wise(rank, "cpu") for name in trainer.TABLES}
    tables = construct_module_sharding_plan(model.sparse["ebc"], whole, None, 2, 2, "cpu")
    for table in tables.values():
        table.sharding_spec.shards[0].placement = _remote_device(f"rank:{rank}/cpu")
    return DistributedModelParallel(
        model,
        env=ShardingEnv2D(*groups, dist.group.WORLD, mesh),
        device=torch.device("cpu"),
        plan=ShardingPlan({"sparse.ebc": tables}),
    )


def sharded(case: str, rank: int) -> DistributedModelParallel:
    if case == "replicas":
        return replicated(rank)
    config = QCommsConfig(CommType.FP16, CommType.FP16)
    codecs = get_qcomm_codecs_registry(config) if case == "rounding" else None
    sharder = partial(trainer.CpuSharder, qcomm_codecs_registry=codecs)
    with patch.object(trainer, "CpuSharder", sharder):
        return trainer.shard("float32")


def run(rank: int, folder: Path, case: str) -> None:
    dmp = sharded(case, rank)
    distributed_c10d._set_pg_timeout(LIMIT)
    with arrange(rank, case), patch.object(distributed_c10d, "default_pg_timeout", LIMIT):
        try:
            published = publish_sharded.publish_sharded(dmp, folder / "store", model="m")
            outcome = "none" if published is None else str(published.version)
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
    (folder / f"outcome-{rank}").write_text(outcome)


if __name__ == "__main__":
    run_ranks(2, run, Path(sys.argv[1]), sys.argv[2])
