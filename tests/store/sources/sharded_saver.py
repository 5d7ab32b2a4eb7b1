"""Saves and publishes the tables of a model that two gloo processes train.

    python sharded_saver.py OUT_FOLDER

OUT_FOLDER gets ``tables/`` (written by save_tables), ``expected.safetensors`` (written by
write_expected), ``described.pt`` (the result of describe_sharded), ``gathered.pt`` (the whole
tables) and ``store/`` (with the published model). Each rank writes ``outcome-RANK``: the version
that its publish returned, and the error of a publish that must fail.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import trainer
from forked_ranks import run_ranks
from torchrec.distributed import DistributedModelParallel

from embedserve_store.errors import StoreError
from embedserve_store.publishing.publish_sharded import publish_sharded
from embedserve_store.publishing.write_expected import write_expected
from embedserve_store.sources.live_dmp import describe_sharded, save_tables


def publish(dmp: DistributedModelParallel, rank: int, out: Path) -> None:
    options: dict[str, Any] = {"model": "m", "sharding": "row_wise", "world_size": 2}
    published = publish_sharded(dmp, out / "store", **options)
    publish_sharded(dmp, out / "store", model="own")
    publish_sharded(dmp, out / "store", model="wider", world_size=3)
    outcome = "none" if published is None else str(published.version)
    try:
        publish_sharded(dmp, out / "store", **options, dtype="int2")
    except StoreError as error:
        outcome += f"\n{error}"
    (out / f"outcome-{rank}").write_text(outcome)


def run(rank: int, out: Path) -> None:
    dmp = trainer.shard("float32")
    trainer.train(dmp, rank)
    write_expected(dmp, out / "expected.safetensors", rows="all")
    tables, _, path = describe_sharded(dmp)
    save_tables(dmp, out / "tables", path)
    gathered = trainer.gathered(dmp, rank)
    if rank == 0:
        torch.save([dataclasses.astuple(table)[:6] for table in tables], out / "described.pt")
        torch.save(gathered, out / "gathered.pt")
    publish(dmp, rank, out)
    dist.barrier()


if __name__ == "__main__":
    run_ranks(2, run, Path(sys.argv[1]))
