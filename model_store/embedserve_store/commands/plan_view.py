"""Shows a sharding plan: a table of where each table is located, and a bar for each rank.

A plan over several hosts also has a bar for each part. Each table has a letter, which stands for
its bytes in the bars; colors are redundant. Output goes to stdout, in the width of the terminal.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from embedserve_store.format.table_spec import TableSpec
from embedserve_store.plans.host_plan import HostPlan
from embedserve_store.plans.plan import Plan, TablePlan, shard_bytes
from embedserve_store.terminal.plain_console import plain_console
from embedserve_store.terminal.sizes import human_bytes

LETTERS = string.ascii_uppercase + string.ascii_lowercase
NO_LETTER = "*"
"""Symbol shared by all tables beyond the largest ones, which have letters."""
COLORS = ("blue", "green", "yellow", "magenta", "cyan", "red")
BAR_CELLS_MIN = 10
WIDTH_MIN = 60
"""Columns of the narrowest drawing. In a narrower terminal lines overflow; rich would otherwise
leave out columns, the names of tables first."""
NARROW_COLUMNS = 100
"""Terminal width in columns below which the gap between columns is smaller; below
VERY_NARROW_COLUMNS the dim and dtype columns are also left out."""
VERY_NARROW_COLUMNS = 72


def show_plan(
    out: Console,
    tables: Sequence[TableSpec],
    plan: Plan,
    *,
    device_type: str = "cpu",
    memory_bytes: int | None = None,
) -> None:
    """Prints where ``plan`` places ``tables``, with the bytes that they take on ``device_type``.

    Args:
        memory_bytes: memory of each rank; if given, bars are drawn in proportion to it. Over
            several hosts, the bars of the parts are.
    """
    if out.width < WIDTH_MIN:
        out = plain_console(width=WIDTH_MIN)
    letters = _letters(tables)
    title = f"plan over {count_ranks(plan.world_size)}"
    out.print(title, style="italic", soft_wrap=True)
    out.print(_tables_grid(out.width, tables, plan, letters, device_type))
    out.print()
    of_rank = memory_bytes if plan.hosts is None else None
    nbytes = [plan.bytes_per_rank([table], device_type) for table in tables]
    rows = [_rows_on(plan, rank) for rank in range(plan.world_size)]
    out.print(_bars_grid(out.width, "rank", [*letters.values()], nbytes, rows, of_rank))
    if plan.hosts is not None:
        title = f"rows over {plan.hosts.parts} hosts, each with {count_ranks(plan.world_size)}"
        out.print()
        out.print(title, style="italic", soft_wrap=True)
        out.print(_cuts_grid(out.width, tables, plan.hosts, letters))
        out.print()
        of_host = None if memory_bytes is None else plan.world_size * memory_bytes
        nbytes = [plan.hosts.bytes_per_part([table]) for table in tables]
        rows = plan.hosts.rows_per_part()
        out.print(_bars_grid(out.width, "part", [*letters.values()], nbytes, rows, of_host))


def count_ranks(world_size: int) -> str:
    return "1 rank" if world_size == 1 else f"{world_size} ranks"


def _letters(tables: Sequence[TableSpec]) -> dict[str, str]:
    """Assigns letters to the largest tables, in the order of all tables; the rest get NO_LETTER."""
    largest = sorted(tables, key=lambda table: -table.nbytes)[: len(LETTERS)]
    names = {table.name for table in largest}
    lettered = [table.name for table in tables if table.name in names]
    return dict.fromkeys((t.name for t in tables), NO_LETTER) | dict(
        zip(lettered, LETTERS, strict=False)
    )


def _style(letter: str) -> str:
    if letter not in LETTERS:
        return "black on white"
    return f"black on {COLORS[LETTERS.index(letter) % len(COLORS)]}"


def _grid(gap: int = 2) -> Table:
    return Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))


def _tables_grid(
    width: int,
    tables: Sequence[TableSpec],
    plan: Plan,
    letters: Mapping[str, str],
    device_type: str,
) -> Table:
    grid = _grid(1 if width < NARROW_COLUMNS else 2)
    grid.add_column("")
    grid.add_column("table", overflow="fold", min_width=8)
    grid.add_column("rows", justify="right", no_wrap=True)
    if width >= VERY_NARROW_COLUMNS:
        grid.add_column("dim", justify="right", no_wrap=True)
        grid.add_column("dtype", no_wrap=True)
    grid.add_column("bytes", justify="right", no_wrap=True)
    grid.add_column("sharding", no_wrap=True)
    grid.add_column("where", overflow="fold", min_width=10)
    for table in tables:
        of_table = plan.tables[table.name]
        nbytes = sum(shard_bytes(shard, table, device_type) for shard in of_table.shards)
        letter = letters[table.name]
        kind = (str(table.embedding_dim), table.dtype) if width >= VERY_NARROW_COLUMNS else ()
        grid.add_row(
            Text(letter, style=_style(letter)),
            Text(table.name),
            f"{table.num_embeddings:,}",
            *kind,
            human_bytes(nbytes),
            of_table.sharding_type,
            where(of_table),
        )
    return grid


def where(table: TablePlan) -> str:
    """Returns a short description of a table's placement on the ranks.

    >>> from embedserve_store.plans.plan import Shard
    >>> where(TablePlan("row_wise", (Shard(0, 0, 4, 0, 8), Shard(1, 4, 4, 0, 8))))
    '2 x 4 rows'
    """
    shards = table.shards
    if table.sharding_type == "row_wise":
        return f"{_counted([shard.row_count for shard in shards])} rows"
    if table.sharding_type == "data_parallel":
        return "every rank"
    ranks = _ranks([shard.rank for shard in shards])
    if table.sharding_type == "column_wise":
        return f"{_counted([shard.col_count for shard in shards])} columns, {ranks}"
    return ranks


def _counted(counts: Sequence[int]) -> str:
    runs = [(count, len(list(run))) for count, run in groupby(counts)]
    return " + ".join(f"{run} x {count:,}" if run > 1 else f"{count:,}" for count, run in runs)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


def _cuts_grid(
    width: int, tables: Sequence[TableSpec], hosts: HostPlan, letters: Mapping[str, str]
) -> Table:
    """Returns a row for each table: whole on a part, or the number of its rows on each part."""
    grid = _grid(1 if width < NARROW_COLUMNS else 2)
    grid.add_column("")
    grid.add_column("table", overflow="fold", min_width=8)
    grid.add_column("parts", overflow="fold", min_width=10)
    for table in tables:
        letter = letters[table.name]
        on_parts = where_on_parts(hosts, table.name)
        grid.add_row(Text(letter, style=_style(letter)), Text(table.name), on_parts)
    return grid


def where_on_parts(hosts: HostPlan, name: str) -> str:
    """Returns a short description of the parts that have rows of a table.

    >>> where_on_parts(HostPlan(2, {"user": (0, 4, 8), "tag": (0, 0, 3)}), "tag")
    'part 1'
    """
    counts = [len(hosts.rows_on(name, part)) for part in range(hosts.parts)]
    with_rows = [part for part, count in enumerate(counts) if count]
    return f"part {with_rows[0]}" if len(with_rows) == 1 else f"{_counted(counts)} rows"


def _bars_grid(
    width: int,
    name: str,
    letters: Sequence[str],
    nbytes: Sequence[Sequence[int]],
    row_counts: Sequence[int],
    memory_bytes: int | None,
) -> Table:
    """Returns a grid of bars in one scale, with the bytes, share and number of rows of each.

    Args:
        name: what a bar stands for: rank or part.
        letters, nbytes: letter of each table, and its bytes in each bar.
    """
    bars = [[*zip(letters, one, strict=True)] for one in zip(*nbytes, strict=True)]
    sums = [sum(count for _, count in one) for one in bars]
    scale, total = max(*sums, memory_bytes or 0, 1), max(1, sum(sums))
    rows = [
        (f"{name} {i}", human_bytes(count), f"{100 * count / total:.1f}%", f"{row_counts[i]:,}")
        for i, count in enumerate(sums)
    ]
    headings = ("", "bytes", "share", "rows")
    taken = sum(2 + max(map(len, column)) for column in zip(headings, *rows, strict=True))
    bar_cells = max(BAR_CELLS_MIN, width - taken - 2)
    grid = _grid()
    grid.add_column("", no_wrap=True)
    grid.add_column("", no_wrap=True)
    for heading in headings[1:]:
        grid.add_column(heading, justify="right", no_wrap=True)
    for (title, *numbers), parts in zip(rows, bars, strict=True):
        grid.add_row(title, bar(parts, scale, bar_cells, memory_bytes), *numbers)
    return grid


def _rows_on(plan: Plan, rank: int) -> int:
    """Returns the number of rows on a rank; a row counts even if the rank holds only some
    columns."""
    row_counts = {
        (name, shard.row_offset): shard.row_count
        for name, table in plan.tables.items()
        for shard in table.shards
        if shard.rank == rank
    }
    return sum(row_counts.values())


def bar(parts: Sequence[tuple[str, int]], scale: int, cells: int, memory_bytes: int | None) -> Text:
    """Returns a bar of letters in proportion to their bytes, where ``scale`` bytes fill ``cells``
    cells.

    Unused bytes of ``memory_bytes`` are dots. If more bytes are held than that, "|" marks the
    limit.
    """
    text = Text()
    end_bytes = 0
    for letter, count in parts:
        end_bytes += count
        width = round(end_bytes / scale * cells) - len(text)
        text.append(letter * width, style=_style(letter))
    if not len(text) and end_bytes:
        text.append(max(parts, key=lambda part: part[1])[0])
    if memory_bytes is not None and end_bytes <= memory_bytes:
        text.append("." * (round(memory_bytes / scale * cells) - len(text)), style="dim")
    elif memory_bytes is not None:
        limit = min(round(memory_bytes / scale * cells), len(text) - 1)
        text = text[:limit] + Text("|", style="bold red") + text[limit + 1 :]
    return text
