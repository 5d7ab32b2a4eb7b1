"""Tests of what commands print: texts unchanged, even if they look like rich's markup or emoji, and
few progress bars."""

import pytest

from embedserve_store.terminal.aligned_columns import grid, show, write
from embedserve_store.terminal.console import BARS_MAX, say, table_progress

TEXT = "user:id:1 clicks[last] [/b] 7"


def test_say_and_write_print_text_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    write(TEXT)
    say(TEXT)
    assert capsys.readouterr() == (f"{TEXT}\n", f"{TEXT}\n")


def test_show_prints_title_headings_and_cells_unchanged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = grid(TEXT)
    table.add_row(TEXT)
    show(TEXT, table)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [TEXT] * 3


def test_show_prints_cells_of_any_width_whole(capsys: pytest.CaptureFixture[str]) -> None:
    versions = ", ".join(map(str, range(5_000)))
    table = grid("model", "versions")
    table.add_row("movies", versions)
    show("store", table)
    assert capsys.readouterr().out.splitlines()[2].split(maxsplit=1) == ["movies", versions]


def test_only_the_last_bars_of_many_tables_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with table_progress() as report:
        for table in range(BARS_MAX + 2):
            report(f"table_{table}", 1, 1, 4)
    shown = [line.split()[0] for line in capsys.readouterr().err.splitlines()]
    assert shown == [f"table_{table}" for table in range(2, BARS_MAX + 2)]
