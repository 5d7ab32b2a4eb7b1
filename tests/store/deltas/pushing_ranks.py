"""Pushes rows from two ranks over gloo; prints what each call returned or raised.

    python pushing_ranks.py STORE rows|ids

With "rows" the last push exceeds the limit of a delta. With "ids" the table has a vocabulary.
"""

import sys
from unittest.mock import patch

import pytest
import torch.distributed as dist
from forked_ranks import run_ranks
from store.deltas.conftest import rows
from torch.distributed import distributed_c10d

from embedserve_store import DeltaWriter, StoreError
from embedserve_store.deltas import line_appender
from embedserve_store.format.delta_manifest import DELTA_BYTES_MAX

WORLD_SIZE = 2
PUSHES: dict[str, tuple[tuple[tuple[list[int], list[int]], ...], ...]] = {
    "rows": (
        (([0, 10], []), ([1, 11], [])),
        (([], []), ([7], [])),
        (([300], []), ([291], [])),
        (([50], []), ([50], [])),
        (([], []), ([], [])),
        (([0, 10], []), ([1, 11], [])),
    ),
    "ids": (
        (([2000], []), ([1001, 1000], [])),
        (([3000], []), ([3000], [])),
        (([1000], []), ([], [1000])),
        (([3000], [1001]), ([], [2000])),
    ),
}
"""Pushed and removed ids of each rank, for each push."""


def push(writer: DeltaWriter, kind: str, ids: list[int], removed: list[int]) -> str:
    changes = {"user": (ids, rows("user", len(ids)))} if ids else {}
    try:
        return str(writer.push_rows(changes, removed={"user": removed} if kind == "ids" else None))
    except StoreError as error:
        return f"{type(error).__name__}: {error}"


def run(rank: int, store: str, kind: str) -> None:
    *pushes, last = (push[rank] for push in PUSHES[kind])
    with pytest.raises(StoreError, match="there is no model 'other'"):
        DeltaWriter(store, model="other")
    assert len(distributed_c10d._world.pg_map) == 1  # the group of that writer has ended
    with DeltaWriter(store, model="m") as writer:
        outcomes = [push(writer, kind, *own) for own in pushes]
        limit = 5000 if kind == "rows" else DELTA_BYTES_MAX  # room for one file
        with patch.object(line_appender, "DELTA_BYTES_MAX", limit):
            outcomes.append(push(writer, kind, *last))
    with pytest.raises(ValueError, match="is closed"):
        push(writer, kind, *last)
    with pytest.raises(ValueError, match="is closed"):
        writer.resume()
    all_outcomes: list[list[str] | None] = [None] * WORLD_SIZE
    dist.all_gather_object(all_outcomes, outcomes)
    if rank == 0:
        assert all(one == outcomes for one in all_outcomes), all_outcomes
        print("\n".join(outcomes))


if __name__ == "__main__":
    run_ranks(WORLD_SIZE, run, *sys.argv[1:])
