"""The ways to divide a table over ranks: which are served, which are not, and why.

Names are torchrec's ShardingType. Never imports torch.
"""

from __future__ import annotations

from embedserve_store.format.table_spec import TableSpec

AUTO = "auto"
"""Lets the planner choose."""
SHARDING_TYPES = ("table_wise", "row_wise", "column_wise", "data_parallel")
"""table_wise: whole, on one rank. row_wise: a range of rows on every rank. column_wise: ranges of
columns, each on any rank. data_parallel: whole, on every rank."""
UNPOOLED_SHARDING_TYPES = ("table_wise", "row_wise", "data_parallel")
"""What an EmbeddingCollection's tables can have."""
SEVERAL_HOSTS_TYPES = ("table_row_wise", "table_column_wise", "grid_shard")


def served_types(table: TableSpec) -> tuple[str, ...]:
    """What ``table`` may be sharded by."""
    return UNPOOLED_SHARDING_TYPES if table.pooling == "none" else SHARDING_TYPES


def auto_types(table: TableSpec, device_type: str) -> tuple[str, ...]:
    """What "auto" chooses among on ``device_type``.

    Not column_wise on CPU, where column shards are the only ones that must be copied out of the
    mapped file. Never data_parallel, nor from a list of constraints that has another type: batches
    enter on rank 0 and are looked up once, so copies on the other ranks answer nothing.
    """
    if device_type == "cpu" or table.pooling == "none":
        return ("table_wise", "row_wise")
    return ("table_wise", "row_wise", "column_wise")


def why_not(sharding_type: object, table: TableSpec) -> str | None:
    """Why ``table`` cannot be sharded so; None where it can."""
    if sharding_type in served_types(table):
        return None
    if sharding_type in SEVERAL_HOSTS_TYPES:
        return f"{sharding_type} shards a table over several hosts, a server has one"
    if sharding_type in SHARDING_TYPES:
        expected = ", ".join(UNPOOLED_SHARDING_TYPES)
        return f"{sharding_type} is for pooled tables, expected one of {expected}"
    return f"sharding is {sharding_type!r}, expected one of {', '.join(SHARDING_TYPES)}"
