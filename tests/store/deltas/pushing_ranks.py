"""Pushes rows from several ranks over gloo; prints what each call returned or raised.

python pushing_ranks.py STORE WORLD_SIZE
"""

from __future__ import annotations

import sys
from unittest.mock import patch

import numpy as np
import torch.distributed as dist
from forked_ranks import run_ranks
from numpy.typing import NDArray

from embedserve_store import DeltaWriter, StoreError
from embedserve_store.deltas import line_appender

DIM = 16


def rows(ids: list[int]) -> NDArray[np.float32]:
    return np.repeat(np.array(ids, np.float32)[:, None], DIM, axis=1)


def run(rank: int, world_size: int, store: str) -> None:
    outcomes = []
    with DeltaWriter(store, model="m") as writer:
        own = [rank, 10 + rank]
        pushes: tuple[dict[str, tuple[list[int], NDArray[np.float32]]], ...] = (
            {"user": (own, rows(own))},
            {"user": ([7], rows([7]))} if rank == world_size - 1 else {},
            {"user": ([rank + 290], rows([rank])) if rank else ([300], rows([300]))},
            {"user": ([50], rows([50]))},
            {},
        )
        for push in pushes:
            try:
                outcomes.append(str(writer.push_rows(push)))
            except StoreError as error:
                outcomes.append(f"{type(error).__name__}: {error}")
        with patch.object(line_appender, "DELTA_BYTES_MAX", 5000):  # a delta has room for one file
            outcomes.append(str(writer.push_rows({"user": (own, rows(own))})))
    all_outcomes: list[list[str] | None] = [None] * world_size
    dist.all_gather_object(all_outcomes, outcomes)
    if rank == 0:
        assert all(one == outcomes for one in all_outcomes), all_outcomes
        print("\n".join(outcomes))


if __name__ == "__main__":
    store, world_size = sys.argv[1], int(sys.argv[2])
    run_ranks(world_size, run, world_size, store)
