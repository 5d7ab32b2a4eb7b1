"""Tests of `embedserve describe`: it writes a draft to stdout or a new file, or prints one line
with the reason why not."""

from pathlib import Path

import pytest
import torch
from pooled import collection
from store.commands.conftest import error_of, run
from torchrec import PoolingType

from embedserve_store.format.table_spec import TableSpec
from embedserve_store.publishing.write_expected import write_expected
from embedserve_store.sources.description import read_description

USER = TableSpec("user", 10, 4, ("user",), "sum", "float32")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    state = {
        "model.ebc.embedding_bags.user.weight": torch.ones(10, 4),
        "ema.ebc.embedding_bags.user.weight": torch.ones(10, 4),
        "model.over.weight": torch.ones(4, 4),
    }
    torch.save(state, tmp_path / "c.pt")
    return tmp_path / "c.pt"


def test_draft_on_stdout_can_be_read_back(checkpoint: Path, tmp_path: Path) -> None:
    code, out, _ = run("describe", checkpoint, "--prefix", "model")
    assert code == 0
    (tmp_path / "d.yaml").write_text(out)
    assert read_description(tmp_path / "d.yaml").tables == (USER,)


@pytest.mark.parametrize("name", ["\x1b[2J.pt", "\udcff.pt", "a\nb: [.pt"])
def test_draft_of_a_checkpoint_with_an_unprintable_name_can_be_read_back(
    checkpoint: Path, tmp_path: Path, name: str
) -> None:
    output = tmp_path / "d.yaml"
    renamed = checkpoint.rename(tmp_path / name)
    code, _, error = run("describe", renamed, "--prefix", "model", "--output", output)
    assert code == 0, error
    assert read_description(output).tables == (USER,)


def test_draft_file_is_never_overwritten(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "d.yaml"
    code, out, _ = run("describe", checkpoint, "--prefix", "model", "--output", output)
    assert (code, out) == (0, "")
    assert read_description(output).tables == (USER,)
    output.write_text("mine")
    assert "is there already" in error_of(
        "describe", checkpoint, "--prefix", "model", "--output", output
    )
    assert output.read_text() == "mine"


def test_expected_results_leave_nothing_to_check(tmp_path: Path) -> None:
    ebc = collection([("t", 30, 4, ["a", "b"], PoolingType.SUM)])
    torch.save(ebc.state_dict(), tmp_path / "c.pt")
    write_expected(ebc, tmp_path / "e.safetensors")
    output = tmp_path / "d.yaml"
    code, _, stderr = run(
        "describe", tmp_path / "c.pt", "--expected", tmp_path / "e.safetensors", "--output", output
    )
    assert (code, stderr) == (0, f"wrote {output}: nothing is left to check, publish with it\n")
    described = read_description(output)
    assert (described.guesses, described.tables[0].feature_names) == ((), ("a", "b"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "choose one with prefix (--prefix)"),
        (("--prefix", "over"), "no key under 'over' ends in"),
    ],
)
def test_ambiguous_or_unknown_prefix_is_a_one_line_error(
    checkpoint: Path, arguments: tuple[str, ...], message: str
) -> None:
    assert message in error_of("describe", checkpoint, *arguments)


def test_missing_checkpoint_is_an_error(tmp_path: Path) -> None:
    assert "none: cannot be read: No such file" in error_of("describe", tmp_path / "none")
