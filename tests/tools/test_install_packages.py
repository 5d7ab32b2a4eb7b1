"""Tests of make's output while pip installs: a line for each package, pip's errors and status."""

import subprocess
import sys
from pathlib import Path

import pytest
from install_packages import steps

PROGRAM = Path(__file__).parents[2] / "tools/install_packages.py"


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("Downloading numpy-2.4.1-cp311-cp311-linux_x86_64.whl (16.9 MB)", "numpy 2.4.1 (16.9 MB)"),
        ("  Downloading tqdm-4.67.0.tar.gz (10 kB)", "tqdm 4.67.0 (10 kB)"),
        ("Using cached typer-0.15.1-py3-none-any.whl (44 kB)", "typer 0.15.1 (44 kB, cached)"),
        ("  Downloading numpy-2.4.1-cp311-cp311-linux_x86_64.whl.metadata (6.6 kB)", ""),
        ("Collecting numpy>=1.26 (from embedserve-client==0.1.0)", ""),
    ],
)
def test_progress_of_a_pip_step_is_shown(line: str, step: str) -> None:
    assert list(steps(iter([line + "\n"]))) == [step]


def test_unpacking_is_shown_until_pip_ends() -> None:
    lines = iter(
        ["Installing collected packages: a, b, c\n", "  more\n", "Successfully installed\n"]
    )
    assert list(steps(lines)) == ["unpacking 3 packages", ""]


def test_size_of_a_local_file_is_shown(tmp_path: Path) -> None:
    wheel = tmp_path / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl"
    wheel.write_bytes(bytes(1_500_000))
    assert list(steps(iter([f"Processing {wheel}\n"]))) == ["torch 2.13.0+cpu (1.5 MB, here)"]


def test_errors_and_exit_status_of_pip_are_passed_on() -> None:
    command = [sys.executable, str(PROGRAM), "--no-index", "no-such-package-of-embedserve"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "ERROR: No matching distribution found for no-such-package-of-embedserve" in done.stderr
