"""Tests that each example runs from an empty folder, and that its service returns the whole model's
results."""

import re
from pathlib import Path

import pytest
from documents import ROOT
from forkserver import PYTHON, run_warm
from running_servers import COMMAND_S_MAX, free_port


@pytest.mark.parametrize(
    ("name", "ports", "expected_line"),
    [
        ("dlrm", ("http", "grpc", "ranker"), "1,000 impressions ranked"),
        ("two_tower", ("http", "grpc"), "31,245 movies indexed"),
    ],
)
def test_example_results_equal_those_of_the_whole_model(
    name: str, ports: tuple[str, ...], expected_line: str, tmp_path: Path
) -> None:
    command: list[str | Path] = [*PYTHON, "-m", f"examples.{name}.run", "--folder", tmp_path]
    for port in ports:
        command += [f"--{port}-port", str(free_port())]
    done = run_warm(command, cwd=ROOT, timeout=COMMAND_S_MAX, has_warm_children=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert expected_line in done.stdout
    assert re.search(r"greatest difference from the whole model.*: [\d.e-]+$", done.stdout, re.M)
