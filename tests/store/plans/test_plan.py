"""Tests of stored plans: a plan covers every table exactly once, or is rejected."""

import json
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from embedserve_store.errors import InvalidModelError, StoreError
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.constraints import TableConstraints
from embedserve_store.plans.plan import (
    PLAN_BYTES_MAX,
    Plan,
    Shard,
    TablePlan,
    check_fits,
    read_plan,
)

TABLES = (
    TableSpec("rows", 10, 8, ("x",), "sum", "float32"),
    TableSpec("codes", 3, 8, ("y",), "sum", "int4"),
    TableSpec("whole", 10, 8, ("z",), "sum", "float32"),
    TableSpec("columns", 5, 24, ("v", "w"), "sum", "int8"),
    TableSpec("copied", 2, 4, ("u",), "sum", "float16"),
)
PLAN = Plan(
    2,
    {
        "rows": TablePlan("row_wise", (Shard(0, 0, 6, 0, 8), Shard(1, 6, 4, 0, 8))),
        "codes": TablePlan("row_wise", (Shard(0, 0, 2, 0, 8), Shard(1, 2, 1, 0, 8))),
        "whole": TablePlan("table_wise", (Shard(1, 0, 10, 0, 8),)),
        "columns": TablePlan(
            "column_wise", (Shard(1, 0, 5, 0, 4), Shard(0, 0, 5, 4, 12), Shard(1, 0, 5, 16, 8))
        ),
        "copied": TablePlan("data_parallel", (Shard(0, 0, 2, 0, 4), Shard(1, 0, 2, 0, 4))),
    },
    {
        "rows": TableConstraints(("row_wise", "table_wise")),
        "columns": TableConstraints(min_partition=4, pooling_factors=(1.5, 20)),
    },
)


def with_table(name: str, sharding_type: str, *shards: Shard) -> Plan:
    return replace(PLAN, tables={**PLAN.tables, name: TablePlan(sharding_type, shards)})


def with_constraints(name: str, constraints: TableConstraints) -> Plan:
    return replace(PLAN, constraints={name: constraints})


def test_json_round_trip() -> None:
    PLAN.check(TABLES, "here")
    assert Plan.from_json(json.loads(json.dumps(PLAN.to_json())), "here") == PLAN


def test_rank_without_rows_is_valid() -> None:
    shards = (Shard(0, 0, 10, 0, 8), Shard(1, 10, 0, 0, 8))
    with_table("rows", "row_wise", *shards).check(TABLES, "here")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(PLAN, world_size=0), "world_size is 0"),
        (with_constraints("new", TableConstraints()), "constraints: table 'new' is not in"),
        (with_constraints("rows", TableConstraints(("any",))), "rows: sharding is 'any'"),
        (
            with_constraints("rows", TableConstraints(batch_sizes=(1, 2))),
            "rows: batch_sizes has 2 values, the table 1 features",
        ),
        (replace(PLAN, tables={}), "table 'codes' is not in the plan"),
        (with_table("new", "table_wise"), "table 'new' is not in the manifest"),
        (with_table("rows", "grid"), "rows: sharding is 'grid'"),
        (
            with_table("rows", "table_row_wise"),
            "rows: table_row_wise shards a table over several hosts, a server has one",
        ),
        (with_table("rows", "row_wise"), "row_wise over 2 ranks has 2 shards, the plan 0"),
        (with_table("columns", "column_wise"), "has some shards, the plan 0"),
        (with_table("rows", "row_wise", Shard(0, 0, 10, 0, 8)), "has 2 shards, the plan 1"),
        (with_table("whole", "table_wise", Shard(2, 0, 10, 0, 8)), "whole: rank is 2"),
        (with_table("whole", "table_wise", Shard(0, 0, 9, 0, 8)), "cover 9 of 10 rows"),
        (with_table("whole", "table_wise", Shard(0, 0, 10, 0, 4)), "does not follow"),
        (with_table("whole", "table_wise", Shard(0, 0, -1, 0, 8)), "does not follow"),
        (with_table("rows", "table_wise", Shard(0, 0, 10, 4, 4)), "does not follow"),
        (
            with_table("rows", "row_wise", Shard(0, 0, 6, 0, 8), Shard(1, 5, 5, 0, 8)),
            "the shard on rank 1, rows .* does not follow",
        ),
        (
            with_table("rows", "row_wise", Shard(1, 0, 6, 0, 8), Shard(0, 6, 4, 0, 8)),
            r"ranks are \[1, 0\], but row_wise shards lie on 0, 1, … in order",
        ),
        (
            with_table("whole", "table_wise", Shard(0, 0, 5, 0, 8), Shard(1, 5, 5, 0, 8)),
            "table_wise over 2 ranks has 1 shards, the plan 2",
        ),
        (
            with_table("copied", "data_parallel", Shard(0, 0, 2, 0, 4), Shard(0, 0, 2, 0, 4)),
            r"copied: ranks are \[0, 0\], but data_parallel",
        ),
        (
            with_table("copied", "data_parallel", Shard(0, 0, 2, 0, 4), Shard(1, 0, 1, 0, 4)),
            "copied: shards cover 1 of 2 rows",
        ),
        (
            with_table("columns", "column_wise", Shard(0, 0, 5, 0, 12), Shard(1, 0, 5, 12, 8)),
            "columns: shards cover 20 of 24 columns",
        ),
        (
            with_table("columns", "column_wise", Shard(0, 0, 5, 0, 12), Shard(1, 0, 5, 8, 16)),
            "the shard on rank 1, rows .* does not follow",
        ),
        (
            with_table("columns", "column_wise", Shard(0, 0, 4, 0, 12), Shard(1, 0, 4, 12, 12)),
            "the shard on rank 0, rows .* does not follow",
        ),
        (
            with_table("columns", "column_wise", Shard(0, 0, 5, 0, 10), Shard(1, 0, 5, 10, 14)),
            "is not of a multiple of 4 columns",
        ),
    ],
)
def test_plan_that_contradicts_the_tables_is_rejected(plan: Plan, message: str) -> None:
    with pytest.raises(StoreError, match=f"here: .*{message}"):
        plan.check(TABLES, "here")


def test_plan_without_column_constraints_is_read_and_written_unchanged() -> None:
    stored = {
        "format_version": 1,
        "world_size": 1,
        "tables": {
            "t": {
                "sharding_type": "row_wise",
                "shards": [{"rank": 0, "rows": [0, 7], "cols": [0, 8]}],
            }
        },
        "constraints": {"t": {"sharding_types": ["row_wise"]}},
    }
    plan = Plan.from_json(stored, "here")
    plan.check((TableSpec("t", 7, 8, ("f",), "sum", "float32"),), "here")
    assert plan.constraints == {"t": TableConstraints(("row_wise",))}
    assert plan.to_json() == stored


def test_column_wise_unpooled_table_is_rejected() -> None:
    table = TableSpec("t", 5, 8, ("f",), "none", "float32")
    plan = Plan(1, {"t": TablePlan("column_wise", (Shard(0, 0, 5, 0, 8),))}, {})
    with pytest.raises(StoreError, match="here: t: column_wise is for pooled tables"):
        plan.check((table,), "here")
    constrained = Plan(
        1,
        {"t": TablePlan("table_wise", (Shard(0, 0, 5, 0, 8),))},
        {"t": TableConstraints(("column_wise",))},
    )
    with pytest.raises(StoreError, match="here: constraints: t: column_wise is for pooled"):
        constrained.check((table,), "here")


def test_bytes_per_rank_include_copies_and_scale_and_bias_of_each_shard() -> None:
    of_rank_0 = 6 * 32 + 2 * 8 + 5 * (12 + 4) + 2 * 8
    of_rank_1 = 4 * 32 + 1 * 8 + 10 * 32 + 5 * (4 + 4) + 5 * (8 + 4) + 2 * 8
    assert PLAN.bytes_per_rank(TABLES) == [of_rank_0, of_rank_1]


def test_served_bytes_count_copies_on_rank_0_only() -> None:
    held, served = PLAN.bytes_per_rank(TABLES), PLAN.served_bytes_per_rank(TABLES)
    copied = [t for t in TABLES if PLAN.tables[t.name].sharding_type == "data_parallel"]
    assert copied
    assert served == [held[0], held[1] - sum(table.nbytes for table in copied)]


def test_column_shard_bytes_are_summed() -> None:
    assert PLAN.column_shard_bytes(TABLES) == 5 * (8 + 16 + 12)


def types(plan: Plan) -> dict[str, str]:
    return {name: table.sharding_type for name, table in plan.tables.items()}


def test_column_wise_table_becomes_table_wise() -> None:
    plan = PLAN.with_whole_rows([[table] for table in TABLES])
    assert types(plan) == types(PLAN) | {"columns": "table_wise"}
    assert plan.tables["columns"].shards == (Shard(1, 0, 5, 0, 24),)
    assert plan.constraints == {
        **PLAN.constraints,
        "columns": TableConstraints(("table_wise",), pooling_factors=(1.5, 20)),
    }


@pytest.mark.parametrize(
    ("counts", "is_kept"),
    [
        ((4, 4, 2, 0), True),  # as the planner divides the rows
        ((10, 0, 0, 0), True),
        ((3, 3, 3, 1), True),
        ((2, 2, 2, 4), False),
        ((4, 2, 4, 0), False),
        ((0, 0, 0, 10), False),
        ((2, 8, 0, 0), False),
    ],
)
def test_table_with_unequal_row_ranges_becomes_table_wise(
    counts: tuple[int, ...], is_kept: bool
) -> None:
    starts = accumulate(counts, initial=0)
    shards = tuple(Shard(rank, next(starts), count, 0, 8) for rank, count in enumerate(counts))
    stored = TablePlan("row_wise", shards)
    whole = TablePlan("table_wise", (Shard(0, 0, 10, 0, 8),))
    plan = Plan(4, {"rows": stored}, {})
    plan.check(TABLES[:1], "here")
    assert plan.with_whole_rows([TABLES[:1]]).tables["rows"] == (stored if is_kept else whole)


def test_row_wise_table_loses_only_its_column_wise_constraint() -> None:
    constraints = TableConstraints(("row_wise", "column_wise"), min_partition=4)
    plan = with_constraints("rows", constraints).with_whole_rows([[table] for table in TABLES])
    assert plan.tables["rows"] == PLAN.tables["rows"]
    assert plan.constraints["rows"] == TableConstraints(("row_wise",))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("rows", "more"), ("row_wise", "row_wise")),
        (("rows", "codes"), ("table_wise", "table_wise")),
        (("rows", "whole"), ("table_wise", "table_wise")),
        (("copied", "rows"), ("data_parallel", "table_wise")),
        (("whole", "columns", "copied"), ("table_wise", "table_wise", "data_parallel")),
    ],
)
def test_tables_of_a_group_get_compatible_sharding(
    names: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    """Includes another number of ranks: the constraints allow no other type."""
    tables = {table.name: table for table in TABLES}
    tables["more"] = replace(tables["rows"], name="more")
    stored = with_table("more", "row_wise", *PLAN.tables["rows"].shards)
    plan = stored.with_whole_rows([[tables[name] for name in names]])
    assert tuple(plan.tables[name].sharding_type for name in names) == expected
    assert tuple(plan.constraints[name].sharding_types for name in names) == tuple(
        (one,) for one in expected
    )
    plan.check(tuple(tables.values()), "here")
    others = stored.tables.keys() - names
    assert all(plan.tables[name] == stored.tables[name] for name in others)
    assert plan.constraints.keys() == stored.constraints.keys() | set(names)


def test_row_padding_belongs_to_the_last_column_shard() -> None:
    tables = (TableSpec("t", 5, 10, ("f",), "sum", "int8"),)
    halves = TablePlan("column_wise", (Shard(0, 0, 5, 0, 4), Shard(1, 0, 5, 4, 6)))
    plan = Plan(2, {"t": halves}, {})
    plan.check(tables, "here")
    assert plan.bytes_per_rank(tables) == [5 * (4 + 4), 5 * (8 + 4)]
    whole = Plan(1, {"t": TablePlan("table_wise", (Shard(0, 0, 5, 0, 10),))}, {})
    whole.check(tables, "here")
    assert whole.bytes_per_rank(tables) == [tables[0].nbytes] == [5 * (12 + 4)]
    assert whole.column_shard_bytes(tables) == 0
    stored = TablePlan("table_wise", (Shard(0, 0, 5, 0, 12),))
    with pytest.raises(StoreError, match="does not follow the shards before it"):
        Plan(1, {"t": stored}, {}).check(tables, "here")


def test_rows_on_cuda_take_multiples_of_16_bytes() -> None:
    of_rank_0 = 6 * 32 + 2 * 16 + 5 * 16 + 2 * 16
    of_rank_1 = 4 * 32 + 1 * 16 + 10 * 32 + 5 * 16 + 5 * 16 + 2 * 16
    assert PLAN.bytes_per_rank(TABLES, "cuda") == [of_rank_0, of_rank_1]


def test_memory_error_names_rank_and_bytes() -> None:
    held = PLAN.bytes_per_rank(TABLES)
    check_fits(PLAN, TABLES, held, "cpu")
    check_fits(PLAN, TABLES, held[:1], "cpu")
    message = f"^rank 1 would hold {held[1]} bytes of tables, it has {held[1] - 1}: use more ranks"
    with pytest.raises(InvalidModelError, match=message):
        check_fits(PLAN, TABLES, [held[0], held[1] - 1], "cpu")


def test_plan_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLAN.to_json()))
    assert read_plan(path) == PLAN


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), ("[]", "expected a JSON object"), ("{}", "format_version is None")],
)
def test_invalid_plan_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(StoreError, match=f"plan.json: {message}"):
        read_plan(path)
    with pytest.raises(StoreError, match=r"other\.json: cannot be read: No such file"):
        read_plan(tmp_path / "other.json")


def test_oversized_file_is_not_read_as_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(StoreError, match=rf"model\.pt: over {PLAN_BYTES_MAX} bytes, not a plan"):
        read_plan(path)


@pytest.mark.parametrize(
    "change",
    [
        {"tables": []},
        {"tables": {"rows": {}}},
        {"tables": {"rows": {"sharding_type": "row_wise", "shards": [{"rank": 0, "rows": [1]}]}}},
        {"world_size": None},
        {"world_size": float("inf")},
        {"constraints": [1]},
        {"constraints": {"rows": {"sharding_types": "row_wise"}}},
        {"constraints": {"rows": {"colour": "red"}}},
        {"format_version": 2},
    ],
)
def test_malformed_plan_json_is_rejected(change: dict[str, Any]) -> None:
    with pytest.raises(StoreError, match="here: "):
        Plan.from_json(PLAN.to_json() | change, "here")
