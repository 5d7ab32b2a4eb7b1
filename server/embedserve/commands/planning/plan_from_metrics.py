"""Plans by the reads of a running server, and compares the balance with that of the current
plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from embedserve.commands.planning.access_stats import AccessStats
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.access_counts import (
    imbalance,
    is_divided_by_rows,
    is_known,
    reads_per_rank,
    under,
    whole_read_bytes,
)
from embedserve_store.plans.constraints import TableConstraints
from embedserve_store.plans.plan import Plan
from embedserve_store.terminal.aligned_columns import grid, plain, show, write
from embedserve_store.terminal.console import console, say
from embedserve_store.terminal.sizes import human_bytes

BETTER = 0.99
"""Ratio of the busiest rank's reads, new to current plan. A new plan above it is not worth a
change."""


def propose(
    tables: Sequence[TableSpec],
    stored: Plan,
    measured: AccessStats,
    world_size: int,
    sharding: str | Mapping[str, str] | None,
    constraints: Mapping[str, TableConstraints] | None,
    device_type: str,
    device_memory_bytes: int | None,
) -> Plan:
    """Returns the plan whose busiest rank reads least, or ``stored``, the current plan, if none is
    better. The measured reads decide what ``sharding`` and ``constraints`` leave open with None.

    Raises:
        InvalidModelError: the sharding or a constraint is wrong, or the planner found no plan.
    """
    is_free = sharding is None and constraints is None
    if constraints is None:  # the stored constraints, without the sharding types to be chosen here
        stored_ones = stored.constraints.items()
        constraints = {name: replace(one, sharding_types=None) for name, one in stored_ones}
    with console.status("importing the planner …"):
        from embedserve_store.plans.balance import balanced_plan
    plan = balanced_plan(
        tables,
        measured.reads,
        world_size=world_size,
        sharding=sharding or "auto",
        constraints=constraints,
        device_type=device_type,
        device_memory_bytes=device_memory_bytes,
    )
    if is_free and measured.is_stored_plan and world_size == measured.world_size:
        busiest, today = (
            max(_expected(one, tables, measured, device_type)[1]) for one in (plan, stored)
        )
        fits = (
            device_memory_bytes is None
            or max(stored.bytes_per_rank(tables, device_type)) <= device_memory_bytes
        )
        if busiest > BETTER * today and fits:
            say("no better plan was found: today's stays")
            return stored
    return plan


def show_balance(manifest: Manifest, measured: AccessStats, device_type: str, plan: Plan) -> None:
    """Prints what each rank holds and reads today and would under ``plan``, and which parts of the
    prediction are uncertain."""
    tables = manifest.tables
    total = sum(measured.reads.by_table.values())
    lookups, read_bytes = _expected(plan, tables, measured, device_type)
    table_bytes = plan.served_bytes_per_rank(tables, device_type)
    kinds = ("bytes", "lookups", "read")
    columns = [f"{kind} {when}" for when in ("today", "predicted") for kind in kinds]
    table = grid("", *columns, numbers=columns)
    today = measured.table_bytes, measured.lookups, measured.read_bytes
    predicted = [float(one) for one in table_bytes], lookups, read_bytes
    cells = zip_longest(_cells(*today), _cells(*predicted), fillvalue=("", "", ""))
    for rank, (before, after) in enumerate(cells):
        table.add_row(*map(plain, (f"rank {rank}", *before, *after)))
    table.add_row("max/mean", *(f"{imbalance(one):.2f}" for one in (*today, *predicted)))
    what = f"{manifest.model} version {manifest.version}"
    write("")
    show(f"of {total:,.0f} rows that were read of {what}, on each rank", table)
    for line in _not_known(plan, tables, measured, device_type):
        say(line)


def _cells(
    table_bytes: Sequence[float], lookups: Sequence[float], read_bytes: Sequence[float]
) -> list[tuple[str, str, str]]:
    """Returns for each rank its bytes, and its shares of lookups and of bytes read."""
    return [
        (human_bytes(bytes_), _percent(count, lookups), _percent(read, read_bytes))
        for bytes_, count, read in zip(table_bytes, lookups, read_bytes, strict=True)
    ]


def _percent(one: float, of: Sequence[float]) -> str:
    return f"{100 * one / max(1.0, sum(of)):.1f}%"


def _expected(
    plan: Plan, tables: Sequence[TableSpec], measured: AccessStats, device_type: str
) -> tuple[list[float], list[float]]:
    """Returns (lookups, bytes read) of each rank under ``plan``."""
    return reads_per_rank(plan, tables, under(plan, tables, measured.reads), device_type)


def _not_known(
    plan: Plan, tables: Sequence[TableSpec], measured: AccessStats, device_type: str
) -> list[str]:
    """Returns notes on the uncertainties of the prediction, and hints for a better plan."""
    lines = []
    read = whole_read_bytes(tables, measured.reads)
    fair = sum(read.values()) / plan.world_size
    for table in tables:
        of_table = plan.tables[table.name]
        share = 100 * read[table.name] / sum(read.values())
        if not is_known(of_table, table, measured.reads):
            lines.append(
                f"{table.name} ({share:.0f}% of the bytes read): not counted by these ranges of "
                "its rows: taken as even, and its busiest rows may lie in one of them"
            )
        elif is_divided_by_rows(of_table):
            lines.append(
                f"{table.name} ({share:.0f}% of the bytes read): divided by rows as it is today: "
                "what each rank reads is an estimate, from some of the batches"
            )
        elif read[table.name] > fair and len(of_table.shards) == 1 and plan.world_size > 1:
            by_columns = f"--sharding {table.name}=column_wise divides what is read of it"
            copied = " and has its shards copied" if device_type == "cpu" else ""
            lines.append(
                f"{table.name} ({share:.0f}% of the bytes read): more than a rank's fair share and "
                f"whole{'' if table.pooling == 'none' else f': {by_columns}{copied}'}"
            )
    return lines
