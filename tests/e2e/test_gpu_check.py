"""Tests of ``make gpu-check`` on CPU ranks: it prints a table, and stops at a wrong result."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from documents import ROOT
from forkserver import PYTHON, run_warm
from gpu_check import STEPS, run
from gpu_timings import CheckOptions, Row

CHECK_S_MAX = 600
PYTHONPATH = ":".join(("server", "model_store", "clients", "proto", "tests", "bench"))


def test_gpu_check_runs_every_step_on_cpu_ranks(tmp_path: Path) -> None:
    done = run_warm(
        [*PYTHON, ROOT / "bench" / "gpu_check.py", "--devices", "cpu:2", "--quick"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": PYTHONPATH, "EMBEDSERVE_BENCH_CACHE": str(tmp_path)},
        timeout=CHECK_S_MAX,
        has_warm_children=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    for step in STEPS:
        assert any(line.startswith(step.__name__.replace("_", " ")) for line in lines)
    assert "WRONG" not in done.stdout


def test_gpu_check_stops_after_a_wrong_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def first(options: CheckOptions) -> Iterator[Row]:
        yield "devices", options.devices

    def second(options: CheckOptions) -> Iterator[Row]:
        yield "a sum", "right"
        np.testing.assert_allclose(2, 3)
        yield "another", "never asked"

    def third(options: CheckOptions) -> Iterator[Row]:
        raise AssertionError("not to be done")

    options = CheckOptions("cpu:1", is_quick=True, folder=tmp_path)
    assert run(options, [first]) == 0
    capsys.readouterr()
    assert run(options, [first, second, third]) == 1
    found = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in found] == ["first", "second", "second"]
    assert found[2][1:] == ["WRONG", "Not equal to tolerance rtol=1e-07, atol=0"]
