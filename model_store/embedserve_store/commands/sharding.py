"""Parses --sharding: one type for all tables, a type for each table, or a plan file."""

from __future__ import annotations

from pathlib import Path

from embedserve_store.commands.per_table_option import parse_per_table_option
from embedserve_store.plans.plan import Plan, read_plan


def parse_sharding(text: str) -> str | dict[str, str] | Plan:
    """Parses ``row_wise``, ``user=row_wise,movie=table_wise`` or the path of a plan.json.

    Raises:
        StoreError: the file is not a readable plan.
        ValueError: a table is named twice or without a type.
    """
    return read_plan(Path(text)) if text.endswith(".json") else parse_per_table_option(text)
