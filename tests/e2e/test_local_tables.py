"""Tests of small tables that a router looks up itself, during rollouts and without shards."""

import time
from pathlib import Path

import torch
from e2e.parts_cluster import DIM, PARTS, ROWS, STEP, WAIT_S_MAX, cluster, post_embed, shard_metrics
from running_servers import Running

from embedserve_store import TableSpec, publish


def publish_with_small(store: Path, number: int) -> None:
    """Publishes version ``number`` of a divided table and a table of one row.

    The value of that row is ``number`` * STEP.
    """
    tables = [
        TableSpec("user", ROWS, DIM, ("user",), "sum", "float32"),
        TableSpec("day", 1, DIM, ("day",), "mean", "float32"),
    ]
    weights = {
        f"embedding_bags.{table.name}.weight": torch.full((table.num_embeddings, DIM), value)
        for table, value in zip(tables, (1.0, float(number * STEP)), strict=True)
    }
    publish(weights, store, model="m", tables=tables, hosts=PARTS)


def has_mapped(router: Running, number: int) -> bool:
    """Returns whether the router has the rows of version ``number`` mapped."""
    maps = Path(f"/proc/{router.process.pid}/maps").read_text()
    return f"/m/{number}/tables.safetensors" in maps


def test_small_tables_are_looked_up_without_shards(tmp_path: Path) -> None:
    store = tmp_path / "store"
    publish_with_small(store, 1)
    follow = ("--follow", "latest", "--follow-s", "0.2")
    with cluster(store, tmp_path) as one:
        one.start_shards(*follow)
        router = one.start_router(*follow, "--local-bytes", "1048576")
        model = router.model()
        assert model["local_tables"] == ["day"]
        assert post_embed(router, day=[[0, 0]]).json()["values"] == [[0.0] * DIM + [STEP] * DIM]
        metrics = shard_metrics(router)
        assert [metrics.get(f"calls {part} ok", 0) for part in range(PARTS)] == [0, 0]
        assert post_embed(router, user=[[3, 97]]).json()["values"] == [[2.0] * DIM + [0.0] * DIM]
        assert has_mapped(router, 1)
        publish_with_small(store, 2)
        end_s = time.monotonic() + WAIT_S_MAX
        while (answer := post_embed(router, day=[[0]]).json())["version"] == 1 or has_mapped(
            router, 1
        ):
            assert time.monotonic() < end_s, answer
            time.sleep(0.1)
        assert answer["values"] == [[0.0] * DIM + [2 * STEP] * DIM]
        for shard in one.shards.values():
            shard.process.kill()
            shard.process.wait()
        assert post_embed(router, day=[[0]]).json() == answer
        assert post_embed(router, user=[[3]]).status_code == 503
