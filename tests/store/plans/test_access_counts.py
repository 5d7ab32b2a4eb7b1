"""Tests of access counts: reads of each rank under a new plan, estimated from reads under the old
plan."""

import pytest

from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.access_counts import (
    AccessCounts,
    imbalance,
    is_known,
    reads_per_rank,
    row_read_bytes,
    under,
)
from embedserve_store.plans.plan import Plan, Shard, TablePlan

TABLE = TableSpec("t", 100, 8, ("f",), "sum", "int8")
"""Table whose rows have 8 codes, and a scale and bias of 4 bytes."""


def by_rows(*counts: int) -> TablePlan:
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    return TablePlan(
        "row_wise",
        tuple(
            Shard(rank, start, count, 0, 8)
            for rank, (start, count) in enumerate(zip(starts, counts, strict=True))
        ),
    )


def counted(*counts: float, starts: tuple[int, ...]) -> AccessCounts:
    return AccessCounts({"t": sum(counts)}, {"t": counts}, {"t": starts})


MEASURED = counted(80.0, 12.0, 8.0, 0.0, starts=(0, 25, 50, 75))


@pytest.mark.parametrize(
    ("plan", "expected", "known"),
    [
        (by_rows(25, 25, 25, 25), [80, 12, 8, 0], True),
        (by_rows(50, 50), [92, 8], True),
        (by_rows(25, 75), [80, 20], True),
        (by_rows(50, 50, 0), [92, 8, 0], True),
        (by_rows(5, 95), [16, 84], False),
        (by_rows(34, 33, 33), [80 + 12 * 9 / 25, 12 * 16 / 25 + 8 * 17 / 25, 8 * 8 / 25], False),
        (TablePlan("table_wise", (Shard(0, 0, 100, 0, 8),)), [100], True),
        (by_rows(100), [100], True),
    ],
)
def test_counts_are_converted_to_other_row_ranges(
    plan: TablePlan, expected: list[float], known: bool
) -> None:
    ranks = len(plan.shards)
    whole = Plan(ranks, {"t": plan}, {})
    lookups, nbytes = reads_per_rank(whole, [TABLE], under(whole, [TABLE], MEASURED))
    assert lookups == pytest.approx(expected)
    assert nbytes == pytest.approx([12 * one for one in expected])
    assert is_known(plan, TABLE, MEASURED) == known


@pytest.mark.parametrize(
    "measured",
    [AccessCounts({"t": 100.0}, {}), counted(0.0, 0.0, starts=(0, 50))],
    ids=["whole", "none"],
)
def test_rows_without_counts_by_rank_are_assumed_even(measured: AccessCounts) -> None:
    plan = Plan(2, {"t": by_rows(60, 40)}, {})
    total = measured.by_table["t"]
    reads = under(plan, [TABLE], measured)
    assert reads.by_rank["t"] == pytest.approx([0.6 * total, 0.4 * total])
    assert not is_known(plan.tables["t"], TABLE, measured)


def test_reads_of_a_single_row_wise_shard_need_no_counts_by_rank() -> None:
    assert is_known(by_rows(100), TABLE, AccessCounts({"t": 100.0}, {}))


def test_rows_that_were_not_counted_by_rank_are_no_reads_of_a_rank() -> None:
    plan = Plan(2, {"t": by_rows(60, 40)}, {})
    assert reads_per_rank(plan, [TABLE], AccessCounts({"t": 100.0}, {})) == ([0, 0], [0, 0])


def test_column_shards_are_read_on_each_rank_rows_and_copies_on_one() -> None:
    tables = [TABLE, TableSpec("copied", 4, 4, ("g",), "sum", "float16")]
    columns = TablePlan("column_wise", (Shard(1, 0, 100, 0, 4), Shard(0, 0, 100, 4, 4)))
    copies = TablePlan("data_parallel", tuple(Shard(rank, 0, 4, 0, 4) for rank in (0, 1)))
    plan = Plan(2, {"t": columns, "copied": copies}, {})
    lookups, nbytes = reads_per_rank(plan, tables, AccessCounts({"t": 10.0, "copied": 5.0}, {}))
    assert lookups == [15, 10]
    assert nbytes == [10 * 8 + 5 * 8, 10 * 8]
    assert row_read_bytes(by_rows(60, 40), TABLE) == 12
    assert row_read_bytes(columns, TABLE) == 16
    assert row_read_bytes(columns, TABLE, "cuda") == 32
    assert row_read_bytes(copies, tables[1]) == 8


def test_imbalance_is_the_busiest_rank_relative_to_the_mean() -> None:
    assert imbalance([3.0, 1.0]) == 1.5
    assert imbalance([0.0, 0.0]) == 1
