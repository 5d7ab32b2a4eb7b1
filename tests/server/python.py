"""Runs Python in another process with the import path of this process."""

import os
import subprocess
import sys
from pathlib import Path

from forkserver import PYTHON, run_warm

RUN_S_MAX = 120


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}


def run_python(
    *arguments: str | Path, timeout_s: float = RUN_S_MAX
) -> subprocess.CompletedProcess[str]:
    """Returns the exit status and the output; raises nothing for a status other than 0."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def run_warm_python(
    *arguments: str | Path, timeout_s: float = RUN_S_MAX
) -> subprocess.CompletedProcess[str]:
    """Runs Python with torch already imported; returns the exit status and the output."""
    return run_warm([*PYTHON, *arguments], env=environment(), timeout=timeout_s)
