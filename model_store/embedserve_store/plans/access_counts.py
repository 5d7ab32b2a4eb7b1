"""Computes the reads of each rank under a plan, from the number of rows read of each table.

For a table that is not divided by its rows, the reads of each rank follow from the plan. For a
row_wise table they depend on which rows are requested, and are measured. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np

from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.plan import Plan, Shard, TablePlan, shard_bytes


@dataclass(frozen=True)
class AccessCounts:
    """Numbers of rows that are read.

    Attributes:
        by_table: rows read of each table, by its name.
        by_rank: rows read on each rank, [world_size], of each table that is divided by its rows.
        starts: first row of each rank, for the tables of by_rank.
    """

    by_table: Mapping[str, float]
    by_rank: Mapping[str, Sequence[float]]
    starts: Mapping[str, Sequence[int]] = field(default_factory=dict)


def is_divided_by_rows(plan: TablePlan) -> bool:
    """Returns whether the rank that serves a lookup depends on the row."""
    return plan.sharding_type == "row_wise" and len(plan.shards) > 1


def row_read_bytes(plan: TablePlan, table: TableSpec, device_type: str = "cpu") -> int:
    """Returns the bytes that a lookup in ``table`` reads, summed over all ranks."""
    if is_divided_by_rows(plan):
        return _one_row(plan.shards[0], table, device_type)
    return sum(_one_row(shard, table, device_type) for shard in plan.served_shards)


def reads_per_rank(
    plan: Plan, tables: Sequence[TableSpec], reads: AccessCounts, device_type: str = "cpu"
) -> tuple[list[float], list[float]]:
    """Returns the lookups of each rank and the bytes read on each rank.

    A row of a column_wise table counts as a lookup for each shard, on the rank of the shard.
    """
    lookups = [0.0] * plan.world_size
    nbytes = [0.0] * plan.world_size
    for table in tables:
        of_table = plan.tables[table.name]
        shards = of_table.served_shards
        counts: Sequence[float] = [reads.by_table[table.name]] * len(shards)
        if is_divided_by_rows(of_table):
            counts = reads.by_rank.get(table.name, [0.0] * len(shards))
        for shard, count in zip(shards, counts, strict=True):
            lookups[shard.rank] += count
            nbytes[shard.rank] += count * _one_row(shard, table, device_type)
    return lookups, nbytes


def under(plan: Plan, tables: Sequence[TableSpec], measured: AccessCounts) -> AccessCounts:
    """Returns the reads of ``measured`` as ``plan`` divides them over its ranks.

    Reads are assumed to be uniform between two starts of ``measured``. For a table that was not
    divided by rows when it was measured, they are assumed to be uniform over all rows.
    """
    divided = [table for table in tables if is_divided_by_rows(plan.tables[table.name])]
    return AccessCounts(
        measured.by_table,
        {table.name: _divided(plan.tables[table.name], table, measured) for table in divided},
        {table.name: _starts(plan.tables[table.name]) for table in divided},
    )


def is_known(plan: TablePlan, table: TableSpec, measured: AccessCounts) -> bool:
    """Returns whether ``measured`` determines the reads of each shard of ``table``.

    This is so if every range of rows of ``plan`` starts where a counted range started.
    """
    if not is_divided_by_rows(plan):
        return True
    if not sum(measured.by_rank.get(table.name, ())):
        return False
    counted = {*measured.starts[table.name], table.num_embeddings}
    return counted.issuperset(_starts(plan))


def _divided(plan: TablePlan, table: TableSpec, measured: AccessCounts) -> list[float]:
    counts = measured.by_rank.get(table.name, ())
    starts: Sequence[int] = measured.starts.get(table.name, (0,))
    if not sum(counts):  # nothing was measured: uniform over all rows
        counts, starts = (1.0,), (0,)
    shares = np.array([0.0, *accumulate(counts)]) / sum(counts)
    bounds = [*_starts(plan), table.num_embeddings]
    below = np.interp(bounds, [*starts, table.num_embeddings], shares)
    divided: list[float] = (np.diff(below) * measured.by_table[table.name]).tolist()
    return divided


def _starts(plan: TablePlan) -> list[int]:
    return [shard.row_offset for shard in plan.shards]


def whole_read_bytes(tables: Sequence[TableSpec], reads: AccessCounts) -> dict[str, float]:
    """Returns the bytes that would be read of each table if it were not divided."""
    return {table.name: reads.by_table[table.name] * table.row_bytes for table in tables}


def imbalance(per_rank: Sequence[float]) -> float:
    """Returns the value of the busiest rank as a multiple of the mean; 1 if nothing is read.

    >>> imbalance([30.0, 10.0])
    1.5
    """
    total = sum(per_rank)
    return max(per_rank) * len(per_rank) / total if total else 1.0


def _one_row(shard: Shard, table: TableSpec, device_type: str) -> int:
    return shard_bytes(replace(shard, row_count=1), table, device_type)
