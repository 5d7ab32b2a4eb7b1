"""Tests of requests to the planner: every accepted type is understood, and errors name what is
wrong."""

from typing import Any

import pytest
from torchrec.distributed.planner import ParameterConstraints

from embedserve_store.errors import InvalidModelError
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.constraints import TableConstraints
from embedserve_store.plans.planner import make_plan
from embedserve_store.plans.planner_request import default_sharding


def table(name: str, num_embeddings: int, dim: int = 128) -> TableSpec:
    return TableSpec(name, num_embeddings, dim, (name,), "sum", "float32")


def test_sharding_is_set_by_table_and_auto_by_default() -> None:
    tables = tuple(table(name, 1000) for name in "abcd")
    requested = {"a": "row_wise", "b": "column_wise", "c": "data_parallel"}
    plan = make_plan(tables, sharding=requested, world_size=2)
    kinds = {name: one.sharding_type for name, one in plan.tables.items()}
    assert kinds == requested | {"d": "table_wise"}
    assert set(plan.constraints) == {"a", "b", "c"}


@pytest.mark.parametrize(("hosts", "kind"), [(None, "table_wise"), (1, "table_wise"), (2, "auto")])
def test_default_sharding_is_auto_where_types_are_allowed_or_hosts_divide(
    hosts: int | None, kind: str
) -> None:
    tables = tuple(table(name, 1000) for name in "abcd")
    constraints = {
        "a": TableConstraints(("row_wise", "table_wise")),
        "b": TableConstraints(("row_wise", "table_wise")),
        "c": TableConstraints(pooling_factors=(20.0,)),
    }
    default = default_sharding(tables, {"b": "row_wise"}, constraints, hosts)
    assert default == {"a": "auto", "b": "row_wise", "c": kind, "d": kind}


@pytest.mark.parametrize(
    ("sharding", "message"),
    [
        ("rows", "table 't': sharding is 'rows', expected one of table_wise, row_wise"),
        ("table_row_wise", "table 't': table_row_wise shards a table over several hosts"),
        ("grid_shard", "table 't': grid_shard shards a table over several hosts"),
        ({"u": "row_wise"}, r"sharding names table 'u', the model has t$"),
    ],
)
def test_unsupported_sharding_is_rejected(sharding: Any, message: str) -> None:
    with pytest.raises(InvalidModelError, match=message):
        make_plan((table("t", 100),), sharding=sharding, world_size=2)


def test_torchrec_constraints_and_dicts_equal_table_constraints() -> None:
    tables = (table("t", 1000, dim=64),)
    fields = {"sharding_types": ["column_wise"], "min_partition": 16, "pooling_factors": [20.0]}
    ours = TableConstraints(("column_wise",), min_partition=16, pooling_factors=(20.0,))
    plans = [
        make_plan(tables, sharding="auto", world_size=2, constraints={"t": given})
        for given in (ParameterConstraints(**fields), fields, ours)
    ]
    assert plans[0] == plans[1] == plans[2]
    assert plans[0].constraints == {"t": ours}
    shards = plans[0].tables["t"].shards
    assert [(s.col_offset, s.col_count) for s in shards] == [(0, 16), (16, 16), (32, 16), (48, 16)]


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({"u": TableConstraints()}, r"constraints names table 'u', the model has t$"),
        (
            {"t": ParameterConstraints(compute_kernels=["fused_uvm_caching"])},
            r"table 't': compute_kernels is \['fused_uvm_caching'\], expected a list of quant, ",
        ),
        ({"t": {"enforce_hbm": True}}, "table 't': enforce_hbm cannot be honoured"),
        (
            {"t": ParameterConstraints(sharding_types=["table_row_wise", "row_wise"])},
            "table 't': table_row_wise shards a table over several hosts",
        ),
        ({"t": {"pooling_factors": [1.0, 2.0]}}, "pooling_factors has 2 values, the table 1"),
        ({"t": {"sharding_types": ["row_wise"]}}, "sharding is table_wise, but its constraints"),
    ],
)
def test_unsatisfiable_constraints_are_rejected_by_name(constraints: Any, message: str) -> None:
    with pytest.raises(InvalidModelError, match=message):
        make_plan((table("t", 100),), sharding="table_wise", world_size=2, constraints=constraints)
