"""What is read on which rank under a plan, given the rows that are read of each table.

Of a table that is not divided by its rows this follows from the plan; how a row_wise table's reads
divide over its ranks depends on which rows are asked for, and is measured. Never imports torch.
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
    """Rows that are read.

    Attributes:
        by_table: of each table, by its name.
        by_rank: of each table that is divided by its rows, on each rank: [world_size].
        starts: of those tables, the row that each rank begins with.
    """

    by_table: Mapping[str, float]
    by_rank: Mapping[str, Sequence[float]]
    starts: Mapping[str, Sequence[int]] = field(default_factory=dict)


def is_divided_by_rows(plan: TablePlan) -> bool:
    """Whether which rank is read depends on the row."""
    return plan.sharding_type == "row_wise" and len(plan.shards) > 1


def row_read_bytes(plan: TablePlan, table: TableSpec, device_type: str = "cpu") -> int:
    """Bytes that one lookup in ``table`` reads on all ranks together."""
    if is_divided_by_rows(plan):
        return _one_row(plan.shards[0], table, device_type)
    return sum(_one_row(shard, table, device_type) for shard in plan.served_shards)


def reads_per_rank(
    plan: Plan, tables: Sequence[TableSpec], reads: AccessCounts, device_type: str = "cpu"
) -> tuple[list[float], list[float]]:
    """(lookups, bytes read) of each rank. A row of a column_wise table is a lookup on every rank
    that has columns of it, for each of its shards."""
    lookups = [0.0] * plan.world_size
    nbytes = [0.0] * plan.world_size
    for table in tables:
        of_table = plan.tables[table.name]
        shards = of_table.served_shards
        counts: Sequence[float] = [reads.by_table.get(table.name, 0.0)] * len(shards)
        if is_divided_by_rows(of_table):
            counts = reads.by_rank.get(table.name, [0.0] * len(shards))
        for shard, count in zip(shards, counts, strict=True):
            lookups[shard.rank] += count
            nbytes[shard.rank] += count * _one_row(shard, table, device_type)
    return lookups, nbytes


def under(plan: Plan, tables: Sequence[TableSpec], measured: AccessCounts) -> AccessCounts:
    """The same rows as ``plan`` divides them over its ranks; between the starts of ``measured``
    they are taken as even, and of a table that was not divided over all of its rows."""
    divided = [table for table in tables if is_divided_by_rows(plan.tables[table.name])]
    return AccessCounts(
        measured.by_table,
        {table.name: _divided(plan.tables[table.name], table, measured) for table in divided},
        {table.name: _starts(plan.tables[table.name]) for table in divided},
    )


def is_known(plan: TablePlan, table: TableSpec, measured: AccessCounts) -> bool:
    """Whether ``measured`` tells what each shard has of the reads of ``table``: no range of rows
    begins or ends where none of those began that were counted."""
    if not is_divided_by_rows(plan):
        return True
    if not sum(measured.by_rank.get(table.name, ())):
        return False
    counted = {*measured.starts[table.name], table.num_embeddings}
    return counted.issuperset(_starts(plan))


def _divided(plan: TablePlan, table: TableSpec, measured: AccessCounts) -> list[float]:
    counts = measured.by_rank.get(table.name, ())
    starts: Sequence[int] = measured.starts.get(table.name, (0,))
    if not sum(counts):  # none was seen: over all rows
        counts, starts = (1.0,), (0,)
    shares = np.array([0.0, *accumulate(counts)]) / sum(counts)
    bounds = [*_starts(plan), table.num_embeddings]
    below = np.interp(bounds, [*starts, table.num_embeddings], shares)
    divided: list[float] = (np.diff(below) * measured.by_table[table.name]).tolist()
    return divided


def _starts(plan: TablePlan) -> list[int]:
    return [shard.row_offset for shard in plan.shards]


def whole_read_bytes(tables: Sequence[TableSpec], reads: AccessCounts) -> dict[str, float]:
    """What is read of each table, were it whole."""
    return {table.name: reads.by_table[table.name] * table.row_bytes for table in tables}


def imbalance(per_rank: Sequence[float]) -> float:
    """Of the busiest rank, as a multiple of the mean; 1 where nothing is read.

    >>> imbalance([30.0, 10.0])
    1.5
    """
    total = sum(per_rank)
    return max(per_rank) * len(per_rank) / total if total else 1.0


def _one_row(shard: Shard, table: TableSpec, device_type: str) -> int:
    return shard_bytes(replace(shard, row_count=1), table, device_type)
