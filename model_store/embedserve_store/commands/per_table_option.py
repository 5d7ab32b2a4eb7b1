"""Parses an option with one value for all tables or one for each: "int8" or
"user=int8,movie=float32"."""

from __future__ import annotations

from pathlib import Path

from embedserve_store.plans.plan import Plan, read_plan


def parse_per_table_option(text: str) -> str | dict[str, str]:
    """Returns the single value in ``text``, or the value of each table in it.

    Raises:
        ValueError: a table is named twice or without a value after its "=".

    >>> parse_per_table_option("int8"), parse_per_table_option("user=int8, movie=float32")
    ('int8', {'user': 'int8', 'movie': 'float32'})
    """
    if "=" not in text:
        return text
    choice: dict[str, str] = {}
    for part in text.split(","):
        table, equals, name = (piece.strip() for piece in part.partition("="))
        if not (table and equals and name):
            raise ValueError(f"{part.strip()!r} in {text!r}: expected TABLE=NAME")
        if table in choice:
            raise ValueError(f"{text!r} names table {table!r} twice")
        choice[table] = name
    return choice


def parse_sharding(text: str) -> str | dict[str, str] | Plan:
    """Parses --sharding: ``row_wise``, ``user=row_wise,movie=table_wise``, or a path of plan.json.

    Raises:
        StoreError: the file is not a readable plan.
        ValueError: a table is named twice or without a type.
    """
    return read_plan(Path(text)) if text.endswith(".json") else parse_per_table_option(text)
