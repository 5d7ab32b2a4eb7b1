"""Derives the tables and the sharding plan of a part from those of the whole version.

The plan of a part follows the stored plan, so opening a part needs no planner. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from embedserve_store.errors import InvalidModelError
from embedserve_store.format.id_rule import ROW_NUMBERS
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.host_plan import HostPlan
from embedserve_store.plans.plan import Plan, Shard, TablePlan, check_fits


def part_tables(tables: Sequence[TableSpec], hosts: HostPlan, number: int) -> tuple[TableSpec, ...]:
    """Returns the tables that have rows on part ``number``, with these rows only.

    Ids are row numbers of the part, and pooled tables have sums. The caller divides the sums of all
    parts for a mean. Checksums are empty.
    """
    return tuple(
        replace(
            table,
            num_embeddings=len(rows),
            pooling="none" if table.pooling == "none" else "sum",
            sha256="",
            ids=ROW_NUMBERS,
        )
        for table in tables
        if (rows := hosts.rows_on(table.name, number))
    )


def part_plan(plan: Plan, tables: Sequence[TableSpec]) -> Plan:
    """Returns the plan for ``tables``, those of a part, with the ranks and types of ``plan``.

    On one rank every table is table_wise. Rows of row_wise tables are divided evenly, as by
    torchrec's planner; a table with fewer rows than ranks is whole on rank 0.
    """
    shards = {one.name: _table_plan(plan.tables[one.name], one, plan.world_size) for one in tables}
    constraints = {name: one for name, one in plan.constraints.items() if name in shards}
    return Plan(plan.world_size, shards, constraints)


def _table_plan(plan: TablePlan, table: TableSpec, world_size: int) -> TablePlan:
    rows = table.num_embeddings
    is_row_wise = plan.sharding_type == "row_wise"
    if world_size == 1 or (is_row_wise and rows < world_size):
        return TablePlan("table_wise", (Shard(0, 0, rows, 0, table.embedding_dim),))
    if not is_row_wise:
        shards = tuple(replace(shard, row_count=rows) for shard in plan.shards)
        return replace(plan, shards=shards)
    block = -(-rows // world_size)
    starts = [min(rank * block, rows) for rank in range(world_size + 1)]
    return replace(
        plan,
        shards=tuple(
            replace(shard, row_offset=starts[rank], row_count=starts[rank + 1] - starts[rank])
            for rank, shard in enumerate(plan.shards)
        ),
    )


def check_parts_fit(
    plan: Plan, tables: Sequence[TableSpec], memory_bytes: Sequence[int], device_type: str
) -> None:
    """Raises InvalidModelError if a rank's tables are larger than its memory, on the host of any
    part; see ``check_fits``."""
    if plan.hosts is None:
        check_fits(plan, tables, memory_bytes, device_type)
        return
    for number, (of_part, own) in enumerate(_parts(plan, tables)):
        try:
            check_fits(of_part, own, memory_bytes, device_type)
        except InvalidModelError as error:
            where = f"part {number} of {plan.hosts.parts}"
            raise InvalidModelError(f"{where}: {error}, or more hosts") from error


def fullest_rank_bytes(plan: Plan, tables: Sequence[TableSpec], device_type: str) -> int:
    """Returns the bytes of ``tables`` on the rank that has most of them, on the host of any
    part."""
    return max(max(one.bytes_per_rank(own, device_type)) for one, own in _parts(plan, tables))


def largest_part_bytes(plan: Plan, tables: Sequence[TableSpec]) -> tuple[int, int]:
    """Returns the stored bytes of the part of ``tables`` that has most of them, and the bytes of
    column shards of the part that has most of these."""
    parts = list(_parts(plan, tables))
    stored = max(sum(table.nbytes for table in own) for _, own in parts)
    return stored, max(one.column_shard_bytes(own) for one, own in parts)


def _parts(plan: Plan, tables: Sequence[TableSpec]) -> Iterator[tuple[Plan, Sequence[TableSpec]]]:
    """Yields the plan and the tables of each part; the whole ones if there are no parts."""
    if plan.hosts is None:
        yield plan, tables
        return
    for number in range(plan.hosts.parts):
        own = part_tables(tables, plan.hosts, number)
        yield part_plan(plan, own), own
