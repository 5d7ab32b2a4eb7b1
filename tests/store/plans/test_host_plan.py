"""Tests of the plan of hosts: parts cover every row once, evenly, and divide the tables of a
feature alike."""

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedserve_store.errors import InvalidModelError, StoreError
from embedserve_store.format.table_groups import table_groups
from embedserve_store.format.table_spec import DTYPES, TableSpec
from embedserve_store.plans.constraints import TableConstraints
from embedserve_store.plans.host_plan import SMALL_SHARE, HostPlan, plan_hosts, with_hosts
from embedserve_store.plans.part_plan import part_plan, part_tables
from embedserve_store.plans.plan import Plan, Shard, TablePlan
from embedserve_store.plans.planner import make_plan


def spec(name: str, rows: int, dim: int = 8, *features: str, dtype: str = "float32") -> TableSpec:
    return TableSpec(name, rows, dim, features or (name,), "sum", dtype)


def plan_of(
    tables: tuple[TableSpec, ...], constraints: Mapping[str, TableConstraints] | None = None
) -> Plan:
    whole = {
        table.name: TablePlan(
            "table_wise", (Shard(0, 0, table.num_embeddings, 0, table.embedding_dim),)
        )
        for table in tables
    }
    return Plan(1, whole, constraints or {})


def only(*kinds: str) -> TableConstraints:
    return TableConstraints(sharding_types=kinds)


TABLES = (spec("a", 100), spec("b", 10, 8, "x", "y"), spec("c", 7, 8, "y"))
HOSTS = HostPlan(2, {"a": (0, 50, 100), "b": (0, 4, 10), "c": (0, 4, 7)})


@st.composite
def models(draw: st.DrawFn) -> tuple[tuple[TableSpec, ...], Plan, int]:
    """Draws tables that may share features, a plan that may have constraints, and a number of
    parts."""
    tables = tuple(
        spec(
            f"t{i}",
            draw(st.integers(1, 3000)),
            draw(st.sampled_from([4, 16, 64])),
            f"f{i}",
            *draw(st.sets(st.sampled_from(["s", "u"]), max_size=1)),
            dtype=draw(st.sampled_from(DTYPES)),
        )
        for i in range(draw(st.integers(1, 8)))
    )
    kinds = [only("table_wise"), only("row_wise", "table_wise"), only("row_wise"), None]
    chosen = {table.name: draw(st.sampled_from(kinds)) for table in tables}
    constraints = {name: one for name, one in chosen.items() if one is not None}
    return tables, plan_of(tables, constraints), draw(st.integers(1, 12))


@given(models())
def test_parts_cover_every_table_once(model: tuple[tuple[TableSpec, ...], Plan, int]) -> None:
    tables, plan, parts = model
    try:
        hosts = plan_hosts(tables, plan, parts)
    except InvalidModelError:  # a part would have no rows
        assert parts > 1
        return
    hosts.check(tables, "here")
    assert HostPlan.from_json(json.loads(json.dumps(hosts.to_json())), "here") == hosts
    assert hosts == plan_hosts(tables, plan, parts)
    assert sum(hosts.bytes_per_part(tables)) == sum(table.nbytes for table in tables)
    assert sum(hosts.rows_per_part()) == sum(table.num_embeddings for table in tables)
    for table in tables:
        if plan.constraints.get(table.name) == only("table_wise"):
            assert len({*hosts.rows[table.name]}) == 2


@given(models())
def test_divisible_tables_are_divided_evenly_to_a_row(
    model: tuple[tuple[TableSpec, ...], Plan, int],
) -> None:
    tables, _, parts = model
    large = tuple(replace(table, num_embeddings=1000 + table.num_embeddings) for table in tables)
    hosts = plan_hosts(large, plan_of(large), parts)
    nbytes = hosts.bytes_per_part(large)
    small = SMALL_SHARE * sum(table.nbytes for table in large) / parts
    a_row_of_each = sum(table.row_bytes for table in large)
    assert max(nbytes) - min(nbytes) <= 2 * a_row_of_each + small


def test_large_tables_are_divided_evenly_and_small_tables_balance_parts() -> None:
    tables = (spec("huge", 1001), spec("tiny", 5), spec("small", 9))
    hosts = plan_hosts(tables, plan_of(tables), 4)
    assert hosts.rows["huge"] == (0, 250, 500, 750, 1001)
    assert hosts.rows["small"] == (0, 9, 9, 9, 9)
    assert hosts.rows["tiny"] == (0, 0, 5, 5, 5)


@pytest.mark.parametrize("rows", [[1000] * 16, list(range(1000, 1160, 10))])
def test_whole_tables_are_spread_over_the_ranks_of_every_part(rows: list[int]) -> None:
    tables = tuple(spec(f"t{i}", count) for i, count in enumerate(rows))
    plan = make_plan(tables, sharding="table_wise", world_size=4, hosts=4)
    assert plan.hosts is not None
    for part in range(4):
        own = part_tables(tables, plan.hosts, part)
        assert min(part_plan(plan, own).bytes_per_rank(own)) >= 32_000
    assert max(plan.hosts.bytes_per_part(tables)) < 1.05 * min(plan.hosts.bytes_per_part(tables))


@pytest.mark.parametrize("kind", ["table_wise", "data_parallel"])
def test_indivisible_table_stays_whole(kind: str) -> None:
    tables = (spec("one", 1000), spec("two", 999), spec("three", 5000))
    plan = plan_of(tables, {"one": only(kind), "two": only(kind, "table_wise")})
    hosts = plan_hosts(tables, plan, 2)
    assert hosts.rows["one"] == (0, 1000, 1000)
    assert hosts.rows["two"] == (0, 0, 999)
    assert hosts.rows["three"] == (0, 2500, 5000)


@pytest.mark.parametrize(
    "constraints",
    [only("row_wise"), only("table_wise", "row_wise"), TableConstraints(pooling_factors=(2.0,))],
)
def test_table_whose_constraints_allow_a_division_is_cut(constraints: TableConstraints) -> None:
    tables = (spec("one", 1000),)
    hosts = plan_hosts(tables, plan_of(tables, {"one": constraints}), 2)
    assert hosts.rows["one"] == (0, 500, 1000)


def test_large_table_with_fewer_rows_than_parts_stays_whole() -> None:
    tables = (spec("few", 3, 4096), spec("four", 4, 4096), spec("huge", 1000))
    hosts = plan_hosts(tables, plan_of(tables), 4)
    assert hosts.rows["few"] == (0, 3, 3, 3, 3)
    assert hosts.rows["four"] == (0, 1, 2, 3, 4)


def test_tables_that_share_a_feature_are_divided_at_the_same_rows() -> None:
    tables = (spec("long", 900, 8, "x"), spec("short", 300, 8, "x", "y"))
    hosts = plan_hosts(tables, plan_of(tables), 4)
    assert hosts.rows == {"long": (0, 150, 300, 600, 900), "short": (0, 150, 300, 300, 300)}
    held = plan_hosts(tables, plan_of(tables, {"short": only("table_wise")}), 1)
    assert held.rows == {"long": (0, 900), "short": (0, 300)}


def test_group_with_an_indivisible_table_stays_whole() -> None:
    tables = (spec("long", 900, 8, "x"), spec("short", 300, 8, "x", "y"), spec("other", 4000))
    hosts = plan_hosts(tables, plan_of(tables, {"short": only("table_wise")}), 4)
    assert hosts.rows["long"] == (0, 900, 900, 900, 900)
    assert hosts.rows["short"] == (0, 300, 300, 300, 300)


@pytest.mark.parametrize("parts", [0, -1])
def test_host_count_below_one_is_rejected(parts: int) -> None:
    with pytest.raises(InvalidModelError, match=f"hosts is {parts}, expected 1 or more"):
        plan_hosts(TABLES, plan_of(TABLES), parts)


def test_part_without_rows_is_rejected() -> None:
    tables = (spec("one", 1000), spec("two", 999))
    plan = plan_of(tables, dict.fromkeys(("one", "two"), only("table_wise")))
    with pytest.raises(InvalidModelError, match="hosts is 3, but part 2 would have no rows"):
        plan_hosts(tables, plan, 3)


def test_one_host_removes_the_host_plan_and_no_count_keeps_the_plan() -> None:
    plan = with_hosts(plan_of(TABLES), TABLES, 2)
    assert plan.hosts is not None
    assert with_hosts(plan, TABLES, None) is plan
    assert with_hosts(plan, TABLES, 1).hosts is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"a": (0, 50, 99)}, r"'a' has boundaries \[0, 50, 99\], expected row numbers from 0 to 1"),
        ({"a": (1, 50, 100)}, "'a' .* expected row numbers from 0 to 100"),
        ({"a": (0, 100)}, "'a' .* expected 3 of them"),
        ({"b": (0, 11, 10), "c": (0, 7, 7)}, "'b' .* expected ascending row numbers"),
        ({"c": (0, 3, 7)}, r"'c' has boundaries .*, expected \[0, 4, 7\], because it shares feat"),
        ({"d": (0, 1, 2)}, "'d' is not in the manifest"),
        ({"a": (0, 0, 100), "b": (0, 0, 10), "c": (0, 0, 7)}, "part 0 of 2 has no rows"),
    ],
)
def test_invalid_host_plan_is_rejected(rows: dict[str, tuple[int, ...]], message: str) -> None:
    HOSTS.check(TABLES, "here")
    with pytest.raises(StoreError, match=f"here: .*{message}"):
        HostPlan(2, {**HOSTS.rows, **rows}).check(TABLES, "here")


def test_missing_table_is_named() -> None:
    with pytest.raises(StoreError, match="table 'c' is not in the host plan"):
        HostPlan(2, {"a": (0, 50, 100), "b": (0, 4, 10)}).check(TABLES, "here")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "expected parts, and rows by table"),
        ({"parts": 2}, "expected parts, and rows by table"),
        ({"parts": "2", "rows": {}}, "parts is '2', expected a number of 1 or more"),
        ({"parts": 0, "rows": {}}, "parts is 0"),
        ({"parts": True, "rows": {}}, "parts is True"),
        ({"parts": 2, "rows": {"a": [0, 1.5, 2]}}, r"rows of table 'a' are \[0, 1.5, 2\]"),
        ({"parts": 2, "rows": {"a": 7}}, "rows of table 'a' are 7"),
    ],
)
def test_malformed_json_is_rejected(data: object, message: str) -> None:
    plan = plan_of(TABLES).to_json() | {"hosts": data}
    with pytest.raises(StoreError, match=f"here: hosts: {message}"):
        Plan.from_json(plan, "here")


def test_host_plan_survives_a_json_round_trip() -> None:
    plan = replace(plan_of(TABLES), hosts=HOSTS)
    plan.check(TABLES, "here")
    assert Plan.from_json(json.loads(json.dumps(plan.to_json())), "here") == plan
    assert plan.with_whole_rows(table_groups(TABLES)).hosts == HOSTS
    assert "hosts" not in plan_of(TABLES).to_json()
    wrong = replace(plan, hosts=HostPlan(2, {**HOSTS.rows, "a": (0, 101, 100)}))
    with pytest.raises(StoreError, match="here: hosts: table 'a'"):
        wrong.check(TABLES, "here")
