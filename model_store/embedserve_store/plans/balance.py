"""Plans by what was read: so that all ranks read about as many bytes. Imports torchrec.

Only what the counts foretell is proposed: a table stays whole, is divided by columns, or by rows as
it was when they were counted. By rows that nobody counted a table is divided only where it fits
nowhere otherwise: its busiest rows may lie in any part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.access_counts import (
    AccessCounts,
    reads_per_rank,
    under,
    whole_read_bytes,
)
from embedserve_store.plans.constraints import TableConstraints
from embedserve_store.plans.plan import Plan, TablePlan
from embedserve_store.plans.planner import draft_plan
from embedserve_store.plans.planner_request import combined, own_constraints
from embedserve_store.plans.planner_search import ShardCosts
from embedserve_store.plans.sharding_types import AUTO, auto_types


def balanced_plan(
    tables: Sequence[TableSpec],
    measured: AccessCounts,
    *,
    world_size: int,
    sharding: str | Mapping[str, str] = AUTO,
    constraints: Mapping[str, TableConstraints] | None = None,
    device_type: str = "cpu",
    device_memory_bytes: int | None = None,
) -> Plan:
    """The plan over ``world_size`` ranks whose busiest rank reads least of what was ``measured``;
    where nothing fits the memory, the one nearest to it.

    Args:
        sharding, constraints: for all tables or by table; one whose types are named has one of
            them, whatever was read.

    Raises:
        InvalidModelError: a constraint is wrong, or the planner found no plan.
    """

    asked = combined(tables, sharding, own_constraints(tables, constraints or {}))
    own = {table.name: asked.get(table.name, TableConstraints()) for table in tables}

    def planned(types: Mapping[str, tuple[str, ...]]) -> Plan:
        return draft_plan(
            tables,
            sharding=AUTO,
            world_size=world_size,
            device_type=device_type,
            device_memory_bytes=device_memory_bytes,
            constraints={
                name: replace(one, sharding_types=one.sharding_types or types[name])
                for name, one in own.items()
            },
            costs=_read_bytes(measured, device_type),
        )

    foretold = _foretold_types(tables, measured, world_size, device_type)
    plan = planned(foretold)
    for more in _more_types(tables, device_type, device_memory_bytes):
        if _fits(plan, tables, device_type, device_memory_bytes):
            break
        plan = planned(foretold | more)
    chosen = {
        name: replace(one, sharding_types=(plan.tables[name].sharding_type,))
        for name, one in own.items()
    }
    return replace(plan, constraints=chosen)


def _foretold_types(
    tables: Sequence[TableSpec], measured: AccessCounts, world_size: int, device_type: str
) -> dict[str, tuple[str, ...]]:
    """Whole where a rank's fair share is more than what is read of the table: to divide it costs
    time at every lookup, and is of no use."""
    read = whole_read_bytes(tables, measured)
    fair = sum(read.values()) / max(1, world_size)
    types = {}
    for table in tables:
        allowed = ["table_wise"]
        if read[table.name] > fair:
            allowed += [kind for kind in auto_types(table, device_type) if kind == "column_wise"]
            starts = measured.starts.get(table.name, ())
            if sum(measured.by_rank.get(table.name, ())) and len(starts) == world_size:
                allowed.append("row_wise")
        types[table.name] = tuple(allowed)
    return types


def _read_bytes(measured: AccessCounts, device_type: str) -> ShardCosts:
    def costs(table: TableSpec, of_table: TablePlan) -> list[float]:
        plan = Plan(len(of_table.shards), {table.name: of_table}, {})
        return reads_per_rank(plan, [table], under(plan, [table], measured), device_type)[1]

    return costs


def _more_types(
    tables: Sequence[TableSpec], device_type: str, memory_bytes: int | None
) -> Iterator[dict[str, tuple[str, ...]]]:
    """What may be tried where what is foretold does not fit: to divide tables that no rank has room
    for, then any."""
    large = [table for table in tables if memory_bytes is not None and table.nbytes > memory_bytes]
    for divided in (large, tables):
        yield {table.name: auto_types(table, device_type) for table in divided}


def _fits(
    plan: Plan, tables: Sequence[TableSpec], device_type: str, memory_bytes: int | None
) -> bool:
    return memory_bytes is None or max(plan.bytes_per_rank(tables, device_type)) <= memory_bytes
