"""A stored plan covers every table exactly once, or is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from embedserve_store.errors import StoreError
from embedserve_store.manifest import TableSpec
from embedserve_store.plan import Plan, Shard, TablePlan

TABLES = (
    TableSpec("rows", 10, 8, ("x",), "sum", "float32"),
    TableSpec("codes", 3, 8, ("y",), "sum", "int4"),
    TableSpec("whole", 10, 8, ("z",), "sum", "float32"),
)
PLAN = Plan(
    2,
    {
        "rows": TablePlan("row_wise", (Shard(0, 0, 6, 0, 8), Shard(1, 6, 4, 0, 8))),
        "codes": TablePlan("row_wise", (Shard(0, 0, 2, 0, 8), Shard(1, 2, 1, 0, 8))),
        "whole": TablePlan("table_wise", (Shard(1, 0, 10, 0, 8),)),
    },
    {"rows": ("row_wise", "table_wise")},
)


def with_table(name: str, sharding_type: str, *shards: Shard) -> Plan:
    return replace(PLAN, tables={**PLAN.tables, name: TablePlan(sharding_type, shards)})


def test_json_and_back() -> None:
    PLAN.check(TABLES, "here")
    assert Plan.from_json(json.loads(json.dumps(PLAN.to_json())), "here") == PLAN


def test_a_rank_without_rows_is_fine() -> None:
    shards = (Shard(0, 0, 10, 0, 8), Shard(1, 10, 0, 0, 8))
    with_table("rows", "row_wise", *shards).check(TABLES, "here")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(PLAN, world_size=0), "world_size is 0"),
        (replace(PLAN, constraints={"new": ("row_wise",)}), "constraints: table 'new' is not in"),
        (replace(PLAN, constraints={"rows": ("any",)}), r"rows: sharding_types is \['any'\]"),
        (replace(PLAN, tables={}), "table 'codes' is not in the plan"),
        (with_table("new", "table_wise"), "table 'new' is not in the manifest"),
        (with_table("rows", "grid"), "rows: sharding_type is 'grid'"),
        (with_table("rows", "row_wise"), "rows: no shards"),
        (with_table("rows", "row_wise", Shard(0, 0, 10, 0, 8)), "1 shards, but row_wise has one"),
        (with_table("whole", "table_wise", Shard(2, 0, 10, 0, 8)), "whole: rank is 2"),
        (with_table("whole", "table_wise", Shard(0, 0, 9, 0, 8)), "cover 9 of 10 rows"),
        (with_table("whole", "table_wise", Shard(0, 0, 10, 0, 4)), "does not follow"),
        (with_table("whole", "table_wise", Shard(0, 0, -1, 0, 8)), "does not follow"),
        (with_table("rows", "table_wise", Shard(0, 0, 10, 4, 4)), "does not follow"),
        (
            with_table("rows", "row_wise", Shard(0, 0, 6, 0, 8), Shard(1, 5, 5, 0, 8)),
            "the shard on rank 1 has rows .* does not follow",
        ),
        (
            with_table("whole", "table_wise", Shard(0, 0, 5, 0, 8), Shard(1, 5, 5, 0, 8)),
            "2 shards, but table_wise has one",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan: Plan, message: str) -> None:
    with pytest.raises(StoreError, match=f"here: .*{message}"):
        plan.check(TABLES, "here")


def test_column_wise_is_read_but_not_served() -> None:
    by_columns = with_table("rows", "column_wise", Shard(1, 0, 10, 0, 4), Shard(0, 0, 10, 4, 4))
    read = Plan.from_json(json.loads(json.dumps(by_columns.to_json())), "here")
    assert read == by_columns
    serves = "this embedserve serves table_wise and row_wise"
    with pytest.raises(StoreError, match=f"rows: sharding_type is 'column_wise', {serves}"):
        read.check(TABLES, "here")
    constrained = replace(PLAN, constraints={"rows": ("row_wise", "column_wise")})
    with pytest.raises(StoreError, match=f"rows: sharding_types is .*'column_wise'.*, {serves}"):
        constrained.check(TABLES, "here")


def test_bytes_of_a_rank_are_those_of_its_rows() -> None:
    stored = PLAN.bytes_per_rank(TABLES)
    assert stored == [6 * 32 + 2 * 8, 4 * 32 + 1 * 8 + 10 * 32]
    assert sum(stored) == sum(table.nbytes for table in TABLES)


@pytest.mark.parametrize(
    "change",
    [
        {"tables": []},
        {"tables": {"rows": {}}},
        {"tables": {"rows": {"sharding_type": "row_wise", "shards": [{"rank": 0, "rows": [1]}]}}},
        {"world_size": None},
        {"world_size": float("inf")},
        {"constraints": [1]},
        {"format_version": 2},
    ],
)
def test_json_that_is_no_plan(change: dict[str, Any]) -> None:
    with pytest.raises(StoreError, match="here: "):
        Plan.from_json(PLAN.to_json() | change, "here")
