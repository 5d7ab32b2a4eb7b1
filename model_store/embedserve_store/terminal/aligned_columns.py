"""Tables that commands print on stdout: plain columns that a person reads and a script can cut."""

from __future__ import annotations

from collections.abc import Collection

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from embedserve_store.terminal.sanitize import sanitize

WIDTH_MAX = 10_000

out = Console(highlight=False)


def grid(*columns: str, numbers: Collection[str] = ()) -> Table:
    """Columns without lines between them; those in ``numbers`` are aligned to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=True)
    return table


def plain(cell: str) -> Text:
    """What others wrote, for a cell: no markup, and nothing that moves the cursor."""
    return Text(sanitize(cell))


def show(title: str, table: Table) -> None:
    """The title on a line of its own: as part of the table it would wrap to the table's width.
    A line too long for the terminal runs over, where rich would cut the cells to fit."""
    out.print(title, style="italic", soft_wrap=True, markup=False)
    width = Measurement.get(out, out.options.update(max_width=WIDTH_MAX), table).maximum
    Console(highlight=False, width=width).print(table)


def write(line: str) -> None:
    """A line as it is, never wrapped."""
    out.print(line, soft_wrap=True, markup=False)
