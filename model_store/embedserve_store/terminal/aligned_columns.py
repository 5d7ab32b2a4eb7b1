"""Tables that commands print on stdout: aligned plain columns, readable by people and by
scripts."""

from __future__ import annotations

import sys
from collections.abc import Collection

from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from embedserve_store.terminal.plain_console import plain_console
from embedserve_store.terminal.sanitize import sanitize

out = plain_console()


def grid(*columns: str, numbers: Collection[str] = ()) -> Table:
    """Returns a table without lines between its columns. Columns in ``numbers`` are
    right-aligned."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=True)
    return table


def plain(cell: str) -> Text:
    """Returns a cell for untrusted text, with cursor movements escaped."""
    return Text(sanitize(cell))


def show(title: str, table: Table) -> None:
    """Prints the title, then the table. The title is printed separately, because as part of the
    table it would wrap to the table's width. A line too long for the terminal overflows; rich would
    otherwise truncate the cells."""
    out.print(sanitize(title), style="italic", soft_wrap=True)
    width = Measurement.get(out, out.options.update(max_width=sys.maxsize), table).maximum
    plain_console(width=width).print(table)


def write(line: str) -> None:
    """Prints a line without wrapping, with cursor movements escaped."""
    out.print(sanitize(line), soft_wrap=True)
