"""Plans by measured reads, so that all ranks read about the same number of bytes.

Proposes only sharding whose reads the counts predict. A table stays whole, is divided by columns,
or is divided by rows as when it was counted. Other divisions by rows are proposed only if the
tables do not fit otherwise, because any shard may then have the busiest rows. Imports torchrec.
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
from embedserve_store.plans.planner import make_plan
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
    """Returns the plan over ``world_size`` ranks that minimizes the bytes the busiest rank reads.

    The bytes follow from the ``measured`` reads. If no plan fits the memory, returns the plan that
    exceeds it least.

    Args:
        sharding, constraints: sharding and constraints, as in ``make_plan``. A table whose
            sharding types are given has one of these types, independent of its reads.

    Raises:
        InvalidModelError: a constraint is wrong, or the planner found no plan.
    """
    requested = combined(tables, sharding, own_constraints(tables, constraints or {}))
    own = {table.name: requested.get(table.name, TableConstraints()) for table in tables}

    def planned(types: Mapping[str, tuple[str, ...]]) -> Plan:
        return make_plan(
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
            must_fit=False,
        )

    predicted = _predicted_types(tables, measured, world_size, device_type)
    plan = planned(predicted)
    for more in _more_types(tables, device_type, device_memory_bytes):
        if _fits(plan, tables, device_type, device_memory_bytes):
            break
        plan = planned(predicted | more)
    chosen = {
        name: replace(one, sharding_types=(plan.tables[name].sharding_type,))
        for name, one in own.items()
    }
    return replace(plan, constraints=chosen)


def _predicted_types(
    tables: Sequence[TableSpec], measured: AccessCounts, world_size: int, device_type: str
) -> dict[str, tuple[str, ...]]:
    """Returns, for each table, the sharding types whose reads the measured counts predict.

    A table whose reads do not exceed a rank's fair share stays whole. Dividing it would cost time
    at every lookup without a benefit.
    """
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
    """Yields further sharding types to try if no plan with the predicted types fits.

    The first step allows all types of "auto" for tables that are larger than a rank's memory. The
    second step allows them for every table.
    """
    large = [table for table in tables if memory_bytes is not None and table.nbytes > memory_bytes]
    for divided in (large, tables):
        yield {table.name: auto_types(table, device_type) for table in divided}


def _fits(
    plan: Plan, tables: Sequence[TableSpec], device_type: str, memory_bytes: int | None
) -> bool:
    return memory_bytes is None or max(plan.bytes_per_rank(tables, device_type)) <= memory_bytes
