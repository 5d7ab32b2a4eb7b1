"""Tests of the plan of a part: it follows the plan of the whole, and is valid for the part's
rows."""

import pytest

from embedserve_store.errors import InvalidModelError
from embedserve_store.format.id_rule import IdRule
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.constraints import TableConstraints
from embedserve_store.plans.host_plan import HostPlan
from embedserve_store.plans.part_plan import (
    check_parts_fit,
    fullest_rank_bytes,
    largest_part_bytes,
    part_plan,
    part_tables,
)
from embedserve_store.plans.plan import Plan, Shard, TablePlan

TABLES = (
    TableSpec("rows", 10, 8, ("x",), "mean", "float32", "0", IdRule("modulo", 10)),
    TableSpec("columns", 6, 8, ("y",), "sum", "int8"),
    TableSpec("copied", 5, 8, ("z",), "sum", "int4", "0", IdRule(unknown="skip")),
)
PLAN = Plan(
    2,
    {
        "rows": TablePlan("row_wise", (Shard(0, 0, 5, 0, 8), Shard(1, 5, 5, 0, 8))),
        "columns": TablePlan("column_wise", (Shard(1, 0, 6, 0, 4), Shard(0, 0, 6, 4, 4))),
        "copied": TablePlan("data_parallel", (Shard(0, 0, 5, 0, 8), Shard(1, 0, 5, 0, 8))),
    },
    {"rows": TableConstraints(("row_wise",)), "copied": TableConstraints(("data_parallel",))},
    HostPlan(3, {"rows": (0, 1, 6, 10), "columns": (0, 2, 4, 6), "copied": (0, 0, 5, 5)}),
)


def of(number: int) -> tuple[tuple[TableSpec, ...], Plan]:
    assert PLAN.hosts is not None
    tables = part_tables(TABLES, PLAN.hosts, number)
    plan = part_plan(PLAN, tables)
    plan.check(tables, "here")
    return tables, plan


@pytest.mark.parametrize(("number", "names"), [(0, "rows columns"), (1, "rows columns copied")])
def test_part_contains_only_tables_with_rows_on_it(number: int, names: str) -> None:
    tables, plan = of(number)
    assert [table.name for table in tables] == names.split() == list(plan.tables)
    assert set(plan.constraints) <= set(plan.tables)
    assert plan.hosts is None
    assert {table.pooling for table in tables} == {"sum"}
    assert {table.ids for table in tables} == {IdRule()}


def test_shards_of_a_part_keep_the_ranks_of_the_plan() -> None:
    _, plan = of(1)
    assert plan.tables["rows"].shards == (Shard(0, 0, 3, 0, 8), Shard(1, 3, 2, 0, 8))
    assert plan.tables["columns"].shards == (Shard(1, 0, 2, 0, 4), Shard(0, 0, 2, 4, 4))
    assert plan.tables["copied"].shards == PLAN.tables["copied"].shards


def test_table_with_fewer_rows_than_ranks_is_table_wise() -> None:
    _, plan = of(0)
    assert plan.tables["rows"] == TablePlan("table_wise", (Shard(0, 0, 1, 0, 8),))


def test_every_table_is_table_wise_on_one_rank() -> None:
    hosts = HostPlan(2, {"rows": (0, 4, 10), "columns": (0, 3, 6), "copied": (0, 0, 5)})
    tables = part_tables(TABLES, hosts, 1)
    whole = {
        table.name: TablePlan("row_wise", (Shard(0, 0, table.num_embeddings, 0, 8),))
        for table in TABLES
    }
    plan = part_plan(Plan(1, whole, {}, hosts), tables)
    plan.check(tables, "here")
    assert {table.sharding_type for table in plan.tables.values()} == {"table_wise"}


def test_part_that_does_not_fit_its_host_is_rejected() -> None:
    fullest = fullest_rank_bytes(PLAN, TABLES, "cpu")
    assert fullest < max(PLAN.bytes_per_rank(TABLES))
    check_parts_fit(PLAN, TABLES, [fullest] * 2, "cpu")
    with pytest.raises(InvalidModelError, match=r"part 1 of 3: rank 0 would hold .*more hosts"):
        check_parts_fit(PLAN, TABLES, [fullest - 1] * 2, "cpu")


def test_largest_part_bounds_mapped_and_copied_bytes() -> None:
    assert PLAN.hosts is not None
    stored, copied = largest_part_bytes(PLAN, TABLES)
    assert stored == max(PLAN.hosts.bytes_per_part(TABLES))
    assert copied == PLAN.column_shard_bytes(TABLES) // 3  # each part has two of the six rows
