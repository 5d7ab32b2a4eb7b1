"""Runs the commands of a page, and compares their output with the page."""

import re
import shlex
import subprocess
from pathlib import Path

from documents import Block
from forkserver import PYTHON, run_warm
from running_servers import COMMAND_S_MAX

MODULES = {"embedserve": ("-m", "embedserve"), "python": ()}


def run(line: str, folder: Path) -> str:
    """Runs a command of the page and returns its output."""
    program, *arguments = shlex.split(line)
    if program in MODULES:
        done = run_warm([*PYTHON, *MODULES[program], *arguments], cwd=folder, timeout=COMMAND_S_MAX)
    else:
        done = subprocess.run(
            [program, *arguments], cwd=folder, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    return str(done.stdout + done.stderr)


def assert_prints(block: Block, output: str) -> None:
    """Checks that every line of ``block`` is in ``output``.

    Spaces are ignored, and … matches any text.
    """
    without_spaces = re.sub(r"\s", "", output)
    for line in block.text.splitlines():
        pieces = re.sub(r"\s", "", line).split("…")
        assert re.search(".*".join(map(re.escape, pieces)), without_spaces), (line, output)
