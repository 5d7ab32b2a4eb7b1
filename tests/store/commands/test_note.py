"""Tests of `embedserve note`: inspect shows the notes of a version."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from embedserve.commands.cli import app


@pytest.fixture
def own(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a test's own copy of the store, with version 1 of "shop"."""
    monkeypatch.setenv("COLUMNS", "200")
    return shutil.copytree(store, tmp_path / "own")


def run(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_inspect_shows_notes(own: Path, scheme: str) -> None:
    store = f"{scheme}{own}"
    shown = ("inspect", store, "shop", "1")
    assert "note " not in run(*shown)[1]
    assert run("note", store, "shop", "1", "recall is up") == (
        0,
        "",
        "shop: note 1 of version 1\n",
    )
    assert run("note", store, "shop", "1", "two\nlines \x1b[31m")[0] == 0
    code, out, _ = run(*shown)
    assert code == 0
    first, second = [line for line in out.splitlines() if line.startswith("note ")]
    assert first.endswith(": recall is up")
    assert "@" in first
    assert "two" in second
    assert "\x1b" not in out


def test_what_cannot_be_is_one_line(own: Path) -> None:
    code, out, said = run("note", own, "shop", "2", "x")
    assert (code, out) == (1, "")
    (line,) = said.splitlines()
    assert "shop: version 2 does not exist; versions are 1" in line
