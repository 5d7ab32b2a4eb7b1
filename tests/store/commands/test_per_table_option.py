"""Tests of --sharding: a type, a type for each table, or a plan in a file."""

import json
from pathlib import Path

import pytest

from embedserve_store.commands.per_table_option import parse_sharding
from embedserve_store.errors import StoreError
from embedserve_store.plans.plan import Plan, Shard, TablePlan


def test_sharding_is_a_type_or_a_type_per_table() -> None:
    assert parse_sharding("auto") == "auto"
    assert parse_sharding("user=row_wise, movie=table_wise") == {
        "user": "row_wise",
        "movie": "table_wise",
    }
    with pytest.raises(ValueError, match="names table 'a' twice"):
        parse_sharding("a=row_wise,a=table_wise")


def test_sharding_may_be_a_plan_file(tmp_path: Path) -> None:
    plan = Plan(1, {"t": TablePlan("table_wise", (Shard(0, 0, 7, 0, 8),))}, {})
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(plan.to_json()))
    assert parse_sharding(str(path)) == plan
    with pytest.raises(StoreError, match=r"other\.json: cannot be read"):
        parse_sharding(str(tmp_path / "other.json"))
