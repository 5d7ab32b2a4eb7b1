"""Tests of the texts that commands print: unchanged, even if they look like rich's markup or
emoji."""

import pytest

from embedserve_store.terminal.aligned_columns import grid, show, write
from embedserve_store.terminal.console import say

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
