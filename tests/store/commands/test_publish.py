"""Tests of `embedserve publish`: its summary of the published version."""

from pathlib import Path

import pytest
import torch
from pooled import collection
from store.commands.conftest import error_of, run
from torchrec import PoolingType

from embedserve_store import IdRule, ModelStore, publish, verify
from embedserve_store.commands.publish import report
from embedserve_store.parts.part import Part


@pytest.mark.parametrize(
    ("ids", "expected_lines"),
    [(100, ["t: its vocabulary has 100 ids for 300 rows: 200 rows have no id"]), (300, [])],
)
def test_vocabulary_shorter_than_its_table_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ids: int, expected_lines: list[str]
) -> None:
    published = publish(
        collection((("t", 300, 4, ["f"], PoolingType.SUM),)),
        tmp_path,
        model="m",
        ids={"t": IdRule("map")},
        vocabularies={"t": list(range(ids))},
    )
    report(published)
    assert [
        line for line in capsys.readouterr().err.splitlines() if "its vocabulary" in line
    ] == expected_lines


@pytest.fixture
def command(tmp_path: Path) -> tuple[str | Path, ...]:
    """Returns the command that publishes a table of 1,000 rows as "m" into the store "s"."""
    torch.save({"embedding_bags.t.weight": torch.ones(1000, 4)}, tmp_path / "c.pt")
    (tmp_path / "t.yaml").write_text(
        "tables: [{name: t, num_embeddings: 1000, embedding_dim: 4, feature_names: [t], "
        "pooling: sum}]\nis_weighted: false\n"
    )
    return "publish", tmp_path / "c.pt", tmp_path / "t.yaml", tmp_path / "s", "--model", "m"


def test_if_changed_reports_and_skips_an_unchanged_version(
    tmp_path: Path, command: tuple[str | Path, ...]
) -> None:
    def last_line(*more: str) -> str:
        code, _, stderr = run(*command, "--if-changed", *more)
        assert code == 0, stderr
        return stderr.splitlines()[-1]

    assert last_line().startswith("published m version 1")
    assert last_line("--meta", "run=2") == (
        "m version 1 has the same rows, tables, id rules and plan: nothing was published; it is "
        f"{tmp_path}/s/m/1"
    )
    assert last_line("--dtype", "int8").startswith("published m version 2")


def test_a_model_is_published_for_several_hosts(
    tmp_path: Path, command: tuple[str | Path, ...]
) -> None:
    store = tmp_path / "s"

    def last_lines(*more: str) -> list[str]:
        code, _, stderr = run(*command, *more)
        assert code == 0, stderr
        return stderr.splitlines()[-4:]

    assert last_lines("--hosts", "3") == [
        "part 0 of 3: 5.2 KiB",
        "part 1 of 3: 5.2 KiB",
        "part 2 of 3: 5.2 KiB",
        f"published m version 1: 15.6 KiB over 3 hosts with 1 rank each, in {store}/m/1",
    ]
    whole = ModelStore(store).load("m")
    assert whole.plan.hosts is not None
    assert whole.plan.hosts.rows == {"t": (0, 333, 666, 1000)}
    verify(ModelStore(store, selection=Part(2, 3)).load("m"))
    assert "over 1 rank," in last_lines("--hosts", "1")[-1]
    assert ModelStore(store).load("m").plan.hosts is None
    error = error_of(*command, "--hosts", "3", "--sharding=table_wise")
    assert "hosts is 3, but part 1 would have no rows: use fewer hosts" in error


@pytest.mark.parametrize("option", ["--dtype", "--sharding", "--device-memory"])
def test_empty_option_is_rejected(command: tuple[str | Path, ...], option: str) -> None:
    """Guards against an unset variable in a script: a version with the defaults would appear."""
    assert " is ''" in error_of(*command, option, "")
