"""Chooses the tables of a model in parts that routers hold themselves, so that lookups in them need
no call.

Shards hold these tables, too. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from embedserve_store.format.table_groups import table_groups
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.host_plan import HostPlan, group_bytes


def local_tables(
    tables: Sequence[TableSpec], hosts: HostPlan, bytes_max: int
) -> tuple[TableSpec, ...]:
    """Returns the tables that a router holds, in the order of ``tables``.

    These are the smallest of the tables that are whole on one part, up to ``bytes_max`` bytes in
    all. Tables that share features count as one table.
    """
    groups = [
        group for group in table_groups(tables) if all(_is_whole(table, hosts) for table in group)
    ]
    chosen: set[str] = set()
    left_bytes = bytes_max
    for group in sorted(groups, key=group_bytes):
        left_bytes -= group_bytes(group)
        if left_bytes < 0:
            break
        chosen.update(table.name for table in group)
    return tuple(table for table in tables if table.name in chosen)


def _is_whole(table: TableSpec, hosts: HostPlan) -> bool:
    return any(
        len(hosts.rows_on(table.name, part)) == table.num_embeddings for part in range(hosts.parts)
    )


def with_local_part(hosts: HostPlan, local: Collection[str]) -> HostPlan:
    """Returns ``hosts`` with one more part, the last, which has the tables named ``local`` in
    place of the other parts."""
    rows = {
        name: (*(0 for _ in bounds), bounds[-1]) if name in local else (*bounds, bounds[-1])
        for name, bounds in hosts.rows.items()
    }
    return HostPlan(hosts.parts + 1, rows)
