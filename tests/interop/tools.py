"""Finds the programs that these tests run, and says how to get one that is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "interop"
"""What is installed or built for these tests and kept for their next run; git ignores it."""
SEARCHED = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin"])
"""Debian's servers are in a folder that is not on every user's PATH."""
TOOL_S_MAX = 600
ANSWER_S_MAX = 60
"""Of a server, for clients whose own patience is shorter."""


def tool(name: str) -> str:
    """The path of a program; the test fails where there is none."""
    path = shutil.which(name, path=SEARCHED)
    if path is None:
        pytest.fail(f"{name} is missing: run deploy/install-debian-packages.sh", pytrace=False)
    return path


def run_tool(
    name: str,
    *arguments: object,
    stdin: bytes = b"",
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    limit_s: float = TOOL_S_MAX,
) -> bytes:
    """What a program wrote to stdout; it must end well."""
    done = subprocess.run(
        [tool(name), *map(str, arguments)],
        input=stdin,
        capture_output=True,
        timeout=limit_s,
        env={**os.environ, **(environment or {})},
        cwd=cwd,
    )
    said = done.stderr.decode(errors="replace")
    assert done.returncode == 0, f"{name} ended with {done.returncode}: {said}"
    return done.stdout
