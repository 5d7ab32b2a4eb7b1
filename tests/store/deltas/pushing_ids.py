"""Pushes ids from two ranks over gloo; prints what each call returned or raised.

python pushing_ids.py STORE 2
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp
from store.deltas.conftest import rows

from embedserve_store import DeltaWriter, StoreError

PUSHES: tuple[tuple[tuple[list[int], list[int]], ...], ...] = (
    (([2000], []), ([1001, 1000], [])),
    (([3000], []), ([3000], [])),
    (([1000], []), ([], [1000])),
    (([3000], [1001]), ([], [2000])),
)
"""Pushed and removed ids of each rank, for each push."""


def run(rank: int, world_size: int, store: str, meeting: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size
    )
    outcomes = []
    with DeltaWriter(store, model="m") as writer:
        for push in PUSHES:
            pushed, removed = push[rank]
            changes: dict[str, Any] = {}
            if pushed:
                changes["user"] = pushed, rows("user", len(pushed))
            try:
                outcomes.append(str(writer.push_rows(changes, removed={"user": removed})))
            except StoreError as error:
                outcomes.append(f"{type(error).__name__}: {error}")
    all_outcomes: list[list[str] | None] = [None] * world_size
    dist.all_gather_object(all_outcomes, outcomes)
    if rank == 0:
        assert all(one == outcomes for one in all_outcomes), all_outcomes
        print("\n".join(outcomes))
    dist.destroy_process_group()


if __name__ == "__main__":
    store, world_size = sys.argv[1], int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, store, os.path.join(folder, "meeting"))
        mp.start_processes(run, arguments, nprocs=world_size, start_method="fork")
