"""`embedserve inspect`: a store, a model and a version, as a person reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from embedserve.cli import app
from embedserve.commands.inspect import show_plan
from embedserve_store.manifest import Manifest, TableSpec
from embedserve_store.plan import Plan, Shard, TablePlan


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def shown(*arguments: str | Path) -> list[list[str]]:
    """The words of each line."""
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return [line.split() for line in result.stdout.splitlines()]


def test_a_store_shows_its_models(store: Path) -> None:
    assert ["shop", "1", "1", "7", "112", "B"] in shown(store)


def test_an_empty_store_says_so(tmp_path: Path) -> None:
    assert shown(tmp_path)[-1][-2:] == ["no", "models"]


def test_a_model_shows_its_versions(store: Path) -> None:
    (line,) = [line for line in shown(store, "shop") if line and line[0] == "1"]
    assert line[1:5] == ["1", "7", "112", "B"]
    assert line[-1] == "2"  # ranks


def test_a_version_shows_its_tables_and_which_rows_lie_on_which_rank(store: Path) -> None:
    lines = shown(store, "shop", "1")
    assert ["t_user", "7", "4", "float32", "sum", "112", "B", "user", "row_wise"] in lines
    assert ["t_user", "rows", "0-3", "rows", "4-6"] in lines
    assert ["bytes", "64", "B", "48", "B"] in lines


def test_a_plan_narrower_than_its_title(capsys: pytest.CaptureFixture[str]) -> None:
    manifest = Manifest("m", 1, (TableSpec("t", 7, 4, ("t",), "sum", "float32"),), False)
    on_one_rank = TablePlan("table_wise", (Shard(0, 0, 7, 0, 4),))
    show_plan(manifest, Plan(1, {"t": on_one_rank}, {}))
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["plan", "over", "1", "rank"],
        ["table", "rank", "0"],
        ["t", "rows", "0-6"],
        ["bytes", "112", "B"],
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("shop", "2"), "version 2 does not exist, there are [1]"), (("shoes",), "shoes")],
)
def test_what_is_not_there_is_one_line(
    store: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = CliRunner().invoke(app, ["inspect", str(store), *arguments])
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert message in line
