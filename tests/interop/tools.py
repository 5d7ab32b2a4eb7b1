"""Finds the programs that the tests run, and says how to install a missing one."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "interop"
"""Folder of packages and programs built for the tests, kept for the next run; git ignores it."""
SEARCHED = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin"])
"""Search path. Debian's servers are in /usr/sbin, which is not on every user's PATH."""
TOOL_S_MAX = 600
ANSWER_S_MAX = 60
"""Timeout in seconds for a response, for clients with shorter defaults."""
ANY_SIZE = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
"""Options of a gRPC channel without limits of its own."""


def tool(name: str) -> str:
    """Returns the path of a program; the test fails if it is missing."""
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
    """Runs a program that must succeed, and returns its stdout."""
    done = subprocess.run(
        [tool(name), *map(str, arguments)],
        input=stdin,
        capture_output=True,
        timeout=limit_s,
        env={**os.environ, **(environment or {})},
        cwd=cwd,
    )
    errors = done.stderr.decode(errors="replace")
    assert done.returncode == 0, f"{name} ended with {done.returncode}: {errors}"
    return done.stdout
