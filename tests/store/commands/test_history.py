"""Tests of `embedserve history`: it shows each change, as text and as JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from embedserve.commands.cli import app


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    return result.exit_code, result.stdout


def test_history_shows_the_latest_change_first(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("EMBEDSERVE_BY", "ann")
    own_store = shutil.copytree(store, tmp_path / "own")
    shutil.rmtree(own_store / ".history", ignore_errors=True)
    assert run("history", own_store) == (0, f"history of {own_store}: none\n")
    run("note", own_store, "shop", "1", "recall\nis up \x1b[31m")
    run("alias", own_store, "shop", "stable", "1")
    code, out = run("history", own_store, "shop")
    title, heading, first, second = out.splitlines()
    assert (code, title) == (0, "history of shop")
    assert heading.split() == [
        "when",
        "what",
        "model",
        "versions",
        "who",
        "host",
        "source",
        "detail",
    ]
    assert first.split()[1:5] == ["alias", "shop", "1", "ann"]
    assert "is up" in second
    assert "\x1b" not in out
    code, out = run("history", own_store, "--json", "--last", "1")
    assert (code, json.loads(out)["what"]) == (0, "alias")
