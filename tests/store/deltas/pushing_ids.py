"""Pushes ids from two ranks over gloo; prints what each call returned or raised.

python pushing_ids.py STORE 2
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from forked_ranks import run_ranks
from store.deltas.conftest import rows

from embedserve_store import DeltaWriter, StoreError

PUSHES: tuple[tuple[tuple[list[int], list[int]], ...], ...] = (
    (([2000], []), ([1001, 1000], [])),
    (([3000], []), ([3000], [])),
    (([1000], []), ([], [1000])),
    (([3000], [1001]), ([], [2000])),
)
"""Pushed and removed ids of each rank, for each push."""


def run(rank: int, world_size: int, store: str) -> None:
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


if __name__ == "__main__":
    store, world_size = sys.argv[1], int(sys.argv[2])
    run_ranks(world_size, run, world_size, store)
