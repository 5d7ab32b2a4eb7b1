"""Each example runs from nothing, and its service answers as its whole model does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT
from running_servers import COMMAND_S_MAX, free_port


@pytest.mark.parametrize(
    ("name", "ports", "said"),
    [
        ("dlrm", ("http", "grpc", "ranker"), "1,000 impressions ranked"),
        ("two_tower", ("http", "grpc"), "31,245 movies indexed"),
    ],
)
def test_an_example_gives_what_its_whole_model_gives(
    name: str, ports: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-W", "ignore", "-m", f"examples.{name}.run"]
    command += ["--folder", str(tmp_path)]
    for port in ports:
        command += [f"--{port}-port", str(free_port())]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=COMMAND_S_MAX, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert said in done.stdout
    assert re.search(r"greatest difference from the whole model.*: [\d.e-]+$", done.stdout, re.M)
