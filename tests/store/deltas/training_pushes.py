"""Trains sharded tables over gloo processes and pushes what changed to the store.

    python training_pushes.py WORLD_SIZE STORE OUT_FOLDER

Rank 0 publishes version 1 of "m" with the others, and writes ``SEQ.pt`` into OUT_FOLDER after each
push: the tables, whole, as they are in training. Before the last push it undoes all deltas.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from store.deltas.tracked_training import batch, gathered, ranker, stepper
from torchrec import KeyedJaggedTensor

from embedserve_store import (
    DeltaWriter,
    RevertedError,
    StoreError,
    publish_sharded,
    undo_deltas,
)

STEPS = (3, 1, 0, 2)
"""Training steps before each push."""


def main(rank: int, world_size: int, store: str, out: str, rendezvous: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    dmp = ranker()
    step = stepper(dmp, rank)
    step()
    publish_sharded(dmp, store, model="m")
    dist.barrier()
    with DeltaWriter(store, model="m", module=dmp) as writer:
        for at, steps in enumerate(STEPS):
            for _ in range(steps):
                step()
            if at == 1:
                fail_once(writer)
            if at == len(STEPS) - 1:
                undo_all(writer, store, rank)
            seq = writer.push(step=at, goldens=bags(at))
            whole = gathered(dmp)
            if rank == 0:
                torch.save(whole, Path(out) / f"{seq}.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # torch's own threads may outlive what they use in an orderly end


def bags(seed: int) -> KeyedJaggedTensor | None:
    """Returns bags that most ranks do not have: those of rank 0 count. The last push has none."""
    if seed == len(STEPS) - 1:
        return None
    return batch(np.random.default_rng(seed)) if dist.get_rank() == 0 else None


def undo_all(writer: DeltaWriter, store: str, rank: int) -> None:
    """All ranks learn of an undo, and the next push has the undone rows of each."""
    if rank == 0:
        undo_deltas(store, "m", to=0, why="CTR fell")
    dist.barrier()
    with pytest.raises(RevertedError, match="CTR fell"):
        writer.push()
    writer.resume()


def fail_once(writer: DeltaWriter) -> None:
    """A push whose manifest the store does not take: all ranks raise, and the next has its rows."""
    real = writer._write

    def refuse(name: str, data: bytes) -> bool:
        if name.endswith(".json"):
            raise StoreError("the store is away")
        return real(name, data)

    writer._write = refuse
    with pytest.raises(StoreError, match="the store is away"):
        writer.push()
    writer._write = real


if __name__ == "__main__":
    size, *folders = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    with tempfile.TemporaryDirectory() as meeting:
        arguments = (size, *folders, f"file://{meeting}/rendezvous")
        # Forked, the ranks need not import torch again.
        mp.start_processes(main, arguments, nprocs=size, start_method="fork")
