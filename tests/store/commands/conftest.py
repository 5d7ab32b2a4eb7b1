"""Fixtures: a store for the commands to read, and a copy to change. Runs commands."""

import shutil
from pathlib import Path

import pytest
from server.small_store import TWO_RANKS, publish_small_model
from typer.testing import CliRunner

from embedserve.commands.cli import app


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_small_model(tmp_path_factory.mktemp("store"), *TWO_RANKS)


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def own_store(store: Path, tmp_path: Path) -> Path:
    """Returns a test's own copy of the store, with version 1 of "shop"."""
    return shutil.copytree(store, tmp_path / "own")


def run(*arguments: str | Path | int) -> tuple[int, str, str]:
    """Runs `embedserve`; returns the exit status, stdout and stderr."""
    result = CliRunner().invoke(app, [*map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def error_of(*arguments: str | Path | int) -> str:
    """Runs `embedserve`, which must fail with status 1 and one line on stderr; returns that
    line."""
    code, out, stderr = run(*arguments)
    assert (code, out, stderr.count("\n")) == (1, "", 1), stderr
    return stderr
