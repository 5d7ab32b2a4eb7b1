"""Tests of plans from access counts: balanced as far as the counts predict, within memory and
constraints."""

import pytest

from embedserve_store.errors import InvalidModelError
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.access_counts import AccessCounts, imbalance, reads_per_rank, under
from embedserve_store.plans.balance import balanced_plan
from embedserve_store.plans.constraints import TableConstraints
from embedserve_store.plans.plan import Plan


def table(name: str, rows: int = 1000, dim: int = 64) -> TableSpec:
    return TableSpec(name, rows, dim, (name,), "sum", "float32")


def kinds(plan: Plan) -> dict[str, str]:
    return {name: one.sharding_type for name, one in plan.tables.items()}


def balance(plan: Plan, tables: list[TableSpec], reads: AccessCounts) -> float:
    return imbalance(reads_per_rank(plan, tables, under(plan, tables, reads))[1])


def test_whole_tables_are_balanced_by_reads_not_by_size() -> None:
    tables = [table("busy", rows=10), table("large", rows=100_000), table("b"), table("c")]
    reads = AccessCounts({"busy": 600.0, "large": 10.0, "b": 310.0, "c": 290.0}, {})
    plan = balanced_plan(tables, reads, world_size=2)
    assert set(kinds(plan).values()) == {"table_wise"}
    assert balance(plan, tables, reads) == pytest.approx(1, abs=0.02)
    assert plan.constraints["busy"] == TableConstraints(("table_wise",))


def test_busy_table_is_row_wise_only_if_its_rows_were_counted_by_rank() -> None:
    tables = [table("hot"), table("cold")]
    by_table = {"hot": 900.0, "cold": 100.0}
    nobody_knows = AccessCounts(by_table, {})
    assert kinds(balanced_plan(tables, nobody_knows, world_size=2))["hot"] == "table_wise"
    even = AccessCounts(by_table, {"hot": [500.0, 400.0]}, {"hot": [0, 500]})
    plan = balanced_plan(tables, even, world_size=2)
    assert kinds(plan)["hot"] == "row_wise"
    assert plan.constraints["hot"] == TableConstraints(("row_wise",))  # on other ranks, too
    assert plan.tables["cold"].shards[0].rank == 1
    assert balance(plan, tables, even) == pytest.approx(1)
    of_other_ranks = balanced_plan(tables, even, world_size=3)
    assert kinds(of_other_ranks)["hot"] == "table_wise"


def test_busy_table_on_gpus_is_column_wise() -> None:
    tables = [table("hot", dim=256), table("cold", dim=256)]
    reads = AccessCounts({"hot": 900.0, "cold": 100.0}, {"hot": [890.0, 10.0]}, {"hot": [0, 500]})
    plan = balanced_plan(
        tables, reads, world_size=2, device_type="cuda", device_memory_bytes=1 << 30
    )
    assert kinds(plan)["hot"] == "column_wise"
    assert balance(plan, tables, reads) == pytest.approx(1.1)


def test_only_a_table_that_fits_no_rank_is_divided() -> None:
    tables = [table("large", rows=10_000), table("b"), table("c")]
    reads = AccessCounts({"large": 10.0, "b": 500.0, "c": 490.0}, {})
    memory_bytes = tables[0].nbytes * 3 // 4
    plan = balanced_plan(tables, reads, world_size=2, device_memory_bytes=memory_bytes)
    assert kinds(plan) == {"large": "row_wise", "b": "table_wise", "c": "table_wise"}
    assert max(plan.bytes_per_rank(tables)) <= memory_bytes


def test_requested_sharding_and_constraints_are_followed() -> None:
    tables = [table("a"), table("b")]
    reads = AccessCounts({"a": 10.0, "b": 500.0}, {})
    named = balanced_plan(tables, reads, world_size=2, sharding={"a": "row_wise"})
    assert kinds(named) == {"a": "row_wise", "b": "table_wise"}
    constraints = {"b": TableConstraints(("column_wise",), min_partition=32)}
    constrained = balanced_plan(tables, reads, world_size=2, constraints=constraints)
    assert kinds(constrained) == {"a": "table_wise", "b": "column_wise"}
    assert constrained.constraints["b"] == constraints["b"]
    with pytest.raises(InvalidModelError, match="sharding names table 'z'"):
        balanced_plan(tables, reads, world_size=2, sharding={"z": "row_wise"})
    with pytest.raises(InvalidModelError, match="world_size is 0"):
        balanced_plan(tables, reads, world_size=0)
