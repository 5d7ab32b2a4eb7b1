"""Defines the sharding types that are served, and the reasons why other types are not.

Names follow torchrec's ShardingType. Never imports torch.
"""

from __future__ import annotations

from embedserve_store.format.table_spec import TableSpec

AUTO = "auto"
"""Sharding that lets the planner choose the type."""
SHARDING_TYPES = ("table_wise", "row_wise", "column_wise", "data_parallel")
"""Sharding types that are served. table_wise: the whole table on a single rank. row_wise: a range
of rows on every rank. column_wise: ranges of columns, each on any rank. data_parallel: the whole
table on every rank."""
UNPOOLED_SHARDING_TYPES = ("table_wise", "row_wise", "data_parallel")
"""Sharding types that are served for tables of an EmbeddingCollection."""
SEVERAL_HOSTS_TYPES = ("table_row_wise", "table_column_wise", "grid_shard")
"""Sharding types of TorchRec for training on several hosts. None of them is served."""


def auto_types(table: TableSpec, device_type: str) -> tuple[str, ...]:
    """Returns the sharding types that "auto" chooses from on ``device_type``.

    column_wise is excluded on CPU, because only column shards must be copied out of the mapped
    file. It is not served for unpooled tables. data_parallel is never included. It is also dropped
    from constraints that allow another type. Batches enter on rank 0 and are looked up once, so
    copies on other ranks are not used.
    """
    if device_type == "cpu" or table.pooling == "none":
        return ("table_wise", "row_wise")
    return ("table_wise", "row_wise", "column_wise")


def why_not(sharding_type: object, table: TableSpec) -> str | None:
    """Returns the reason why ``table`` cannot have ``sharding_type``; None if it can."""
    served = UNPOOLED_SHARDING_TYPES if table.pooling == "none" else SHARDING_TYPES
    if sharding_type in served:
        return None
    if sharding_type in SEVERAL_HOSTS_TYPES:
        return f"{sharding_type} shards a table over several hosts, a server has one"
    if sharding_type in SHARDING_TYPES:
        expected = ", ".join(UNPOOLED_SHARDING_TYPES)
        return f"{sharding_type} is for pooled tables, expected one of {expected}"
    return f"sharding is {sharding_type!r}, expected one of {', '.join(SHARDING_TYPES)}"
