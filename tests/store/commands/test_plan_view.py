"""Tests of the drawing of a plan: to scale, as wide as the terminal, with or without colours."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from embedserve_store.commands.plan_view import bar, show_plan, where
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.host_plan import with_hosts
from embedserve_store.plans.plan import Plan, Shard, TablePlan


def many_tables(count: int, ranks: int) -> tuple[list[TableSpec], Plan]:
    """Returns tables of 1000, 2000, … rows, each whole on one rank, dealt out to the ranks in
    turn."""
    tables = [
        TableSpec(f"table_{i}", 1000 * (i + 1), 64, (f"f{i}",), "sum", "float32")
        for i in range(count)
    ]
    plans = {
        table.name: TablePlan("table_wise", (Shard(i % ranks, 0, table.num_embeddings, 0, 64),))
        for i, table in enumerate(tables)
    }
    return tables, Plan(ranks, plans, {})


def drawn_plan(
    tables: list[TableSpec], plan: Plan, width: int, memory_bytes: int | None = None
) -> str:
    out = Console(file=io.StringIO(), width=width)
    show_plan(out, tables, plan, memory_bytes=memory_bytes)
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize(("count", "ranks"), [(1, 1), (4, 2), (30, 8), (60, 16)])
def test_every_table_and_rank_fits_the_terminal_width(count: int, ranks: int, width: int) -> None:
    tables, plan = many_tables(count, ranks)
    lines = drawn_plan(tables, plan, width).splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    for i in range(ranks):
        assert sum(line.startswith(f"rank {i} ") for line in lines) == 1
    letters = [line[0] for line in lines[2:] if line[1:2] == " " and line[0] != " "]
    assert len(letters) == count
    assert len(set(letters)) == min(count, 53)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_every_part_fits_the_terminal_width(width: int) -> None:
    tables, plan = many_tables(30, 2)
    lines = drawn_plan(tables, with_hosts(plan, tables, 16), width).splitlines()
    assert max(map(len, lines)) <= width
    for i in range(16):
        assert sum(line.startswith(f"part {i} ") for line in lines) == 1


@pytest.mark.parametrize("width", [1, 20, 59])
def test_plan_in_a_narrow_terminal_overflows(
    width: int, capsys: pytest.CaptureFixture[str]
) -> None:
    tables, plan = many_tables(2, 1)
    show_plan(Console(width=width), tables, plan)
    assert capsys.readouterr().out == drawn_plan(tables, plan, 60)


def test_free_memory_of_a_host_is_that_of_its_ranks() -> None:
    tables, plan = many_tables(2, 2)
    lines = drawn_plan(tables, with_hosts(plan, tables, 2), 80, 375 << 10).splitlines()
    bars = [line.split()[2] for line in lines[-2:]]
    assert all(abs(one.count(".") - len(one) / 2) <= 1 for one in bars)


def test_largest_tables_get_the_letters_if_letters_run_out() -> None:
    tables, plan = many_tables(60, 1)
    lines = drawn_plan(tables, plan, 120).splitlines()[2:62]
    assert [line[0] for line in lines[:9]] == [*"********", "A"]
    assert lines[-1][0] == "z"


def test_letters_in_a_bar_are_proportional_to_bytes() -> None:
    assert bar([("A", 50), ("B", 25), ("C", 0), ("D", 25)], 100, 20, None).plain == (
        "AAAAAAAAAABBBBBDDDDD"
    )
    assert bar([("A", 50)], 100, 20, None).plain == "A" * 10
    assert bar([("A", 1)], 1000, 20, None).plain == "A"
    assert bar([("A", 0)], 1000, 20, None).plain == ""


def test_many_small_tables_fit_into_the_bar() -> None:
    parts = [(letter, 1) for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
    assert len(bar(parts, 26, 10, None).plain) == 10


def test_free_memory_is_drawn_as_dots_and_its_limit_as_a_stroke() -> None:
    assert bar([("A", 50)], 100, 10, 100).plain == "AAAAA....."
    assert bar([("A", 100)], 100, 10, 50).plain == "AAAAA|AAAA"
    assert bar([("A", 100)], 100, 10, 100).plain == "AAAAAAAAAA"
    assert bar([("A", 101)], 101, 10, 100).plain == "AAAAAAAAA|"


def test_ranks_are_drawn_to_the_same_scale() -> None:
    tables, plan = many_tables(2, 2)
    lines = drawn_plan(tables, plan, 80).splitlines()
    small, large = (line.split()[2] for line in lines[-2:])
    assert (set(small), set(large)) == ({"A"}, {"B"})
    assert 2 * len(small) in (len(large) - 1, len(large), len(large) + 1)


def test_replicated_table_counts_on_every_rank() -> None:
    tables, plan = many_tables(1, 2)
    copies = TablePlan("data_parallel", (Shard(0, 0, 1000, 0, 64), Shard(1, 0, 1000, 0, 64)))
    lines = drawn_plan(tables, replace(plan, tables={"table_0": copies}), 100).splitlines()
    assert "500.0 KiB" in lines[2]
    assert [line.split()[-4:] for line in lines[-2:]] == [["250.0", "KiB", "50.0%", "1,000"]] * 2


def test_rows_with_two_column_shards_on_a_rank_count_once() -> None:
    tables, plan = many_tables(1, 1)
    halves = TablePlan("column_wise", (Shard(0, 0, 1000, 0, 32), Shard(0, 0, 1000, 32, 32)))
    lines = drawn_plan(tables, replace(plan, tables={"table_0": halves}), 100).splitlines()
    assert lines[-1].split()[-4:] == ["250.0", "KiB", "100.0%", "1,000"]


@pytest.mark.parametrize(
    ("kind", "shards", "text"),
    [
        ("table_wise", (Shard(3, 0, 9, 0, 8),), "rank 3"),
        ("data_parallel", (Shard(0, 0, 9, 0, 8), Shard(1, 0, 9, 0, 8)), "every rank"),
        ("row_wise", (Shard(0, 0, 5, 0, 8), Shard(1, 5, 4, 0, 8)), "5 + 4 rows"),
        ("row_wise", (Shard(0, 0, 5000, 0, 8), Shard(1, 5000, 5000, 0, 8)), "2 x 5,000 rows"),
        (
            "column_wise",
            (Shard(1, 0, 9, 0, 4), Shard(0, 0, 9, 4, 4), Shard(1, 0, 9, 8, 8)),
            "2 x 4 + 8 columns, ranks 1, 0, 1",
        ),
    ],
)
def test_location_of_a_table_is_described_in_words(
    kind: str, shards: tuple[Shard, ...], text: str
) -> None:
    assert where(TablePlan(kind, shards)) == text
