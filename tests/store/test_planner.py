"""Plans hold whatever the ranks' real memory holds, and only what can be served."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from embedserve_store.errors import InvalidModelError
from embedserve_store.manifest import TableSpec
from embedserve_store.plan import SHARDING_TYPES
from embedserve_store.planner import make_plan, plan_under

GIB = 1 << 30


def table(name: str, num_embeddings: int, dtype: str = "float32", dim: int = 128) -> TableSpec:
    return TableSpec(name, num_embeddings, dim, (name,), "sum", dtype)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("sharding", SHARDING_TYPES)
@pytest.mark.parametrize(("dtype", "stored_bytes"), [("float32", 143 * GIB), ("int4", 63 * GIB)])
def test_tables_larger_than_torchrecs_idea_of_a_host(
    monkeypatch: pytest.MonkeyPatch,
    device_type: str,
    sharding: str,
    dtype: str,
    stored_bytes: int,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    rows = stored_bytes // table("t", 1, dtype).row_bytes
    tables = (table("t", rows, dtype),)
    plan = make_plan(tables, sharding=sharding, world_size=1, device_type=device_type)
    plan.check(tables, "here")
    assert plan.bytes_per_rank(tables) == [tables[0].nbytes]


def gpus(monkeypatch: pytest.MonkeyPatch, *memory_bytes: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(memory_bytes))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda rank: SimpleNamespace(total_memory=memory_bytes[rank]),
    )


def test_gpu_memory_is_measured_against_stored_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = (table("t", 1000, "int4"),)  # 68 bytes a row, 512 in float32
    gpus(monkeypatch, 34_000, 34_000)
    plan = make_plan(tables, sharding="row_wise", world_size=2, device_type="cuda")
    assert plan.bytes_per_rank(tables) == [34_000, 34_000]
    gpus(monkeypatch, 34_000, 33_999)
    message = r"^rank 1 would hold 34000 bytes of tables, its GPU has 33999: use more GPUs"
    with pytest.raises(InvalidModelError, match=message):
        make_plan(tables, sharding="row_wise", world_size=2, device_type="cuda")


def test_gpus_of_another_host_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = (table("t", 1000),)
    gpus(monkeypatch, 256_000)
    make_plan(tables, sharding="row_wise", world_size=2, device_type="cuda")
    gpus(monkeypatch, 1)
    make_plan(tables, sharding="row_wise", world_size=2, device_type="cpu")


def test_whole_tables_are_spread_over_ranks() -> None:
    tables = tuple(table(f"t{i}", 1000 * (i + 1)) for i in range(4))
    plan = make_plan(tables, sharding="table_wise", world_size=4)
    assert sorted(plan.bytes_per_rank(tables)) == [t.nbytes for t in tables]


def test_tables_larger_than_torchrecs_gpu_are_not_taken_for_slow_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus(monkeypatch)

    def ranks(largest_rows: int) -> list[int]:
        rows = (largest_rows, largest_rows - 1, 1000)
        tables = tuple(table(f"t{i}", n, "int4") for i, n in enumerate(rows))
        plan = make_plan(tables, sharding="table_wise", world_size=2, device_type="cuda")
        return [plan.tables[t.name].shards[0].rank for t in tables]

    assert ranks(63 * GIB // 68) == ranks(2000)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_table_without_constraints_gets_what_can_be_served(
    monkeypatch: pytest.MonkeyPatch, device_type: str
) -> None:
    gpus(monkeypatch)
    tables = (table("t", 10**6, dim=1024),)
    plan = plan_under(tables, {}, world_size=4, device_type=device_type)
    plan.check(tables, "here")
    assert plan.constraints == {}


def test_what_the_planner_says_is_one_line() -> None:
    with pytest.raises(InvalidModelError, match=r"world_size is 1: .*insufficient") as e:
        make_plan((table("t", 1 << 53),), sharding="table_wise", world_size=1)
    assert "\n" not in str(e.value)
