"""Tests of `embedserve token`: the line for a token file, and the token."""

import json
import sys
import time

import pytest
from typer.testing import CliRunner, Result

from embedserve.access.grants import grant_of
from embedserve.commands.cli import app
from embedserve.commands.token import make_token


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["token", "ranker", *arguments])


def test_expiry_in_days_counts_from_now() -> None:
    before_s = int(time.time())
    result = run("--expires", "90d", "--models", "a,b")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["models"] == ["a", "b"]
    days = 90 * 24 * 3600
    assert before_s + days <= grant_of(result.stdout).expires_s <= time.time() + days


@pytest.mark.parametrize("expires", ["2020-01-01", "0d", "2020-01-01T12:00:00+02:00"])
def test_expiry_in_the_past_is_rejected(expires: str) -> None:
    result = run("--expires", expires)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"embedserve: expires is {expires!r}, expected a time in the future\n"


def test_message_about_an_invalid_expiry_names_both_notations() -> None:
    message = "expires is '90', expected days such as 90d, or a time such as 2027-01-31"
    assert run("--expires", "90").stderr == f"embedserve: {message}\n"


@pytest.mark.parametrize("option", ["--models=", "--models=,", "--roles=", "--expires="])
def test_empty_restriction_is_rejected(option: str) -> None:
    """Guards against an unset variable in a script: the token would not be restricted."""
    result = run(option)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"embedserve: {option[2:].partition('=')[0]} is " in result.stderr


def test_token_is_not_printed_to_stdout_if_stderr_is_closed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with pytest.raises(ValueError, match="stderr is closed"):
        make_token("ranker", None, "embed", None, None, None)
    assert capsys.readouterr().out == ""
