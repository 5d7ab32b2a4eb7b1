"""Times DeltaWriter.push over two ranks that train: some 76,000 rows of a sharded model each.

    PYTHONPATH=tests .venv/bin/python bench/experiments/push_ranks.py [--pushes 12] [--folder DIR]

8 tables of 100,000 rows of 64 float32, half of them row_wise and half table_wise, in a
DistributedModelParallel over gloo. Before each push the ranks train one step of 80,000 random ids,
whose rows TorchRec's tracker records. The store is a folder, by default in a temporary one. In
turns a push waits until the delta is written, or writes it in a thread. How long the caller on rank
0 is stopped is timed, and how much of that the copy of the rows takes. Each rank has one thread
beside that of the push.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from forked_ranks import run_ranks
from pooled import collection
from torch import nn
from torchrec import KeyedJaggedTensor, PoolingType
from torchrec.distributed import DistributedModelParallel
from trainer import shard_model

from embedserve_store import DeltaLine, DeltaWriter, ModelStore, publish_sharded
from embedserve_store.deltas.tracked_rows import TakenRows

RANKS, MODEL = 2, "m"
TABLES, ROWS, DIM = 8, 100_000, 64
NAMES = [f"t{table}" for table in range(TABLES)]
EXAMPLES, IDS_PER_BAG = 500, 10
"""Batch of a rank. Both ranks together look up 10,000 ids of each table, some 9,500 different
ones."""
WARM_UP = 2


class Ranker(nn.Module):
    """One dense layer over the tables."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = collection([(name, ROWS, DIM, [name], PoolingType.SUM) for name in NAMES])
        self.over = nn.Linear(TABLES * DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        logits: torch.Tensor = self.over(self.ebc(features).values())
        return logits


def train_step(dmp: DistributedModelParallel, random: np.random.Generator) -> None:
    ids = random.integers(0, ROWS, TABLES * EXAMPLES * IDS_PER_BAG)
    lengths = torch.full((TABLES * EXAMPLES,), IDS_PER_BAG, dtype=torch.int32)
    features = KeyedJaggedTensor(keys=NAMES, values=torch.from_numpy(ids), lengths=lengths)
    (dmp(features) - 1).square().mean().backward()


def run(rank: int, store: str, pushes: int) -> None:
    logging.disable(logging.WARNING)
    sharding = {name: "row_wise" if table % 2 else "table_wise" for table, name in enumerate(NAMES)}
    dmp = shard_model(Ranker(), sharding, EmbOptimType.EXACT_SGD)
    random = np.random.default_rng(rank)
    train_step(dmp, random)
    publish_sharded(dmp, store, model=MODEL)
    dist.barrier()
    times = Times()
    with DeltaWriter(store, model=MODEL, module=dmp, overlap_steps=0) as writer:
        assert writer._tracked is not None
        writer._tracked.take = times.copied(writer._tracked.take)  # type: ignore[method-assign]
        for step in range(WARM_UP + 2 * pushes):
            train_step(dmp, random)
            writer.wait()
            dist.barrier()
            began_s = perf_counter()
            if step % 2:
                writer.push(step=step, wait=False)
            else:
                writer.push(step=step)
            times.stopped_ms.append(1e3 * (perf_counter() - began_s))
    if rank == 0:
        report(store, times)
    dist.barrier()


class Times:
    """Milliseconds of each push: those with ``wait`` have even numbers."""

    def __init__(self) -> None:
        self.stopped_ms: list[float] = []
        self.copy_ms: list[float] = []

    def copied(self, take: Callable[[], TakenRows]) -> Callable[[], TakenRows]:
        """Returns ``take``, timed."""

        def timed() -> TakenRows:
            began_s = perf_counter()
            taken = take()
            self.copy_ms.append(1e3 * (perf_counter() - began_s))
            return taken

        return timed


def report(store: str, times: Times) -> None:
    models = ModelStore(store)
    line = DeltaLine(models, models.manifest(MODEL))
    deltas = [delta for delta, _ in line.deltas()][WARM_UP:]
    rows = statistics.median(sum(delta.rows.values()) for delta in deltas)
    nbytes = statistics.median(delta.nbytes for delta in deltas)
    print(
        f"pushes from {RANKS} ranks, {rows:,.0f} rows ({nbytes / 2**20:.1f} MiB) each", flush=True
    )
    for first, name in enumerate(("wait=True", "wait=False")):
        for what, all_ms in (("stopped", times.stopped_ms), ("of it the copy", times.copy_ms)):
            some = all_ms[WARM_UP + first :: 2]
            print(
                f"{name}, {what}: median {statistics.median(some):.1f} ms of {len(some)}, "
                f"min {min(some):.1f}, max {max(some):.1f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pushes", type=int, default=12)
    parser.add_argument("--folder", type=Path, help="existing folder for the store")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run_ranks(RANKS, run, f"{folder}/store", options.pushes)


if __name__ == "__main__":
    main()
