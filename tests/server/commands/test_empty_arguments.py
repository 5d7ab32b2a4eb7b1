"""Tests of empty arguments, as for an unset variable in a script: an error names the argument."""

import pytest
from typer.testing import CliRunner

from embedserve.commands.cli import app


@pytest.mark.parametrize(
    "arguments",
    [
        ("copy", "", "target"),
        ("copy", "store", ""),
        ("demo", ""),
        ("deltas", "list", "", "m"),
        ("inspect", ""),
        ("plan", "", "model"),
        ("plan", "store", "model", "--kubernetes", "--store", ""),
        ("publish", "checkpoint", "tables", "", "--model", "m"),
        ("serve", ""),
    ],
)
def test_empty_store_is_rejected(arguments: tuple[str, ...]) -> None:
    """Guards against an unset variable in a script: the current folder would be the store."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "it is empty, expected a folder or a URL: is a variable unset?" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("publish", "", "tables", "store", "--model", "m"), "'checkpoint'"),
        (("publish", "checkpoint", "", "store", "--model", "m"), "'tables'"),
        (("describe", "checkpoint", "--output="), "'--output'"),
        (("verify", "store", "m", "--cache", ""), "'--cache'"),
        (("deltas", "verify", "store", "m", "--key", ""), "'--key'"),
    ],
)
def test_empty_path_is_rejected(arguments: tuple[str, ...], name: str) -> None:
    """Guards against an unset variable in a script: the current folder would be the path."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert name in line
    assert "it is empty, expected a path: is a variable unset?" in line


@pytest.mark.parametrize("flag", ["--tokens", "--tls-cert", "--default-model"])
def test_empty_flag_of_serve_is_rejected(flag: str) -> None:
    """Guards against an unset variable in a script: the server would start without tokens."""
    result = CliRunner().invoke(app, ["serve", "store", flag, ""])
    assert result.exit_code == 2
    assert f"'{flag}' " in result.stderr
    assert "it is empty: leave it out, or is a variable unset?" in result.stderr
